"""A supervisor on which tests have relays appear, and what their agents do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from standins import BOUND, HELLO, end, logger, says

from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.supervision.attempt import Attempt
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervisor import Supervisor

RELAY = [sys.executable, "-m", "nvflare_torchrun_plugin.relay"]
WORKS = f"touch $1/started; read start; {says(HELLO, end(0))}"
WAITS = f"touch $1/started; read start; {says(HELLO)}; read stop; {says(end(0, stopped=True))}"

# A child of the test that sends what it is told, and tells what came back.
CHILD = """
import json, socket, sys
from nvflare_torchrun_plugin.node import private_dir
for line in sys.stdin:
    data, times = json.loads(line)
    answer = b""
    with private_dir.connect(sys.argv[1], "relay") as channel:
        channel.settimeout(60)
        try:
            for _ in range(times):
                channel.sendall(bytes.fromhex(data))
            channel.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        try:
            while piece := channel.recv(1024):
                answer += piece
        except OSError:
            pass
    print(answer.decode(), end="" if answer else "\\n", flush=True)
"""


class Stage:
    """A supervisor, its log, and processes that connect to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logger, self.lines = logger("supervisor")
        self.given_up: GivenUp | None = None
        self.supervisor = Supervisor(self.logger, lambda: self.given_up)

    @property
    def started(self) -> bool:
        return (self.folder / "started").exists()

    def environ(self) -> dict[str, str]:
        return {**os.environ, relay.DIR_VARIABLE: self.supervisor.directory}

    def relay(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(RELAY, env=self.environ())

    def child(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, self.supervisor.directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def serves_the_real_relay(self, attempt: Attempt) -> None:
        """The armed attempt is still to be had."""
        assert not self.started
        assert not attempt.decided.done()
        assert self.relay().wait(BOUND) == 0
        verdict = attempt.wait(BOUND)
        assert verdict is not None
        assert verdict.outcome == "ok"
        assert self.started
