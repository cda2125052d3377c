"""What tests share: a supervisor that must leave nothing, and how generated inputs are drawn (see Makefile)."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from joining import Client, Node
from rank_runs import cold_and_warm
from stage import Stage
from standins import BOUND, children, until

from nvflare_torchrun_plugin.node import procs
from nvflare_torchrun_plugin.supervision import channel, group

__all__ = ["cold_and_warm"]

# The same ones in every run of a change, new ones in `make fuzz`.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("new", deadline=None, max_examples=2000)
settings.load_profile("same")

# A shell starts what runs in its background deaf to it, and the processes of the tests would be so, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before, threads = children(), threading.active_count()
    stage = Stage(tmp_path)
    assert stat.S_IMODE(Path(stage.supervisor.directory).stat().st_mode) == 0o700
    yield stage
    stage.supervisor.close("the test is over", BOUND)
    assert list(temporary.iterdir()) == []
    assert threading.active_count() == threads
    until(lambda: children() <= before, "processes are left")


@pytest.fixture
def ended() -> Iterator[contextlib.ExitStack]:
    """Ends what a test has started, and sees to it that nothing is left of it."""
    before = set(procs.descendants(os.getpid()))
    with contextlib.ExitStack() as stack:
        yield stack
    until(lambda: set(procs.descendants(os.getpid())) <= before, "all processes are gone")


@pytest.fixture
def client(tmp_path: Path, ended: contextlib.ExitStack) -> Client:
    made = Client(tmp_path, 3)
    ended.callback(made.end)
    return made


@pytest.fixture
def node(tmp_path: Path, ended: contextlib.ExitStack) -> Any:
    def start(rank: int | None, *options: str, **environ: str) -> Node:
        started = Node(tmp_path, rank, *options, **environ)
        ended.callback(started.process.wait)
        ended.callback(started.process.terminate)
        return started

    return start


@pytest.fixture
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short bounds, and nothing left at the end."""
    monkeypatch.setattr(group, "_STOP_MARGIN", 0.3)
    monkeypatch.setattr(group, "_SWEEP_BOUND", 2.0)
    for name in ("KILL_BOUND", "CLOSING"):
        monkeypatch.setattr(channel, name, 0.3)
    before = children()
    yield
    until(lambda: children() <= before, "processes are left")
