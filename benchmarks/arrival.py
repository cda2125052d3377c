"""How long a task takes from its arrival at the executor until ``flare.receive()`` returns in the script.

The same simulator job, one site, every task with processes of its own: once with this package's executor,
once with NVFlare's and its translator. Both clocks are this host's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Executor = Callable[[Path], dict[str, object]]
"""Makes an executor whose script notes in the file when it has its model."""

SOURCES = Path(__file__).with_name("arrival_job")

ARENAS = "4"
"""Areas in which the C library looks for memory; what the start script of a provisioned site sets."""

# Processes on one node, as both executors can have them.
PROCESSES = 2


def ours(received: Path) -> dict[str, object]:
    """This package's executor."""
    return {
        "path": "nvflare_torchrun_plugin.executor.TorchrunExecutor",
        "args": {"script": "client.py", "script_args": [str(received)], "nproc_per_node": PROCESSES},
    }


def theirs(received: Path) -> dict[str, object]:
    """NVFlare's executor with its translator."""
    command = [sys.executable, "-m", "nvflare.app_opt.pt.torchrun_node", f"--nproc-per-node={PROCESSES}"]
    return {
        "path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
        "args": {
            "execution_mode": "external_process",
            "command": [*command, "custom/client.py", str(received)],
            "launch_once": False,
        },
    }


EXECUTORS = {"this package": ours, "NVFlare's executor and translator": theirs}


def write_job(folder: Path, executor: dict[str, object], arrived: Path, rounds: int) -> None:
    """Writes the job; only its executor differs between the two."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    shutil.copytree(SOURCES, folder / "app" / "custom", ignore=shutil.ignore_patterns("__pycache__"))
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["train"], "executor": executor}],
        "components": [{"id": "clock", "path": "clock.Clock", "args": {"file": str(arrived)}}],
    }
    server = {
        "format_version": 2,
        "workflows": [
            {
                "id": "fedavg",
                "path": "nvflare.app_common.workflows.fedavg.FedAvg",
                "args": {"num_clients": 1, "num_rounds": rounds},
            }
        ],
        "components": [
            {
                "id": "persistor",
                "path": "nvflare.app_common.np.np_model_persistor.NPModelPersistor",
                "args": {"model": [1.0, 2.0, 3.0]},
            }
        ],
    }
    meta = {"name": "arrival", "min_clients": 1, "deploy_map": {"app": ["@ALL"]}}
    (config / "config_fed_client.json").write_text(json.dumps(client))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    (folder / "meta.json").write_text(json.dumps(meta))


class Task(NamedTuple):
    """What was seen of one task.

    Attributes:
        waited: seconds from its arrival until its script had the model.
        returning: seconds from the call of ``flare.send()`` until the executor had returned.
        leaving: seconds from there until its processes were gone; None if they stay.
        held: what the client job held when the executor had returned, by what it is; memory in KiB.
    """

    waited: float
    returning: float
    leaving: float | None
    held: dict[str, int]


def run_job(name: str, executor: Executor, rounds: int) -> list[Task]:
    """What was seen of each task of one job run."""
    with tempfile.TemporaryDirectory() as tmp:
        arrived, received = Path(tmp, "arrived"), Path(tmp, "received")
        write_job(Path(tmp, "job"), executor(received), arrived, rounds)
        simulator = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator"]
        done = subprocess.run(
            [*simulator, str(Path(tmp, "job")), "-w", str(Path(tmp, "run")), "-n", "1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "MALLOC_ARENA_MAX": ARENAS},
        )
        if not received.exists() or len(received.read_text().split()) != rounds:
            raise RuntimeError(f"the job of {name} failed (exit code {done.returncode}):\n{done.stdout}")

        def noted(what: str) -> list[Any]:
            return [json.loads(line) for line in Path(tmp, what).read_text().splitlines()]

        returned = noted("returned")
        leaving = zip(returned, noted("gone"), strict=True) if Path(tmp, "gone").exists() else None
        return [
            Task(*seen)
            for seen in zip(
                _between(noted("arrived"), noted("received")),
                _between(noted("sending"), returned),
                [None] * rounds if leaving is None else [gone - then for then, gone in leaving],
                noted("held"),
                strict=True,
            )
        ]


def _between(begins: list[float], ends: list[float]) -> list[float]:
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def measure(jobs: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of ``jobs`` times ``rounds`` tasks with each executor, whole jobs by turns."""
    found: dict[str, list[float]] = {name: [] for name in EXECUTORS}
    for _ in range(jobs):
        for name in EXECUTORS:
            took = [task.waited for task in run_job(name, EXECUTORS[name], rounds)]
            found[name] += took
            print(f"{name}: {', '.join(f'{s:.2f}' for s in took)} s", flush=True)
    return found
