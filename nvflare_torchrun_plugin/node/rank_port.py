"""Where the ranks of one node report to their agent (standard library only).

Each rank connects to a socket in the agent's private directory, says who it is, and gets its orders and a
pipe of its own for its output. The kernel then tells when its process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.node import private_dir, procs
from nvflare_torchrun_plugin.node.lines import LineCutter
from nvflare_torchrun_plugin.node.loop import CHUNK, Loop

SOCKET = "ranks"
_ANSWER_BOUND = 5.0
"""Seconds that a rank may take to read its orders; it waits for nothing else then."""
_MAX_REPORT = 1 << 20
# torchrun's summary of failures: the only source of a code that torchrun collected before we could look, and the
# only one that names a rank which was killed before it could say who it is.
_NAMED = re.compile(r"rank\s*:\s*(\d+)\s*\(local_rank:\s*(\d+)\)")
_SUMMARY = re.compile(r"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")


class _Rank:
    """A process that has connected; ``rank`` is below 0 until it has said which one it is."""

    def __init__(self, channel: socket.socket) -> None:
        self.rank = -1
        self.channel = channel
        self.inbox = b""
        self.warm = False
        self.pidfd: int | None = None
        self.ended: float | None = None
        self.stopped = False
        self.halted: float | None = None
        self.code: int | None = None


class RankPort:
    """Serves the ranks of one group on this node."""

    def __init__(
        self,
        directory: str,
        order: wire.Start,
        torchrun_output: os.stat_result,
        loop: Loop,
        send: Callable[[wire.Frame], None],
        stopping: Callable[[], bool],
        oom_kills: Callable[[], int],
    ) -> None:
        self._orders = {
            "module": order.module,
            "target": order.target,
            "args": order.args,
            "output": [torchrun_output.st_dev, torchrun_output.st_ino],
            "preload": order.preload if order.holds else None,
        }
        self._holds = order.holds
        self._go: bytes | None = None
        self._loop = loop
        self._send = send
        self._stopping = stopping
        self._oom_kills = oom_kills
        self._ranks: dict[int, _Rank] = {}
        self._named: tuple[int, int] | None = None
        self._server = private_dir.listen(directory, SOCKET)
        self._server.setblocking(False)
        loop.watch(self._server.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening; ranks that are here stay."""
        self._loop.forget(self._server.fileno())
        self._server.close()

    def all_ended(self) -> bool:
        """Return whether there were ranks, and none is left."""
        # That one has ended may not have been noticed yet.
        return bool(self._ranks) and not any(
            rank.ended is None and procs.runs(pid) for pid, rank in self._ranks.items()
        )

    def go(self, environ: Mapping[str, str]) -> None:
        """Let all ranks go on with these variables, those that are still to come as well.

        Raises:
            ValueError: they do not wait.
        """
        if not self._holds or self._go is not None:
            raise ValueError("go: the ranks are not waiting for it")
        self._go = json.dumps({"environ": dict(environ)}).encode() + b"\n"
        for rank in self._ranks.values():
            if rank.ended is None:
                self._answer(rank, self._go, [])

    def look_for_halted(self, seconds: float, limit: float) -> None:
        """Tell of each rank that has been stopped (SIGSTOP) for too long.

        Args:
            seconds: since the last look, those left out in which this process itself did not run: a site may
                suspend all of a job.
            limit: seconds after which it has been too long.
        """
        for pid, rank in self._ranks.items():
            if rank.ended is not None or not procs.is_stopped(pid):
                rank.halted = None
                continue
            rank.halted = 0.0 if rank.halted is None else rank.halted + seconds
            if rank.halted >= limit:
                self._send(wire.Halt(rank.rank, time.monotonic() - rank.halted))

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to every rank that is there."""
        for pid, rank in self._ranks.items():
            if rank.ended is None:
                with contextlib.suppress(OSError):
                    if rank.pidfd is not None:
                        # Not by its number, which another process may have by now.
                        signal.pidfd_send_signal(rank.pidfd, number)
                    else:
                        os.kill(pid, number)

    def learn_from(self, line: str) -> None:
        """Take a rank's name and its exit code from lines of torchrun's summary, if they hold any."""
        if named := _NAMED.search(line):
            self._named = int(named[1]), int(named[2])
        if found := _SUMMARY.search(line):
            code, pid = int(found[1]), int(found[2])
            if pid in self._ranks:
                self.learn_code(pid, code)
            elif code < 0 and self._named is not None:
                rank, local_rank = self._named
                self._send(wire.RankUp(rank, local_rank, pid))
                self._send(wire.RankEnd(rank, code, time.monotonic(), self._stopping(), self._oom_kills()))

    def learn_code(self, pid: int, code: int) -> None:
        """Take the exit code of a process; one that is no rank, or known already, is passed over."""
        rank = self._ranks.get(pid)
        if rank is not None and rank.code is None:
            self._end(rank, code)

    def _accept(self) -> None:
        try:
            channel, _ = self._server.accept()
        except OSError:
            return
        pid, uid, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid() or not procs.is_below(pid, os.getpid()):
            channel.close()
            return
        channel.setblocking(False)
        rank = _Rank(channel)
        self._loop.watch(channel.fileno(), lambda: self._read(pid, rank))

    def _read(self, pid: int, rank: _Rank) -> None:
        try:
            data = rank.channel.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(rank.inbox) > _MAX_REPORT:
            self._loop.forget(rank.channel.fileno())
            rank.channel.close()
            if rank.rank >= 0 and rank.pidfd is None and rank.ended is None:
                self._end(rank, procs.exit_code_of_zombie(pid))
            return
        *lines, rank.inbox = (rank.inbox + data).split(b"\n")
        for line in lines:
            self._take(pid, rank, line)

    def _take(self, pid: int, rank: _Rank, line: bytes) -> None:
        """Take a report; what is none is passed over, whatever a script may have written there."""
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(report, dict):
            return
        number, local_rank, text = (report.get(key) for key in ("rank", "local_rank", "traceback"))
        if rank.rank >= 0:
            failed, of = report.get("warm"), report.get("of")
            if isinstance(failed, list) and type(of) is int and self._holds and not rank.warm:
                rank.warm = True
                self._send(wire.Warm(rank.rank, of, tuple(str(sentence) for sentence in failed)))
            moment, at = report.get("moment"), report.get("at")
            if isinstance(moment, str) and isinstance(at, (int, float)) and 0 <= at <= time.monotonic():
                self._send(wire.Moment(rank.rank, moment, float(at)))
            if isinstance(text, str):
                self._send(wire.RankError(rank.rank, text, time.monotonic(), self._stopping()))
        elif type(number) is int and type(local_rank) is int and number >= 0:
            self._welcome(pid, rank, number, local_rank)

    def _welcome(self, pid: int, rank: _Rank, number: int, local_rank: int) -> None:
        # First of all it is known: whatever happens to it from here on must be told of this rank.
        rank.rank = number
        self._ranks[pid] = rank
        self._send(wire.RankUp(number, local_rank, pid))
        # Kernels before 5.3 have no pidfd, nor have Pythons built for them (conda's): there the end of the rank's
        # connection has to do.
        with contextlib.suppress(OSError, AttributeError):
            rank.pidfd = os.pidfd_open(pid)
            self._loop.watch(rank.pidfd, lambda: self._on_exit(pid, rank))
        output, theirs = os.pipe()
        cutter = LineCutter(wire.MAX_TEXT)
        self._loop.watch(output, lambda: self._read_output(output, number, cutter), throttled=True)
        try:
            self._answer(rank, json.dumps(self._orders).encode() + b"\n", [theirs])
        finally:
            os.close(theirs)
        if self._go is not None:
            self._answer(rank, self._go, [])

    @staticmethod
    def _answer(rank: _Rank, answer: bytes, descriptors: list[int]) -> None:
        # A rank that is gone is told of by its pidfd or connection.
        with contextlib.suppress(OSError):
            try:
                rank.channel.settimeout(_ANSWER_BOUND)
                # Arguments of more than the socket's buffer do not go out with the descriptor in one piece.
                sent = socket.send_fds(rank.channel, [answer], descriptors)
                rank.channel.sendall(answer[sent:])
            finally:
                rank.channel.setblocking(False)

    def _read_output(self, output: int, number: int, cutter: LineCutter) -> None:
        data = os.read(output, CHUNK)
        for text in cutter.feed(data) if data else cutter.flush():
            self._send(wire.Line(number, text))
        if not data:
            self._loop.forget(output)
            os.close(output)

    def _on_exit(self, pid: int, rank: _Rank) -> None:
        # First of all the code: torchrun polls its children ten times a second and takes it away.
        code = procs.exit_code_of_zombie(pid)
        if rank.pidfd is not None:
            self._loop.forget(rank.pidfd)
            os.close(rank.pidfd)
        if rank.channel.fileno() >= 0:
            self._read(pid, rank)
        self._end(rank, code)

    def _end(self, rank: _Rank, code: int | None) -> None:
        if rank.code is not None or (code is None and rank.ended is not None):
            return
        if rank.ended is None:
            rank.ended = time.monotonic()
            rank.stopped = self._stopping()
        rank.code = code
        self._send(wire.RankEnd(rank.rank, code, rank.ended, rank.stopped, self._oom_kills()))
