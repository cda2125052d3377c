"""What a client job holds after each of many tiny tasks, beside other ways: memory, descriptors, processes...

NVFlare's own share is in each of them: that with its executor, and a plain interpreter for each task, is the
reference.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from benchmarks import arrival

WARM_UP = 30
"""Tasks at the beginning that are left out. NVFlare keeps each message that has arrived for a minute
(``streaming_retry_timeout``), a thread each: so long there are more with every task, and then no more."""
TOGETHER = 5
"""Tasks that are taken together at both ends of the others."""
WHAT = ("memory", "descriptors", "sockets", "threads", "processes", "files")


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


def ends(held: list[dict[str, int]]) -> dict[str, tuple[float, float]]:
    """Of each thing, the median of the first tasks after the warm-up and that of the last ones."""
    first, last = held[WARM_UP : WARM_UP + TOGETHER], held[-TOGETHER:]
    return {what: (median(each[what] for each in first), median(each[what] for each in last)) for what in WHAT}


def measure(tasks: int) -> dict[str, dict[str, tuple[float, float]]]:
    """What is held at both ends of so many tasks, in each way; memory in KiB."""
    found = {}
    for name, executor in executors(WARM_UP + tasks).items():
        held = [task.held for task in arrival.run_job(name, executor, WARM_UP + tasks)]
        found[name] = ends(held)
        print(f"{name}: {found[name]}; memory {[each['memory'] for each in held]}", flush=True)
    return found
