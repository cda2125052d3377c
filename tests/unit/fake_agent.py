"""A small stand-in for the node agent's side of the ranks' socket; the real one has tests of its own.

It starts one rank as torchrun does, gives it its orders and a pipe, and collects what comes back.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare_torchrun_plugin.node import private_dir

PATIENCE = 60.0
"""Seconds after which a rank that does not say or do what it should fails the test."""


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code, negative for a signal.
        output: stdout and stderr, in the order of writing.
    """

    code: int
    output: bytes


@dataclass
class RankEnded(Ended):
    """How a rank ended, seen from its agent.

    Attributes:
        output: what came through the agent's pipe.
        torchrun_output: what came through the pipe that torchrun had inherited.
        hello: the rank's first line.
        messages: the lines that it sent after its orders.
        pid: of its process.
        failed: what it could not import ahead.
    """

    torchrun_output: bytes = b""
    hello: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    pid: int = 0
    failed: list[str] = field(default_factory=list)


@dataclass
class Start:
    """How ranks are started if a test does not say it.

    Attributes:
        preload: what they import before they wait for "go"; None: they do not wait.
        environ: the variables that come with it.
        answer: sent in place of it, and nothing after that.
    """

    preload: Sequence[str] | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    answer: bytes | None = None


start = Start()


def rank_environ(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what torchrun would add to this process' environment."""
    return {**os.environ, "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **(extra or {})}


def run_plain(
    words: Sequence[str], cwd: Path, environ: Mapping[str, str] | None = None, options: Sequence[str] = ()
) -> Ended:
    """Run ``python -u WORDS...`` to its end."""
    done = subprocess.run(
        [sys.executable, "-u", *options, *words],
        cwd=cwd,
        env=rank_environ(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    return Ended(done.returncode, done.stdout)


def run_rank(
    words: Sequence[str],
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    stderr: Path | None = None,
    answer: Mapping[str, Any] | None = None,
    raw_answer: bytes | None = None,
    pipes: int = 1,
    stay: bool = True,
    prefix: Sequence[str] = (),
    preload: Sequence[str] | None = None,
    early: bool = False,
) -> RankEnded:
    """Run ``[-m] TARGET ARGS...`` as a rank to its end.

    Args:
        words: what the orders say.
        cwd: the working directory.
        environ: more variables.
        options: the interpreter's own, beside ``-u``.
        stderr: where torchrun has redirected the rank's stderr, or None for its own pipe.
        answer: changes to the orders, by key.
        raw_answer: sent instead of the orders.
        pipes: how often the pipe comes with the answer.
        stay: keep the connection until the rank has ended, else close it after the answer.
        prefix: words of a command that starts the rank by exec.
        preload: what it imports before it waits for "go"; default what the test's start is given by :data:`start`.
        early: send "go" together with the orders.
    """
    preload = start.preload if preload is None else preload
    module = words[0] == "-m"
    target, *args = words[1:] if module else words
    directory = private_dir.create("fake agent ")
    torchrun_read, torchrun_write = os.pipe()
    output_read, output_write = os.pipe()
    torchrun_output, output = Collector(torchrun_read), Collector(output_read)
    try:
        with private_dir.listen(directory, "ranks") as server:
            server.settimeout(PATIENCE)
            redirected = stderr.open("wb") if stderr else None
            process = subprocess.Popen(
                [*prefix, sys.executable, "-u", *options, "-m", "nvflare_torchrun_plugin.rank", *words],
                cwd=cwd,
                env=rank_environ({**(environ or {}), "NVFL_AGENT_DIR": directory}),
                stdin=subprocess.DEVNULL,
                stdout=torchrun_write,
                stderr=redirected or torchrun_write,
            )
            if redirected:
                redirected.close()
            channel, _ = server.accept()
        status = os.fstat(torchrun_write)
        os.close(torchrun_write)
        with channel, channel.makefile("rb") as lines:
            channel.settimeout(PATIENCE)
            hello = json.loads(lines.readline())
            orders = {
                "module": module,
                "target": target,
                "args": args,
                "output": [status.st_dev, status.st_ino],
                "preload": preload,
            }
            line = json.dumps({**orders, **(answer or {})}).encode() + b"\n"
            line = line if raw_answer is None else raw_answer
            go = json.dumps({"environ": dict(start.environ)}).encode() + b"\n"
            if early:
                line += go
            sent = socket.send_fds(channel, [line], [output_write] * pipes)
            if sent < len(line):  # a large answer goes in parts; after a small one the rank may be gone already
                channel.sendall(line[sent:])
            os.close(output_write)
            if raw_answer is not None:
                channel.shutdown(socket.SHUT_WR)
            failed = []
            # One that has found an error in its orders says nothing.
            if preload is not None and (warm := lines.readline()):
                failed = json.loads(warm)["warm"]
                if not early:
                    channel.sendall(go if start.answer is None else start.answer)
                if start.answer is not None:
                    channel.shutdown(socket.SHUT_WR)
            messages = [json.loads(line) for line in lines] if stay else []
        code = process.wait(PATIENCE)
        return RankEnded(code, output.text(), torchrun_output.text(), hello, messages, process.pid, failed)
    finally:
        private_dir.remove(directory)


class Collector:
    """Reads a pipe to its end, in a thread, as an agent does all the time."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parts: list[bytes] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> bytes:
        """Return all of it, when nobody has the pipe open for writing any more."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the pipe is still open somewhere"
        return b"".join(self._parts)

    def _read(self) -> None:
        with open(self._fd, "rb", buffering=0) as pipe:
            while part := pipe.read(65536):
                self._parts.append(part)
