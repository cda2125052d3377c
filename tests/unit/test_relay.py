"""The relay as a real process, with a socket of the test in the supervisor's place."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from standins import BOUND, until

from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.node import private_dir

COMMAND = [sys.executable, "-m", "nvflare_torchrun_plugin.relay"]
ODD = "a b\n'\"$HOME é \udcff"


class Stage:
    """A supervisor's directory and a relay that has it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.server = private_dir.listen(directory, relay.SOCKET)
        self.server.settimeout(BOUND)

    def start(self, **more: str) -> subprocess.Popen[bytes]:
        environ = {**os.environ, relay.DIR_VARIABLE: self.directory, **more}
        return subprocess.Popen(COMMAND, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def accept(self) -> socket.socket:
        channel, _ = self.server.accept()
        channel.settimeout(BOUND)
        return channel


@pytest.fixture
def stage() -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        directory = private_dir.create("nvfl-supervisor-test-")
        stack.callback(private_dir.remove, directory)
        stage = Stage(directory)
        stack.enter_context(stage.server)
        yield stage


def outcome(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """How it ended, and all that it printed."""
    output, _ = process.communicate(timeout=BOUND)
    return process.returncode, output


def catches_signals(process: subprocess.Popen[bytes]) -> bool:
    """Whether signals wait until it passes them on, and do no longer end it."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (blocked,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(blocked >> (signal.SIGTERM - 1) & 1)


def send_from_outside(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    """Have another process send the signal; its id."""
    sender = subprocess.Popen(["sh", "-c", f"kill -{number:d} {process.pid}"])
    assert sender.wait(BOUND) == 0
    return sender.pid


def test_it_hands_over_its_environment_passes_signals_on_and_exits_as_told(stage: Stage) -> None:
    large = "x" * 100_000
    process = stage.start(ODD=ODD, LARGE=large)
    with stage.accept() as channel, channel.makefile("rb") as lines:
        environ = json.loads(lines.readline())["environ"]
        assert (environ["ODD"], environ["LARGE"]) == (ODD, large)
        assert relay.DIR_VARIABLE not in environ
        until(lambda: catches_signals(process), "the relay never caught signals")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
            assert json.loads(lines.readline()) == {"signal": number, "sender": os.getpid()}
            sender = send_from_outside(process, number)
            assert json.loads(lines.readline()) == {"signal": number, "sender": sender}
        assert process.poll() is None
        channel.sendall(b'{"ex')
        channel.sendall(b'it": 42}\n')
        assert outcome(process) == (42, b"")
    assert Path(stage.directory, relay.SOCKET).exists()


@pytest.mark.parametrize("word", [b"", b'{"exit": 0}'], ids=["no word", "half a word"])
@pytest.mark.parametrize("reads", [True, False], ids=["all read", "nothing read"])
def test_a_supervisor_that_goes_leaves_70_and_no_directory(stage: Stage, word: bytes, reads: bool) -> None:
    process = stage.start(LARGE="x" * 100_000)
    with stage.accept() as channel:
        if reads:
            with channel.makefile("rb") as lines:
                lines.readline()
        channel.sendall(word)
    assert outcome(process) == (relay.SUPERVISOR_GONE, b"")
    assert not Path(stage.directory).exists()


def test_an_answer_before_everything_was_read_counts(stage: Stage) -> None:
    process = stage.start(**{f"LARGE{n}": "x" * 100_000 for n in range(8)})
    with stage.accept() as channel:
        channel.sendall(b'{"exit": 1}\n')
    assert outcome(process) == (1, b"")
    assert Path(stage.directory).exists()


@pytest.mark.parametrize("there", [True, False], ids=["nobody listens", "no directory"])
def test_a_supervisor_that_was_gone_before(stage: Stage, there: bool) -> None:
    stage.server.close()
    if not there:
        private_dir.remove(stage.directory)
    assert outcome(stage.start()) == (relay.SUPERVISOR_GONE, b"")
    assert not Path(stage.directory).exists()
