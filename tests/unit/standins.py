"""Short stand-ins for node agents, and launches that start them; what is tested here does not need torchrun."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.contract import Contract
from nvflare_torchrun_plugin.launching.launch import Launch, Member
from nvflare_torchrun_plugin.node import procs

BOUND = 60.0
"""Seconds after which a test gives up on what it waits for."""

HELLO = wire.encode(wire.Hello("0", "2.4", "2.9", "3.11", "standin", 1, 1, 0, 1.0)).decode().strip()
"""A frame, to be printed by a shell."""
READY = wire.encode(wire.Ready(True, None, None, None)).decode().strip()


LATE = 1e9
"""A time of an agent's clock that can only be taken for the moment at which the frame arrives."""


def end(code: int | None = 0, error: str | None = None, stopped: bool = False, at: float = LATE) -> str:
    """Return the last frame, to be printed by a shell."""
    return wire.encode(wire.End(code, (), error, at, stopped)).decode().strip()


def says(*frames: str) -> str:
    """Return shell code that prints the frames."""
    return "printf '%s\\n' " + " ".join(f"'{frame}'" for frame in frames)


def launch(
    folder: Path,
    *agents: str,
    args: tuple[str, ...] = (),
    join_timeout: float = BOUND,
    node_timeout: float = BOUND,
    grace: float = 0.2,
    least: int = 0,
) -> Launch:
    """Return a launch with one node for each agent, which is shell code; its ``$1`` is ``folder``."""
    members = tuple(
        Member(f"host-{rank}", argv, 1)
        for rank, argv in enumerate(("sh", "-c", agent, "sh", str(folder)) for agent in agents)
    )
    return Launch(
        name="standin",
        members=members,
        least=least or len(agents),
        contract=Contract(len(agents), 0, "127.0.0.1", 29400, "run"),
        spans_hosts=False,
        torchrun_args=(),
        env={},
        cwd=str(folder),
        marker=".marker",
        stage="auto",
        forward_env=(),
        module=False,
        target="script.py",
        args=args,
        shown_args=(),
        join_timeout=join_timeout,
        node_timeout=node_timeout,
        hang_timeout=None,
        serves_job=False,
        grace=grace,
        log_dir=str(folder / "logs"),
        log_ranks=None,
    )


class Lines(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logger(name: str) -> tuple[logging.Logger, list[str]]:
    """Return a logger of its own and the list of its messages."""
    handler = Lines()
    made = logging.Logger(name)
    made.addHandler(handler)
    return made, handler.lines


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for the condition; fail when it does not come true in time."""
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def children() -> set[int]:
    """Return what lives below this process."""
    return set(procs.descendants(os.getpid()))
