"""What the console command loads: its verbs start at once, for they load neither PyTorch nor NVFlare."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"nvflare", "torch", "numpy"}
TRAIN = "train.py"


def loaded(*words: str, cwd: Path) -> tuple[int, set[str], str]:
    """Run the console command; return its exit code, the packages that its process has loaded, and its output."""
    script = shutil.which("nvflare-torchrun")
    assert script is not None
    # The option is this process's alone: what it starts does not inherit it.
    argv = [sys.executable, "-X", "importtime", script, *words]
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.returncode, {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}, done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("run", "--help"), 0),
        (("plan", "--nodes", "2", "--nproc-per-node", "2", TRAIN), 0),
        (("plan", "--nodes", "localhost,gpu-1", "--master-addr", "gpu-0", "--json", TRAIN), 0),
        # Its node cannot be started: with all that a run needs before.
        (("run", "--python", "/nonexistent/python", "--run-dir", "run", TRAIN), 1),
        (("doctor", "--help"), 0),
        (("templates", "list"), 0),
        (("site", "--help"), 0),
        (("timeline", "--help"), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_neither_torch_nor_nvflare(words: tuple[str, ...], code: int, tmp_path: Path) -> None:
    (tmp_path / TRAIN).touch()
    ended, packages, _ = loaded(*words, cwd=tmp_path)
    assert ended == code
    assert "typer" in packages
    assert packages & HEAVY == set()


def test_a_job_is_read_with_nvflares_own_code(tmp_path: Path) -> None:
    """So the test above would see it."""
    ended, packages, _ = loaded("plan", "--job", "none", cwd=tmp_path)
    assert ended == 2
    assert "nvflare" in packages
