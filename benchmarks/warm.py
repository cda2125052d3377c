"""How long a task waits for its model where its group was started during the task before, beside other ways.

The same measure as in arrival.py, over rounds that take long enough for a start in the background. The first task
of a job is left out: nothing can be there before the job is. And how long its end takes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks import arrival

PAUSE = float(os.environ.get("BENCH_PAUSE", "20"))
"""Seconds of a round's training."""


def _ours(script: str, rounds: int, **options: object) -> arrival.Executor:
    def executor(received: Path) -> dict[str, object]:
        args = {
            "script": script,
            "script_args": [str(received), str(PAUSE), str(rounds)],
            "nproc_per_node": arrival.PROCESSES,
            **options,
        }
        return {"path": "nvflare_torchrun_plugin.executor.TorchrunExecutor", "args": args}

    return executor


def _theirs(received: Path) -> dict[str, object]:
    translator = [sys.executable, "-m", "nvflare.app_opt.pt.torchrun_node"]
    command = [*translator, f"--nproc-per-node={arrival.PROCESSES}", "custom/client.py", str(received), str(PAUSE)]
    return {
        "path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
        "args": {"execution_mode": "external_process", "command": command, "launch_once": False},
    }


def executors(rounds: int) -> dict[str, arrival.Executor]:
    """By their names in the table."""
    return {
        "this package, warm start": _ours("client.py", rounds, warm_start=True),
        "this package": _ours("client.py", rounds),
        "NVFlare's executor and translator": _theirs,
        "a trainer that stays (launch_once)": _ours("stays.py", rounds, launch_once=True),
    }


def measure(jobs: int, rounds: int) -> dict[str, list[arrival.Task]]:
    """``jobs`` times ``rounds`` less one tasks in each way, whole jobs by turns."""
    found: dict[str, list[arrival.Task]] = {name: [] for name in executors(rounds)}
    for _ in range(jobs):
        for name, executor in executors(rounds).items():
            first, *tasks = arrival.run_job(name, executor, rounds)
            found[name] += tasks
            took = ", ".join(f"{task.waited:.2f}" for task in tasks)
            print(f"{name}: first {first.waited:.2f}, then {took} s", flush=True)
    return found
