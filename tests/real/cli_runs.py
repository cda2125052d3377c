"""The console command as a person starts it, on this host or on a host of an ssh bed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beds.hosts import ENVIRON, Host, command_pid
from ssh_groups import LIMIT_S, TMP

COMMAND = [sys.executable, "-m", "nvflare_torchrun_plugin.cli"]


@dataclass
class Ended:
    """How the command has ended, and what it said."""

    code: int
    out: str
    err: str
    seconds: float

    def lines(self) -> list[str]:
        return self.out.splitlines()

    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """The command while it runs."""

    def __init__(self, words: Sequence[str], folder: Path, host: Host | None = None, **environ: str) -> None:
        argv = [*COMMAND, *words]
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._host = host
        self._began = time.monotonic()
        if host is None:
            environ = {**os.environ, **environ}
            self.process = subprocess.Popen(argv, cwd=folder, env=environ, text=True, **how)
        else:
            environ = {**ENVIRON, "HOME": "/root", "TMPDIR": TMP, **environ}
            self.process = host.popen(argv, cwd=folder, env=environ, **how)
        self._errors: list[str] = []
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()
        self._seen: list[str] = []

    def wait_for(self, *texts: str) -> None:
        """Read its output until each of the texts has come."""
        missing = set(texts)
        assert self.process.stdout is not None
        while missing:
            line = self.process.stdout.readline()
            assert line, (missing, self._seen, self._errors)
            self._seen.append(line)
            missing = {text for text in missing if text not in line}

    def signal(self, number: int) -> None:
        pid = self.process.pid if self._host is None else command_pid(self.process)
        assert pid is not None
        os.kill(pid, number)

    def finish(self) -> Ended:
        assert self.process.stdout is not None
        # A test that waits for ever is ended by pytest's own limit; the command has bounds for everything.
        out = "".join(self._seen) + self.process.stdout.read()
        code = self.process.wait(LIMIT_S)
        self._reading.join(LIMIT_S)
        return Ended(code, out, "".join(self._errors), time.monotonic() - self._began)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors += self.process.stderr


def command(words: Sequence[str], folder: Path, host: Host | None = None, **environ: str) -> Ended:
    return Command(words, folder, host, **environ).finish()
