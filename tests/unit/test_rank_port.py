"""The agent's socket for the ranks, against processes that report and end as they like."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.client.moments import Moments
from nvflare_torchrun_plugin.node import private_dir, procs
from nvflare_torchrun_plugin.node.loop import Loop
from nvflare_torchrun_plugin.node.rank_port import RankPort

ORDER = wire.Start("tag", (), {}, "/", False, "script.py", ("x" * (1 << 20),), None, 1.0, False, ())
HELLO = '{"rank": 3, "local_rank": 1}'
BOUND = 60.0


class Port:
    """A rank port, the frames that it sends, and a process that plays a rank."""

    def __init__(self, directory: str, order: wire.Start = ORDER) -> None:
        self.frames: list[wire.Frame] = []
        self.stopping = False
        self._directory = directory
        self._loop = Loop(os.open(os.devnull, os.O_WRONLY))
        reading, writing = os.pipe()
        self._port = RankPort(
            directory, order, os.fstat(writing), self._loop, self.frames.append, lambda: self.stopping, lambda: 3
        )
        os.close(reading)
        os.close(writing)

    def rank(self, code: str) -> subprocess.Popen[bytes]:
        start = (
            "import os, sys\nfrom nvflare_torchrun_plugin.node import private_dir\n"
            f"channel = private_dir.connect(sys.argv[1], 'ranks')\nchannel.sendall(b'{HELLO}\\n')\n"
        )
        # What reads its stdin waits until it is killed: a stdin of the tests' own may be at its end.
        command = [sys.executable, "-c", start + code, self._directory]
        return subprocess.Popen(command, stdin=subprocess.PIPE)

    def look(self, times: int, limit: float) -> None:
        """Look for ranks that are stopped, every second."""
        for _ in range(times):
            self._port.look_for_halted(1.0, limit)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + BOUND
        while not condition():
            assert time.monotonic() < deadline, self.frames
            self._loop.poll(0.05)


@pytest.fixture
def port() -> Iterator[Port]:
    directory = private_dir.create("nvfl-agent-test-")
    yield Port(directory)
    private_dir.remove(directory)


@pytest.fixture
def holding() -> Iterator[Port]:
    """One whose ranks wait."""
    directory = private_dir.create("nvfl-agent-test-")
    yield Port(
        directory, wire.Start(**{**vars(ORDER), "args": (), "holds": True, "preload": ("json", "csv:reader")})
    )
    private_dir.remove(directory)


def ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process is a zombie, or has gone when somebody else collected it."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(
    ("how", "code"), [("os.kill(os.getpid(), 9)", -9), ("os._exit(7)", 7), ("os._exit(0)", 0)]
)
def test_a_rank_that_is_gone_before_its_orders_is_known_with_its_code(port: Port, how: str, code: int) -> None:
    process = port.rank(how)
    ended(process)
    port.until(lambda: len(port.frames) == 2)
    up, end = port.frames
    assert up == wire.RankUp(3, 1, process.pid)
    assert isinstance(end, wire.RankEnd)
    assert (end.rank, end.code, end.stopped) == (3, code, False)
    process.wait()


@pytest.mark.parametrize("missing", [True, False], ids=["in this Python", "in this kernel"])
def test_without_pidfds_the_end_of_the_connection_tells(
    port: Port, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    def unknown(_pid: int) -> int:
        raise OSError(errno.ENOSYS, "pidfd_open")

    if missing:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", unknown)
    process = port.rank("os._exit(7)")
    ended(process)
    port.until(lambda: len(port.frames) == 2)
    end = port.frames[1]
    assert isinstance(end, wire.RankEnd)
    assert (end.rank, end.code) == (3, 7)
    process.wait()


@pytest.mark.slow
def test_a_code_that_torchrun_took_is_learnt_from_its_summary(port: Port) -> None:
    process = port.rank("sys.stdin.read()")
    port.until(lambda: len(port.frames) == 1)
    process.kill()
    process.wait()
    port.until(lambda: len(port.frames) == 2)
    port.stopping = True
    port._port.learn_from(f"  exitcode  : -9 (pid: {process.pid})  (SIGKILL)")
    first, second = port.frames[1:]
    assert isinstance(first, wire.RankEnd)
    assert second == wire.RankEnd(3, -9, first.at, False, 3)
    assert first.code is None


def test_a_rank_that_was_killed_before_it_came_is_named_by_torchrun_s_summary(port: Port) -> None:
    for line in (
        "[0]:",
        "  rank      : 5 (local_rank: 1)",
        "  exitcode  : -9 (pid: 77)  (SIGKILL)",
        # One that ends by itself so early is no rank of ours that runs a script.
        "  rank      : 4 (local_rank: 0)",
        "  exitcode  : 1 (pid: 76)",
    ):
        port._port.learn_from(line)
    up, end = port.frames
    assert up == wire.RankUp(5, 1, 77)
    assert isinstance(end, wire.RankEnd)
    assert end == wire.RankEnd(5, -9, end.at, False, 3)


def test_a_rank_that_reads_its_orders_late_gets_all_of_them(port: Port, tmp_path: Path) -> None:
    got = tmp_path / "got"
    process = port.rank(
        "import pathlib, socket\ndata, fds, _, _ = socket.recv_fds(channel, 1 << 16, 4)\n"
        "while not data.endswith(b'\\n'):\n    data += channel.recv(1 << 16)\n"
        "os.write(fds[0], b'hello\\n')\npathlib.Path(" + repr(str(got)) + ").write_text(str(len(data)))\n"
        "raise SystemExit(3)"
    )
    port.until(lambda: any(isinstance(frame, wire.RankEnd) for frame in port.frames))
    port.until(lambda: wire.Line(3, "hello") in port.frames)
    assert int(got.read_text()) > 1 << 20
    process.wait()


STAYS = "import signal\nsignal.pause()"


def halts(port: Port) -> list[int]:
    return [frame.rank for frame in port.frames if isinstance(frame, wire.Halt)]


@pytest.mark.slow
def test_a_rank_that_is_stopped_for_too_long_is_told_of_again_and_again(port: Port) -> None:
    process = port.rank(STAYS)
    port.until(lambda: len(port.frames) == 1)
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        # It may have been stopped just before the first look.
        port.look(times=3, limit=3.0)
        assert halts(port) == []
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        port.look(times=1, limit=3.0)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    began = time.monotonic()
    port.look(times=5, limit=3.0)
    assert halts(port) == [3, 3]
    last = port.frames[-1]
    assert isinstance(last, wire.Halt)
    assert began - 4.0 <= last.at <= time.monotonic() - 4.0
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_rank_in_the_hands_of_a_debugger_is_left_alone(port: Port) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    attach, detach = 16, 17
    process = port.rank(STAYS)
    port.until(lambda: len(port.frames) == 1)
    if libc.ptrace(attach, process.pid, None, None) != 0:
        pytest.skip(f"no process may trace another one here: {os.strerror(ctypes.get_errno())}")
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    port.look(times=3, limit=1.0)
    assert halts(port) == []
    assert libc.ptrace(detach, process.pid, None, signal.SIGSTOP) == 0
    port.until(lambda: procs.is_stopped(process.pid))
    port.look(times=2, limit=1.0)
    assert halts(port) == [3]
    process.kill()
    process.wait()


@pytest.mark.slow
def test_what_ends_after_the_agent_began_to_stop_says_so(port: Port) -> None:
    process = port.rank('channel.sendall(b\'{"traceback": "boom"}\\n\'); sys.stdin.read()')
    port.until(lambda: len(port.frames) == 2)
    error = port.frames[1]
    assert isinstance(error, wire.RankError)
    assert (error.rank, error.traceback, error.stopped) == (3, "boom", False)
    port.stopping = True
    process.kill()
    port.until(lambda: len(port.frames) == 3)
    end = port.frames[2]
    assert isinstance(end, wire.RankEnd)
    assert end.stopped
    assert end.at >= error.at
    process.wait()


def test_a_process_that_is_not_below_the_agent_is_turned_away(port: Port) -> None:
    answer = Path(port._directory, "answer")
    child = (
        "import os, sys, time\nfrom nvflare_torchrun_plugin.node import private_dir\n"
        "while os.getppid() == int(sys.argv[2]):\n    time.sleep(0.01)\n"
        "channel = private_dir.connect(sys.argv[1], 'ranks')\n"
        "channel.settimeout(60)\n"
        f"try:\n    channel.sendall(b'{HELLO}\\n')\n    data = channel.recv(100)\n"
        "except ConnectionError:\n    data = b''\n"
        "open(sys.argv[3], 'wb').write(data)"
    )
    # Its parent ends, so that it belongs to init and no longer to this process.
    parent = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2], str(os.getpid()), sys.argv[3]])"
    )
    subprocess.run([sys.executable, "-c", parent, child, port._directory, str(answer)], check=True)
    port.until(answer.exists)
    assert answer.read_bytes() == b""
    assert port.frames == []


# Connects for each line that it reads, says what is in it, and tells when the other side has had enough.
TALKER = """
import contextlib, socket, sys
from nvflare_torchrun_plugin.node import private_dir
for line in sys.stdin:
    with private_dir.connect(sys.argv[1], "ranks") as channel, contextlib.suppress(OSError):
        channel.settimeout(60)
        channel.sendall(bytes.fromhex(line))
        channel.shutdown(socket.SHUT_WR)
        while channel.recv(1 << 16):
            pass
    print(flush=True)
