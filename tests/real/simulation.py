"""Jobs in NVFlare's simulator, with the configuration written by hand, and everything that running them leaves."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from textwrap import dedent
from typing import Any

import job_log
import numpy as np
import numpy.typing as npt

from nvflare_torchrun_plugin.node import procs

LIMIT_S = 480.0
SITES = ("site-1", "site-2")


class Simulator:
    """A folder with one job in it and everything that running it leaves.

    Attributes:
        sites: names of the sites that take part.
        persistor: arguments of the server's NPModelPersistor, whose model is one numpy array.
        receivers: further components of the server.
        environ: environment of the simulator.
    """

    def __init__(self, folder: Path) -> None:
        self.sites: tuple[str, ...] = SITES
        self.persistor: dict[str, Any] = {"model": [0.0]}
        self.receivers: list[dict[str, Any]] = []
        self.job = folder / "job"
        self.workspace = folder / "run"
        self.tmp = folder / "tmp dir 'é"
        self.tmp.mkdir()
        self.environ = {**os.environ, "HOME": str(folder), "TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1"}

    def write_job(self, code: str, nodes: int | None = None, rounds: int = 1, **args: Any) -> None:
        """Write the job.

        Args:
            code: the script's.
            nodes: for a NodeGroupProvider of the job, None for none.
            rounds: rounds of FedAvg.
            args: further arguments of the executor.
        """
        self.write_files({"train.py": code}, nodes, rounds, **{"script": "train.py", **args})

    def write_files(
        self, files: Mapping[str, str], nodes: int | None = None, rounds: int = 1, **args: Any
    ) -> None:
        """Write the job with these files, by their paths, in its custom folder."""
        config, custom = self.job / "app" / "config", self.job / "app" / "custom"
        config.mkdir(parents=True)
        for name, code in files.items():
            (custom / name).parent.mkdir(parents=True, exist_ok=True)
            (custom / name).write_text(dedent(code))
        provider = {
            "id": "nodes",
            "path": "nvflare_torchrun_plugin.node_group.NodeGroupProvider",
            "args": {"nodes": nodes, "transport": "local"},
        }
        executor = {
            "path": "nvflare_torchrun_plugin.executor.TorchrunExecutor",
            "args": {"nproc_per_node": 1, **args},
        }
        client = {
            "format_version": 2,
            "executors": [{"tasks": ["train"], "executor": executor}],
            "components": [provider] if nodes is not None else [],
        }
        server = {
            "format_version": 2,
            "workflows": [
                {
                    "id": "fedavg",
                    "path": "nvflare.app_common.workflows.fedavg.FedAvg",
                    "args": {"num_clients": len(self.sites), "num_rounds": rounds, "persistor_id": "persistor"},
                }
            ],
            "components": [
                {
                    "id": "persistor",
                    "path": "nvflare.app_common.np.np_model_persistor.NPModelPersistor",
                    "args": self.persistor,
                },
                *self.receivers,
            ],
        }
        meta = {
            "name": "by-hand",
            "resource_spec": {},
            "min_clients": len(self.sites),
            "deploy_map": {"app": ["@ALL"]},
        }
        (config / "config_fed_client.json").write_text(json.dumps(client))
        (config / "config_fed_server.json").write_text(json.dumps(server))
        (self.job / "meta.json").write_text(json.dumps(meta))

    def write_site_file(self, text: str) -> None:
        """The simulator copies WORKSPACE/local into the local folder of each site."""
        (self.workspace / "local").mkdir(parents=True)
        (self.workspace / "local" / "node_group.yaml").write_text(text)

    def command(self) -> list[str]:
        """What runs it, in the folder of the job and with ``environ``."""
        command = [str(Path(sys.executable).with_name("nvflare")), "simulator", str(self.job)]
        return [*command, "-w", str(self.workspace), "-n", str(len(self.sites)), "-t", str(len(self.sites))]

    def start(self) -> subprocess.Popen[str]:
        """Start it; :func:`finish` waits for its end."""
        return _Started(self.command(), self.job.parent / "output.txt", cwd=self.job.parent, env=self.environ)

    def run(self) -> str:
        """Run to the end, within the limit; all that it has printed."""
        return finish(self.start())

    def log(self, who: str) -> list[dict[str, str]]:
        """The entries of a site's or the server's log; those of NVFlare's JSON log are whole."""
        return job_log.entries(self.workspace / who / "log.json")

    def messages(self, who: str) -> str:
        return "\n".join(entry["message"] for entry in self.log(who))

    def errors(self, who: str) -> list[str]:
        return job_log.errors(self.log(who))

    def model(self) -> list[float]:
        """The global model that the server has kept."""
        kept: list[float] = self.model_array().tolist()
        return kept

    def model_array(self) -> npt.NDArray[np.float32]:
        (file,) = self.workspace.rglob("server.npy")
        kept: npt.NDArray[np.float32] = np.load(file)
        return kept

    def app(self, site: str) -> Path:
        """The folder of the job's app at the site, where its ranks work."""
        return self.workspace / site / "simulate_job" / f"app_{site}"

    def wait_for_message(self, who: str, text: str) -> None:
        """Wait until the log has the text, within the limit."""
        log = self.workspace / who / "log.txt"
        deadline = time.monotonic() + LIMIT_S
        while not (log.exists() and text in log.read_text()):
            assert time.monotonic() < deadline, f"{text!r} is not in {log} after {LIMIT_S:g} s"
            time.sleep(0.02)

    def seconds_between(self, who: str, first: str, last: str) -> float:
        """Seconds from the first entry that the one pattern matches to the first of the other."""
        when = {}
        for entry in self.log(who):
            for pattern in (first, last):
                if pattern not in when and re.search(pattern, entry["message"]):
                    when[pattern] = datetime.strptime(entry["asctime"], "%Y-%m-%d %H:%M:%S,%f")
        return (when[last] - when[first]).total_seconds()


