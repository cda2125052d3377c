"""Which of the client job's variables go to the nodes, and how they read where the job's folder is a copy."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence

from nvflare_torchrun_plugin.node.staging import FOLDER

DEFAULT_FORWARD = ("NCCL_*", "GLOO_*", "UCX_*", "HF_*", "PYTHONPATH")
"""Patterns of variables that go from the client job to every node."""


def forwarded(environ: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """Return the variables whose names match one of the patterns (``fnmatch``, upper and lower case apart)."""
    return {
        name: value
        for name, value in environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def in_copy(path: str, app_dir: str, copy: str, name: str = FOLDER) -> str:
    """Return where a path is on a node with a copy of the folder of that name; one outside of the folder stays."""
    folder = app_dir if name == "." else f"{app_dir}{os.sep}{name}"
    if path == folder or path.startswith(folder + os.sep):
        return copy + path[len(app_dir) :]
    return path


def path_in_copy(search_path: str, app_dir: str, copy: str, name: str = FOLDER) -> str:
    """Return a ``PYTHONPATH`` with each entry as :func:`in_copy` has it."""
    return os.pathsep.join(in_copy(entry, app_dir, copy, name) for entry in search_path.split(os.pathsep))