"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
REPORTS = st.dictionaries(st.sampled_from(["rank", "local_rank", "traceback"]), VALUES)
SAID = st.lists(
    st.binary(max_size=60) | (REPORTS | VALUES).map(lambda report: json.dumps(report).encode()), max_size=4
).map(b"\n".join)


@pytest.mark.hypothesis
def test_whatever_a_process_says_the_next_rank_is_served(port: Port) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TALKER, port._directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as talker:

        @settings(max_examples=60)
        @given(SAID)
        @example(b'{"rank": 1e999, "local_rank": 0}\n')
        @example(b'{"rank": -1, "local_rank": 0}\n')
        @example(b"[" * 100_000 + b"\n")
        @example(f"{HELLO}\n".encode() + b'{"traceback": ' + b"[" * 100_000 + b"\n")
        @example(f"{HELLO}\n{HELLO}\n".encode())
        def anything(said: bytes) -> None:
            assert talker.stdin is not None
            assert talker.stdout is not None
            port.frames.clear()
            talker.stdin.write(said.hex() + "\n")
            talker.stdin.flush()
            answer = talker.stdout.fileno()
            port.until(lambda: bool(select.select([answer], [], [], 0)[0]))
            talker.stdout.readline()
            ups = [frame for frame in port.frames if isinstance(frame, wire.RankUp)]
            assert len(ups) <= 1
            assert all(frame.rank >= 0 and frame.pid == talker.pid for frame in ups)
            assert all(wire.decode_frame(wire.encode(frame)) == frame for frame in port.frames)

        anything()
        assert talker.stdin is not None
        talker.stdin.close()
    port.frames.clear()
    process = port.rank("raise SystemExit(3)")
    port.until(lambda: any(isinstance(frame, wire.RankUp) and frame.rank == 3 for frame in port.frames))
    process.wait()