class _Started(subprocess.Popen[str]):
    """A process that writes to a file; a pipe would fill while nobody reads it, and hold up whoever writes."""

    def __init__(self, command: list[str], output: Path, **how: Any) -> None:
        self._output = output
        with output.open("w") as file:
            super().__init__(command, stdout=file, stderr=subprocess.STDOUT, text=True, **how)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; all that it has printed, and nothing."""
        self.wait(timeout)
        return self._output.read_text(errors="replace"), ""


def processes(tmp: Path) -> dict[int, str]:
    """Living processes that have this TMPDIR (zombies have no environment), with their command lines.

    Those of a bed's hosts are among them: their namespaces are below ours.
    """
    marks = (f"TMPDIR={tmp}".encode(), f"NVFL_AGENT_DIR={tmp}".encode())
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environ = (directory / "environ").read_bytes().split(b"\0")
            if any(entry.startswith(marks) for entry in environ):
                words = (directory / "cmdline").read_bytes().split(b"\0")
                found[int(directory.name)] = b" ".join(words).decode(errors="replace")
        except OSError:
            continue
    return found


def the_one(found: Mapping[int, str], *words: str) -> int | None:
    """Of the processes with their command lines the one that has the words, None if there is none.

    A child that it has just forked has them as well, until that runs its own program.
    """
    having = {pid: procs.parent(pid) for pid, command in found.items() if all(word in command for word in words)}
    first = [pid for pid, parent in having.items() if parent is not None and parent not in having]
    assert len(first) <= 1, {pid: found[pid] for pid in first}
    return first[0] if first else None


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the end, within the limit; all that it has printed."""
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return output


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[Simulator]:
    """A simulator that must leave no process and no file of ours; what it leaves is ended."""
    simulator = Simulator(folder)
    with leaving_nothing(simulator.tmp):
        yield simulator


@contextlib.contextmanager
def leaving_nothing(tmp: Path) -> Iterator[None]:
    """See to it that nothing of ours is left of runs with this TMPDIR; processes that are left are ended."""
    try:
        yield
    finally:
        deadline = time.monotonic() + 5
        while (left := processes(tmp)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert left == {}
    # Sockets, bootstrap files and port reservations of ours go with the run.
    assert [path.name for path in tmp.iterdir() if path.name.startswith("nvfl")] == []
