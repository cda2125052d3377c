"""Groups on the nodes of a Slurm allocation, each run by ``group_driver.py`` in a job, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beds.hosts import LIMIT_S
from beds.slurm import JobEnd, SlurmBed
from simulation import processes

DRIVER = Path(__file__).with_name("group_driver.py")


@dataclass
class SlurmDriver:
    """The driver of one group as a batch job, and what it leaves."""

    bed: SlurmBed
    folder: Path

    def __post_init__(self) -> None:
        self.tmp = self.folder / "tmp"
        self.facts = self.folder / "facts"
        for directory in (self.tmp, self.facts):
            directory.mkdir()

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1"}

    def script(self, code: str, *, prefix: str = "", **given: Any) -> str:
        """The batch script. ``prefix`` goes before the driver's command."""
        spec = {
            "script": code,
            "args": [str(self.facts)],
            "app_dir": str(self.folder / "app"),
            "logs": str(self.folder / "logs"),
            "group": {"nodes": "auto"},
            "nproc_per_node": None,
            **given,
        }
        (self.folder / "given.json").write_text(json.dumps(spec))
        command = shlex.join([sys.executable, str(DRIVER)])
        return f"#!/bin/sh\nexec {prefix} {command} <given.json >verdict.json 2>log\n"

    def submit(self, code: str, *options: str, prefix: str = "", **given: Any) -> int:
        script = self.script(code, prefix=prefix, **given)
        return self.bed.submit(script, *options, directory=self.folder, env=self.environ)

    def run(self, code: str, *options: str, **given: Any) -> JobEnd:
        return self.bed.end(self.submit(code, *options, **given))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def verdict(self) -> dict[str, Any]:
        text = (self.folder / "verdict.json").read_text()
        assert text, self.log
        verdict: dict[str, Any] = json.loads(text)
        return verdict

    def ranks(self) -> list[dict[str, Any]]:
        files = sorted(self.facts.glob("rank-?"), key=lambda file: int(file.name[5:]))
        return [json.loads(file.read_text()) for file in files]

    def wait_for_ranks(self, job: int, number: int) -> list[dict[str, Any]]:
        def ready() -> bool:
            assert self.bed.job(job)["JobState"] in ("PENDING", "RUNNING"), self.log
            return len(self.ranks()) == number

        self.bed.wait_for(f"{number} ranks", ready, 2 * LIMIT_S)
        return self.ranks()


@contextlib.contextmanager
def in_allocations(bed: SlurmBed, folder: Path) -> Iterator[SlurmDriver]:
    """A driver that must leave neither process nor file on any node."""
    driver = SlurmDriver(bed, folder)
    yield driver
    deadline = time.monotonic() + 5
    while (left := processes(driver.tmp)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}
    # torch keeps a cache of its own there, named after the user.
    assert [path for path in driver.tmp.iterdir() if not path.name.startswith("torchinductor_")] == []


def pids_on(bed: SlurmBed, host: str, *words: str) -> list[int]:
    """Processes there whose command ends with these words."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (directory / "cmdline").read_bytes().decode().split("\0")[:-1]
            if (directory / "ns" / "pid").readlink() == bed[host].space.ids["pid"] and said[-len(words) :] == [
                *words
            ]:
                found.append(int(directory.name))
    return found
