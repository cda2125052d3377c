"""NVFlare's POC with a real server and real sites, here or in a host of a bed, and what its jobs leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import job_log
import numpy as np
from beds.hosts import Host
from nvflare.fuel.flare_api.flare_api import new_secure_session

from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.node import agent_dir, procs

ADMIN = "admin@nvidia.com"
EXECUTOR = "nvflare_torchrun_plugin.executor.TorchrunExecutor"
LIMIT_S = 240.0

# Upstream style: rank 0 alone talks to NVFlare, and nothing follows its flare.send(). What it adds shows which
# ranks have taken part: rank + 1 and ten times the node rank of each.
TRAIN = """
    import os

    import nvflare.client as flare
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, node = dist.get_rank(), int(os.environ["GROUP_RANK"])
    flare.init(rank=rank)
    received = flare.receive()
    print(f"got {received is not None} on {rank} of {dist.get_world_size()}, node {node}", flush=True)
    total = torch.tensor([rank + 1.0 + 10 * node])
    dist.all_reduce(total)
    if rank == 0:
        params = {name: value + total.item() for name, value in received.params.items()}
        flare.send(flare.FLModel(params=params))
"""


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Poc:
    """A folder with a POC in it.

    Args:
        folder: where everything is.
        sites: of the federation.
        host: where server and sites run; None for this machine itself. A session with the server, and with it
            :meth:`end_of` and :meth:`model`, needs the latter.
    """

    def __init__(self, folder: Path, sites: Sequence[str], host: Host | None = None) -> None:
        self.folder = folder
        self.sites = sites
        self._host = host
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        self.kits = folder / "poc" / "example_project" / "prod_00"
        tools = Path(sys.executable).parent
        self.environ = {
            **os.environ,
            "HOME": str(folder),
            "TMPDIR": str(self.tmp),
            "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{tools}:{os.environ['PATH']}",
        }
        self.services: dict[int, str] = {}
        self.session: Any = None

    def nvflare(self, *words: str, limit_s: float = LIMIT_S) -> str:
        """What one of NVFlare's commands prints; it must succeed."""
        command = ["nvflare", *words]
        done = subprocess.run(
            command if self._host is None else self._host.argv(command, self.folder),
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def local(self, site: str) -> Path:
        return self.kits / site / "local"

    def site(self, verb: str, site: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """What our own command does to the kit of a site; it must succeed."""
        command = ["nvflare-torchrun", "site", verb, str(self.kits / site), *map(str, words)]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done

    def prepare(self) -> None:
        self.nvflare("poc", "prepare", "-n", str(len(self.sites)))
        self._take_a_free_port()

    def _take_a_free_port(self) -> None:
        """Something on this host may hold NVFlare's own."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        for file in [self.folder / "poc" / "project.yml", *self.kits.glob("*/startup/fed_*.json")]:
            file.write_text(re.sub(r"\b8002\b", str(port), file.read_text()))

    def start(self) -> None:
        """Start server and sites."""
        self._start()

    def start_server(self) -> None:
        """Start the server alone; the sites are the caller's."""
        self._start("-p", "server")

    def _start(self, *chosen: str) -> None:
        self.nvflare("poc", "start", "--timeout", "90", *chosen)
        self.services = self.processes()
        if self._host is None:
            self.session = new_secure_session(ADMIN, str(self.kits / ADMIN))

    def stop(self) -> dict[int, str]:
        """Stop all; the processes that are left nevertheless (none should be), ended now."""
        self.services = {}
        try:
            if self.session is not None:
                self.session.close()
            if self.processes():
                # It would wait 30 s at most, which is short for a busy machine.
                self.nvflare("poc", "stop", "--no-wait")
        finally:
            # The scripts that watch over server and sites look every 5 s.
            left = self.end_others(90)
        return left

    def processes(self) -> dict[int, str]:
        """Living processes of this run with their command lines, those of server and sites left out."""
        found = {}
        # Between two looks each of these scripts has a fresh "sleep" below it.
        watching = [pid for pid, command in self.services.items() if "sub_start.sh" in command]
        for pid in procs.with_variable("TMPDIR", str(self.tmp)):
            if pid in self.services or procs.parent(pid) in watching:
                continue
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        return found

    def ours(self) -> list[int]:
        """Agents, torchruns, ranks and relays."""
        names = (agent_dir.DIR_VARIABLE, relay.DIR_VARIABLE)
        return [pid for name in names for pid in procs.with_variable(name, str(self.tmp))]

    def end_others(self, limit_s: float) -> dict[int, str]:
        """Wait until only server and sites are left; what was left nevertheless, killed."""
        wait_until(lambda: not self.processes(), limit_s)
        left = self.processes()
        procs.send_signal(left, signal.SIGKILL)
        return left

    def write_job(
        self,
        name: str,
        script: str,
        sites: tuple[str, ...],
        *,
        code_in: str | None = None,
        code: str = TRAIN,
        args: tuple[str, ...] = (),
        rounds: int = 1,
        components: tuple[dict[str, Any], ...] = (),
        **executor: Any,
    ) -> None:
        """Write a job; ``code_in`` is the folder of the app in which ``train.py`` lies, None for no ``code``.

        ``executor``: further arguments of the executor.
        """
        app = self.folder / name / "app"
        (app / "config").mkdir(parents=True)
        if code_in is not None:
            (app / code_in).mkdir(exist_ok=True)
            (app / code_in / "train.py").write_text(dedent(code))
        client = {
            "format_version": 2,
            "executors": [
                {
                    "tasks": ["train"],
                    "executor": {
                        "path": EXECUTOR,
                        "args": {"script": script, "script_args": args, "nproc_per_node": 1, **executor},
                    },
                }
            ],
            "components": components,
        }
        server = {
            "format_version": 2,
            "workflows": [
                {
                    "id": "fedavg",
                    "path": "nvflare.app_common.workflows.fedavg.FedAvg",
                    "args": {"num_clients": len(sites), "num_rounds": rounds, "persistor_id": "persistor"},
                }
            ],
            "components": [
                {
                    "id": "persistor",
                    "path": "nvflare.app_common.np.np_model_persistor.NPModelPersistor",
                    "args": {"model": [0.0]},
                }
            ],
        }
        meta = {
            "name": name,
            "resource_spec": {},
            "min_clients": len(sites),
            "deploy_map": {"app": ["server", *sites]},
        }
        (app / "config" / "config_fed_client.json").write_text(json.dumps(client))
        (app / "config" / "config_fed_server.json").write_text(json.dumps(server))
        (self.folder / name / "meta.json").write_text(json.dumps(meta))

    def submit(self, name: str, *options: str) -> str:
        """The id of the job."""
        printed = self.nvflare("job", "submit", "-j", name, *options)
        match = re.search(r"^job_id: (\S+)$", printed, re.MULTILINE)
        assert match, printed
        return match[1]

    def end_of(self, job: str) -> dict[str, Any]:
        """What the server knows of the job when it has ended."""
        meta: dict[str, Any] = {}

        def has_ended() -> bool:
            meta.update(self.session.get_job_meta(job))
            return str(meta["status"]).startswith("FINISHED")

        assert wait_until(has_ended, LIMIT_S), meta
        return meta

    def entries(self, site: str, job: str) -> list[dict[str, str]]:
        return job_log.entries(self.kits / site / job / "log.json")

    def messages_so_far(self, site: str, job: str) -> str:
        """The same while the job runs: nothing before its log is there."""
        log = self.kits / site / job / "log.txt"
        return log.read_text() if log.exists() else ""

    def messages(self, site: str, job: str) -> str:
        return "\n".join(entry["message"] for entry in self.entries(site, job))

    def errors(self, site: str, job: str) -> list[str]:
        return job_log.errors(self.entries(site, job))

    def model(self, job: str) -> list[float]:
        """The global model in the job's result, as its submitter gets it."""
        return kept_model(Path(self.session.download_job_result(job)))


def kept_model(result: Path) -> list[float]:
    (file,) = result.rglob("server.npy")
    kept: list[float] = np.load(file).tolist()
    return kept
