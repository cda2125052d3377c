"""How long a no-op script takes under bare torchrun, under our translator and under NVFlare's."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

NOOP = str(Path(__file__).with_name("noop.py"))

COMMANDS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=1"],
    "this package's translator": ["nvflare_torchrun_plugin.torchrun_node", "--nproc-per-node=1"],
    "NVFlare's translator": ["nvflare.app_opt.pt.torchrun_node", "--nproc-per-node=1"],
}


def seconds(module: str, *options: str) -> float:
    """Wall-clock seconds of one launch, which must succeed."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", module, *options, NOOP], check=True, capture_output=True)
    return time.perf_counter() - started


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds of ``repeats`` launches of each kind, by turns, after one of each that does not count."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    names = list(COMMANDS)
    for turn in range(repeats + 1):
        # Another one goes first each time: none always follows the same neighbour.
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            took = seconds(*COMMANDS[name])
            if turn:
                found[name].append(took)
                print(f"{name}: {took:.2f} s", flush=True)
    return found
