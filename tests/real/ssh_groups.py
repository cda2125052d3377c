"""Groups over the hosts of an ssh bed, each run by ``group_driver.py`` on h0, and what they leave on any host."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from beds.hosts import ENVIRON, command_pid
from beds.ssh import SshBed

LIMIT_S = 200.0
"""Seconds after which what a test waits for does not come any more, on a busy machine."""
GONE_S = 5.0
"""Seconds after a group's end in which nothing of it may be left on any host."""
TMP = "/run/nvfl"
"""TMPDIR on each host, which no other host sees."""
PROFILE = f"export TMPDIR={TMP}"
DRIVER = Path(__file__).with_name("group_driver.py")
OURS = (b"nvflare_torchrun_plugin", DRIVER.name.encode(), b"NVFL_AGENT_DIR=")


@dataclass
class Outcome:
    """A group that has ended.

    Attributes:
        code: exit code of the driver, which is 0 whenever there is a verdict.
        verdict: as plain data.
        log: what a client job would have logged.
        logs: the ranks' files, a directory for each attempt.
        seconds: from the start of the driver to its end.
    """

    code: int
    verdict: dict[str, Any]
    log: str
    logs: Path
    seconds: float

    def said(self, rank: int, attempt: int = 1) -> Any:
        """What the rank has printed last, a line of JSON; torch may have warned of something before."""
        log = self.logs / f"attempt-{attempt:04d}" / f"rank-{rank}.log"
        return json.loads(log.read_text().splitlines()[-1])

    def node_log(self, node_rank: int) -> str:
        return (self.logs / "attempt-0001" / f"node-{node_rank}.log").read_text()

    def assert_ok(self) -> None:
        assert (self.code, self.verdict.get("outcome")) == (0, "ok"), self.log
        assert self.verdict["leftovers"] == []

    def blame(self) -> tuple[int, str, str]:
        """Node rank, host, and what went wrong there."""
        assert self.code == 0, self.log
        assert self.verdict["outcome"] == "failed", self.log
        failure = self.verdict["failure"]
        return failure["node_rank"], failure["host"], failure["what"]


class Running:
    """A group that was started."""

    def __init__(self, process: subprocess.Popen[str], given: Mapping[str, Any]) -> None:
        self.process = process
        self.logs = Path(given["logs"])
        self._began = time.monotonic()
        assert process.stdin is not None
        process.stdin.write(json.dumps(given))
        process.stdin.close()
        # It is closed already; communicate() must not look at it.
        process.stdin = None

    def wait_for_lines(self, ranks: int) -> None:
        """Wait until so many ranks have printed something."""
        wait_until(f"{ranks} ranks speak", lambda: len(list(self.logs.glob("*/rank-*.log"))) >= ranks)

    def finish(self) -> Outcome:
        output, log = self.process.communicate(timeout=LIMIT_S)
        seconds = time.monotonic() - self._began
        return Outcome(self.process.returncode, json.loads(output or "{}"), log, self.logs, seconds)

    def kill(self) -> None:
        """SIGKILL for the driver itself."""
        pid = command_pid(self.process)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)


class SshGroups:
    """Starts groups on h0 of the bed.

    Attributes:
        bed: its hosts.
        folder: a directory that all hosts see, new for each test.
        own: a directory of the same name on each host, but its own.
    """

    def __init__(self, bed: SshBed, folder: Path, own: Path) -> None:
        self.bed = bed
        self.folder = folder
        self.own = own

    def start(
        self,
        script: str,
        nodes: Sequence[str | Mapping[str, Any]] = ("h0", "h1"),
        *,
        group: Mapping[str, Any] | None = None,
        private: bool = False,
        secrets: Mapping[str, str] | None = None,
        **given: Any,
    ) -> Running:
        """Start a group.

        Args:
            script: code of the script.
            nodes: of the group.
            group: more of its description.
            private: whether only h0 sees the app's directory.
            secrets: more variables of the driver's own.
            given: more for the driver.
        """
        spec = {
            "script": dedent(script),
            "app_dir": str(self.app_dir(private)),
            "logs": str(self.folder / "logs"),
            "group": {"nodes": list(nodes), "transport": "ssh", **(group or {})},
            **given,
        }
        process = self.bed["h0"].popen(
            [sys.executable, str(DRIVER)],
            env={**ENVIRON, "HOME": "/root", "TMPDIR": TMP, **(secrets or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return Running(process, spec)

    def app_dir(self, private: bool = False) -> Path:
        return (self.own / self.folder.name if private else self.folder) / "app"

    def run(self, script: str, *args: Any, **given: Any) -> Outcome:
        return self.start(script, *args, **given).finish()

    def python(self, name: str, before: str) -> str:
        """A stand-in for this interpreter that runs a shell's line before it."""
        path = self.folder / name
        path.write_text(f'#!/bin/sh\n{before}\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def processes(self, *hosts: str) -> dict[str, list[str]]:
        """Processes of any group on these hosts (all, when none is named), seen from outside of them."""
        found: dict[str, list[str]] = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                space = (directory / "ns" / "pid").readlink()
                words = (directory / "cmdline").read_bytes()
                environ = (directory / "environ").read_bytes()
                for host in hosts or self.bed.names:
                    if space == self.bed[host].space.ids["pid"] and any(m in words + environ for m in OURS):
                        found.setdefault(host, []).append(f"{directory.name} {words!r}")
        return found

    def files(self) -> dict[str, list[str]]:
        """What is in TMPDIR of each host, but for a cache of torch's own that is named after the user."""
        listed = {name: self.bed[name].run(["ls", "-A", TMP]).stdout.split() for name in self.bed.names}
        return {
            name: left
            for name, entries in listed.items()
            if (left := [entry for entry in entries if not entry.startswith("torchinductor_")])
        }

    def wait_until_gone(self, *hosts: str, limit_s: float = GONE_S) -> None:
        """Assert that no process of a group is on these hosts any more within the limit."""
        deadline = time.monotonic() + limit_s
        while (left := self.processes(*hosts)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == {}, left


def wait_until(what: str, ready: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)


@contextmanager
def on_bed(bed: SshBed, folder: Path, own: Path) -> Iterator[SshGroups]:
    """Groups that must leave neither process nor file of theirs on any host."""
    groups = SshGroups(bed, folder, own)
    with ExitStack() as profiles:
        for name in bed.names:
            bed[name].run(["mkdir", "-p", TMP])
            profiles.enter_context(bed.login_shell(name, PROFILE))
        yield groups
        groups.wait_until_gone()
        left = groups.files()
        assert left == {}, left
