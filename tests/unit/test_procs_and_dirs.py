"""Processes as /proc shows them, and the private directory."""

from __future__ import annotations

import ast
import os
import signal
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from nvflare_torchrun_plugin.node import private_dir, procs

GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
input()
"""


def test_descendants_have_sessions_of_their_own_or_not() -> None:
    marker = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", GRANDCHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TEST_MARKER": f"a-{marker}-b"},
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert procs.descendants(child.pid) == [grandchild]
        assert {child.pid, grandchild} <= set(procs.descendants(os.getpid()))
        assert procs.parent(grandchild) == child.pid
        assert procs.is_below(grandchild, os.getpid())
        assert not procs.is_below(os.getpid(), grandchild)
        assert sorted(procs.with_variable("TEST_MARKER", marker)) == sorted([child.pid, grandchild])
        assert procs.with_variable("OTHER_MARKER", marker) == []
        procs.send_signal([grandchild, child.pid], signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "code"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_exit_code_of_a_zombie(script: str, code: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", script])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert procs.exit_code_of_zombie(child.pid) == code
    assert not procs.runs(child.pid)
    assert child.pid not in procs.descendants(os.getpid())
    assert child.wait() == code
    assert procs.exit_code_of_zombie(child.pid) is None
    assert procs.parent(child.pid) is None
    procs.send_signal([child.pid], signal.SIGTERM)


def test_a_running_process_has_no_exit_code() -> None:
    assert procs.exit_code_of_zombie(os.getpid()) is None
    assert procs.runs(os.getpid())


def test_processes_of_others_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under sudo, and where /proc is mounted with hidepid=1."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    own = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        assert procs.parent(own) is None
        assert procs.descendants(own) == []
    monkeypatch.setattr(os, "kill", refuse)
    procs.send_signal([own], signal.SIGTERM)


@pytest.mark.parametrize(
    ("code", "name"),
    [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-15, "SIGTERM"), (-99, "signal 99")],
)
def test_names_of_ends(code: int, name: str) -> None:
    assert procs.signal_name(code) == name


@pytest.fixture
def odd_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory whose path is longer than that of a Unix socket may be."""
    folder = tmp_path / ("long " * 20) / "ünd 'quotes\" \n"
    folder.mkdir(parents=True)
    assert len(os.fsencode(folder)) > 107
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_sockets_work_however_long_the_path(odd_tmpdir: Path) -> None:
    directory = private_dir.create("nvfl-")
    assert Path(directory).parent == odd_tmpdir
    assert stat.S_IMODE(Path(directory).stat().st_mode) == 0o700
    with private_dir.listen(directory, "ranks") as server, private_dir.connect(directory, "ranks") as client:
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
        with pytest.raises(OSError, match="in use"):
            private_dir.listen(directory, "ranks")
    private_dir.remove(directory)
    assert not Path(directory).exists()
    private_dir.remove(directory)


def test_nobody_there_is_an_error(odd_tmpdir: Path) -> None:
    directory = private_dir.create("nvfl-")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count of descriptors, not of paths
    with pytest.raises(FileNotFoundError):
        private_dir.connect(directory, "ranks")
    private_dir.remove(directory)
    with pytest.raises(FileNotFoundError):
        private_dir.listen(directory, "ranks")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(odd_tmpdir: Path) -> None:
    maker = (
        "from nvflare_torchrun_plugin.node import private_dir\n"
        "directory = private_dir.create('nvfl-x-')\nprivate_dir.hold(directory)\n"
        "print(ascii(directory), flush=True)\ninput()\n"
    )
    environ = {**os.environ, "TMPDIR": str(odd_tmpdir)}
    command = [sys.executable, "-c", maker]
    makers = [
        subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    killed, alive, recent = makers
    made = []
    for process in makers:
        assert process.stdout is not None
        made.append(Path(ast.literal_eval(process.stdout.readline())))
    for process in (killed, recent):
        process.kill()
        process.wait()
    other = odd_tmpdir / "nvfl-y-1"
    other.mkdir()
    for directory in (*made[:2], other):
        os.utime(directory, (0, 0))
    try:
        private_dir.remove_stale("nvfl-x-")
        assert [directory.exists() for directory in (*made, other)] == [False, True, True, True]
    finally:
        alive.communicate("\n")
