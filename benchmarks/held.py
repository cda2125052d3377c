"""What a client job holds after each of many tiny tasks: its memory, descriptors and threads, beside other ways.

NVFlare's own share is in each of them: that with its executor, and a plain interpreter for each task, is the
reference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from benchmarks import arrival

WARM_UP = 5
"""Tasks at the beginning that are left out, and as many as are taken together at both ends of the rest."""


def _ours(tasks: int, **options: object) -> arrival.Executor:
    def executor(received: Path) -> dict[str, object]:
        args = {"script": "tiny.py", "script_args": [str(received), str(tasks)], "nproc_per_node": 1, **options}
        return {"path": "nvflare_torchrun_plugin.executor.TorchrunExecutor", "args": args}

    return executor


def _theirs(tasks: int, *, launch_once: bool) -> arrival.Executor:
    def executor(received: Path) -> dict[str, object]:
        return {
            "path": "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
            "args": {
                "execution_mode": "external_process",
                "command": [sys.executable, "custom/tiny.py", str(received), str(tasks)],
                "launch_once": launch_once,
            },
        }

    return executor


def executors(tasks: int) -> dict[str, arrival.Executor]:
    """By their names in the table."""
    return {
        "this package, warm start": _ours(1, warm_start={"preload": ["nvflare.client"]}),
        "this package": _ours(1),
        "NVFlare's executor": _theirs(1, launch_once=False),
        "NVFlare's executor, a trainer that stays": _theirs(tasks, launch_once=True),
    }


def growth(held: list[list[int]]) -> list[float]:
    """How much each number grows per task: from the median of a few tasks to that of the last ones."""
    early, late = held[WARM_UP : 2 * WARM_UP], held[-WARM_UP:]
    between = len(held) - 2 * WARM_UP
    return [
        (median(after) - median(before)) / between
        for before, after in zip(zip(*early, strict=True), zip(*late, strict=True), strict=True)
    ]


def measure(tasks: int) -> dict[str, list[list[int]]]:
    """KiB of memory, descriptors and threads after each of so many tasks, in each way."""
    found = {}
    for name, executor in executors(tasks).items():
        found[name] = [task.held for task in arrival.run_job(name, executor, tasks)]
        grown = ", ".join(f"{each:.2f}" for each in growth(found[name]))
        print(f"{name}: {found[name]}; per task {grown}", flush=True)
    return found