@pytest.mark.slow
def test_whether_ranks_are_left_is_known_before_their_ends_are_noticed(port: Port) -> None:
    assert not port._port.all_ended()
    process = port.rank("import time; time.sleep(100)")
    port.until(lambda: len(port.frames) == 1)
    assert not port._port.all_ended()
    process.kill()
    ended(process)
    assert port._port.all_ended()
    port.until(lambda: len(port.frames) == 2)
    process.wait()
    assert port._port.all_ended()


# A rank that tells what it has got, says that it is warm, and tells what came then.
WAITS = """
import socket
lines = channel.makefile("rb")
data, fds, _, _ = socket.recv_fds(channel, 1 << 16, 4)
os.write(fds[0], data)
channel.sendall(b'{"warm": ["x: 1", 2], "of": 2}\\n' * 2)
os.write(fds[0], lines.readline())
"""


def test_ranks_that_wait_say_so_once_and_get_their_word_early_or_late(holding: Port) -> None:
    def ends() -> int:
        return sum(isinstance(frame, wire.RankEnd) for frame in holding.frames)

    first = holding.rank(WAITS)
    holding.until(lambda: any(isinstance(frame, wire.Warm) for frame in holding.frames))
    assert ends() == 0
    holding._port.go({"A": "b"})
    holding.until(lambda: ends() == 1)
    with pytest.raises(ValueError, match="not waiting"):
        holding._port.go({"A": "c"})
    second = holding.rank(WAITS)
    holding.until(lambda: ends() == 2)
    assert [frame for frame in holding.frames if isinstance(frame, wire.Warm)] == [
        wire.Warm(3, 2, ("x: 1", "2"))
    ] * 2
    lines = [json.loads(frame.text) for frame in holding.frames if isinstance(frame, wire.Line)]
    assert [line.get("preload", line) for line in lines] == [["json", "csv:reader"], {"environ": {"A": "b"}}] * 2
    first.wait()
    second.wait()


