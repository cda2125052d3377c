"""The two sides of a join for tests: a client job that nodes may join, and nodes, which are real processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from standins import BOUND, logger, until

from nvflare_torchrun_plugin import transports, wire
from nvflare_torchrun_plugin.description import group_description
from nvflare_torchrun_plugin.description.group_description import NodeGroup
from nvflare_torchrun_plugin.join_file import NAME, JoinFile
from nvflare_torchrun_plugin.joining.reception import Reception
from nvflare_torchrun_plugin.supervisor import Supervisor


class Client:
    """A client job that nodes may join."""

    def __init__(self, folder: Path, nodes: int = 2, *, run_id: str | None = None, **settings: Any) -> None:
        self._ended = False
        self.folder = folder
        self.file = folder / NAME
        self.logger, self.lines = logger("client")
        given = {"nodes": nodes, "transport": "join", "join": {"ports": [20000, 29000], **settings}}
        described = group_description.parse(given, "test", {})
        assert described.join is not None
        self.supervisor = Supervisor(self.logger)
        self.reception = Reception(described, described.join, run_id, str(folder), BOUND, self.logger)
        try:
            self.supervisor.attend(self.reception)
        except BaseException:
            self.end()
            raise

    def meet(self, seconds: float = BOUND) -> NodeGroup:
        return self.supervisor.ask(self.reception.meet(seconds), BOUND + 5)

    @property
    def port(self) -> int:
        return JoinFile.read(str(self.file)).ports[0]

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def wait_for(self, text: str) -> None:
        until(lambda: self.said(text), f"{text!r} in {self.lines}")

    def bridge(self, host: str, group: NodeGroup | None = None) -> Bridge:
        return Bridge(transports.argv((group or self.meet(0)).transport, host, ["ignored"]))

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self.supervisor.close("the run ended", 5)


class Bridge:
    """An agent, by way of a bridge."""

    def __init__(self, argv: list[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)

    def send(self, *orders: wire.Order) -> None:
        assert self.process.stdin is not None
        for order in orders:
            self.process.stdin.write(wire.encode(order))
        self.process.stdin.flush()

    def frame(self) -> wire.Frame:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()
            if line.strip():
                return wire.decode_frame(line)

    def hello(self) -> wire.Hello:
        frame = self.frame()
        assert isinstance(frame, wire.Hello)
        return frame

    def finish(self) -> tuple[int, list[bytes], str]:
        """Wait for the end, with the orders open."""
        self.process.wait(BOUND)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdin = None
        output, errors = self.process.communicate(timeout=BOUND)
        return self.process.returncode, output.splitlines(), errors.decode()


class Node:
    """A process that dials in."""

    def __init__(self, folder: Path, rank: int | None, *options: str, **environ: str) -> None:
        words = [] if rank is None else ["--node-rank", str(rank)]
        self._log = folder / f"node-{time.monotonic_ns()}.err"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "nvflare_torchrun_plugin.node_agent", "--join", *words, *options],
                cwd=folder,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        until(lambda: text in self.said, f"{text!r} in what the node says")

    def ended(self) -> int:
        return self.process.wait(BOUND)
