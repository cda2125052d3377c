"""An agent's private directory, and by what is known what an agent has started, should it be gone itself."""

from __future__ import annotations

import os
import signal
import time

from nvflare_torchrun_plugin.node import private_dir, procs

DIR_VARIABLE = "NVFL_AGENT_DIR"
"""Names the agent's private directory to the ranks, which remove it from their environment."""
TAG_VARIABLE = "NVFL_AGENT_TAG"
"""Names the agent to everything below it, children that left their session and outlived their rank included."""
AGENT_FILE = "agent"
"""In the directory: the agent's process id."""
_TICK = 0.05


def create(tag: str) -> str:
    """Make this process's directory, which its owner removes, and return its path.

    Args:
        tag: the agent's, unique on its host.
    """
    directory = private_dir.create(_prefix(tag))
    # By the file, and by holding the directory open as long as it lives, a sweep knows this process, should it be
    # stopped: what it was told it no longer hears.
    os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with open(f"{directory}/{AGENT_FILE}", "x", encoding="ascii") as file:
        file.write(str(os.getpid()))
    return directory


def variables(directory: str, tag: str) -> dict[str, str]:
    """Return what the agent adds to the environment of all that it starts."""
    return {DIR_VARIABLE: directory, TAG_VARIABLE: _prefix(tag)}


def sweep(tag: str, bound: float) -> None:
    """Kill the agent with the tag, should it still be there, and what it has started; remove its directory.

    Args:
        tag: the agent's.
        bound: seconds after which what cannot be killed is left.
    """
    import glob
    import tempfile

    directories = glob.glob(f"{glob.escape(tempfile.gettempdir())}/{glob.escape(_prefix(tag))}*")  # noqa: PTH207

    def left() -> list[int]:
        agents = [pid for directory in directories if (pid := _agent_in(directory)) is not None]
        return [*agents, *procs.with_variable(TAG_VARIABLE, _prefix(tag))]

    deadline = time.monotonic() + bound
    while (pids := left()) and time.monotonic() < deadline:
        procs.send_signal(pids, signal.SIGKILL)
        time.sleep(_TICK)
    for directory in directories:
        private_dir.remove(directory)


def _prefix(tag: str) -> str:
    return f"nvfl-agent-{tag}-"


def _agent_in(directory: str) -> int | None:
    """Return the id of the agent whose private directory this is, None when it is gone."""
    try:
        with open(f"{directory}/{AGENT_FILE}", encoding="ascii") as file:
            pid = int(file.read())
        # Not the number alone: another process may have got it.
        return pid if procs.holds(pid, directory) else None
    except (OSError, ValueError):
        return None