# A rank whose script tells how far its task is.
TELLS = """
from nvflare_torchrun_plugin.client.moments import Moments
channel.recv(1 << 16)
moments = Moments()
for moment in ("receive", "received"):
    moments.tell(moment)
if not os.fork():
    moments.tell("a child's")
    os._exit(0)
os.wait()
channel.close()
moments.tell("closed")
"""


def test_what_a_rank_tells_of_its_task(port: Port) -> None:
    process = port.rank(TELLS)
    port.until(lambda: any(isinstance(frame, wire.RankEnd) for frame in port.frames))
    told = [frame for frame in port.frames if isinstance(frame, wire.Moment)]
    assert [(frame.rank, frame.what) for frame in told] == [(3, "receive"), (3, "received")]
    assert 0 < told[1].at - told[0].at < BOUND
    assert process.wait() == 0


# One that tells nothing until it has a line to read.
TELLS_LATER = """
from nvflare_torchrun_plugin.client.moments import Moments
channel.recv(1 << 16)
open({there!r}, "x").close()
sys.stdin.readline()
Moments().tell("receive")
for time in "", ', "at": NaN', ', "at": 1e12', ', "at": "x"':
    channel.sendall(b'{{"moment": "sent"%s}}\\n' % time.encode())
"""


@pytest.mark.slow
def test_the_time_of_what_a_rank_tells_is_the_rank_s(port: Port, tmp_path: Path) -> None:
    """An agent that has no time to listen hears of it later; and it believes no time that cannot be."""
    there = tmp_path / "there"
    process = port.rank(TELLS_LATER.format(there=str(there)))
    port.until(there.exists)
    assert process.stdin is not None
    process.stdin.write(b"go on\n")
    process.stdin.close()
    ended(process)
    over = time.monotonic()
    port.until(lambda: any(isinstance(frame, wire.RankEnd) for frame in port.frames))
    (told,) = [frame for frame in port.frames if isinstance(frame, wire.Moment)]
    assert told.what == "receive"
    assert told.at <= over
    process.wait()


def test_a_process_without_an_agent_tells_nothing(tmp_path: Path) -> None:
    listening = private_dir.listen(str(tmp_path), "others")
    other = private_dir.connect(str(tmp_path), "others")
    heard, _ = listening.accept()
    Moments().tell("receive")
    other.close()
    assert heard.recv(1) == b""
    heard.close()
    listening.close()


def test_ranks_that_do_not_wait_get_no_word(port: Port) -> None:
    with pytest.raises(ValueError, match="not waiting"):
        port._port.go({})
