"""How long a group takes to be gone, with its verdict, after a rank was killed or the task was aborted.

On local nodes, and over ssh on the hosts that the tests make, which only root can have. Run as a program, this is
one group on the host where it is started: the case in JSON on stdin, how the group ended in JSON on stdout.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from nvflare_torchrun_plugin import node_agent
from nvflare_torchrun_plugin.description.group_choice import Wish, choose
from nvflare_torchrun_plugin.launching import planning, program
from nvflare_torchrun_plugin.node import agent_dir, procs
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.group import Group

# The tests are no package.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "real"))

from beds.hosts import ENVIRON, Host
from beds.ssh import SshBed

GRACE = node_agent.DEFAULT_GRACE
NODES = 2
BOUND = 300.0
"""Seconds after which a group has hung."""
_GONE = 60.0
_PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

# Each rank says when it is there. The victim then kills itself, and says when; when there is none, all of them
# ignore what asks them to end.
SCRIPT = """
import os, pathlib, signal, sys, time
folder, victim, nodes = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if victim == "none":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / os.environ["RANK"]).touch()
while not all((folder / str(rank)).exists() for rank in range(nodes)):
    time.sleep(0.01)
if os.environ["RANK"] == victim:
    (folder / "fault").write_text(str(time.time()))
    os.kill(os.getpid(), 9)
time.sleep(1000)
"""


class Case(NamedTuple):
    """A fault.

    Attributes:
        name: of its row.
        limit: seconds that the median may take.
        ssh: whether the nodes are hosts that are reached by ssh.
        victim: global rank that is killed, one for each node; None for an abort.
    """

    name: str
    limit: float
    ssh: bool
    victim: int | None


CASES = [
    *(Case(f"SIGKILL of a rank on node {rank}, local nodes", 3.0, False, rank) for rank in range(NODES)),
    *(Case(f"SIGKILL of a rank on node {rank}, ssh", 5.0, True, rank) for rank in range(NODES)),
    Case("abort, ranks ignore SIGTERM, local nodes", 5.0 + GRACE, False, None),
    Case("abort, ranks ignore SIGTERM, ssh", 5.0 + GRACE, True, None),
]


async def _serve(plan: planning.Plan, marks: Path, victim: int | None) -> dict[str, Any]:
    launch, reservation = planning.launch(plan, 1)
    group = Group(launch, os.environ, logging.getLogger("benchmark"), Copies())
    running = asyncio.create_task(group.run())
    if victim is None:
        while not running.done() and not all((marks / str(rank)).exists() for rank in range(NODES)):
            await asyncio.sleep(0.01)
        (marks / "fault").write_text(str(time.time()))
        group.stop("the benchmark asked for it")
    verdict = await running
    if reservation is not None:
        reservation.release()
    return {"launch": launch.name, **verdict.as_dict()}


def _run_here(case: dict[str, Any]) -> dict[str, Any]:
    """Run one group, started from this host, and return its name and verdict."""
    folder = Path(case["folder"])
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (folder / "marks").mkdir()
    victim = case["victim"]
    group = choose(
        {}, None, case["group"], Wish(nproc_per_node=1), byoc=True, launch_once=False, script=str(script)
    )
    options = planning.Options.parse(
        torchrun_args=None, join_timeout=120, launch_timeout=None, node_timeout=30, grace=GRACE, log_ranks=[]
    )
    words = [str(folder / "marks"), "none" if victim is None else str(victim), str(NODES)]
    plan = planning.Plan(
        group, program.parse(str(script), None, words, {}), str(script), str(folder), str(folder / "logs"), options
    )
    return asyncio.run(_serve(plan, folder / "marks", victim))


def _seconds(case: Case, first: Host | None) -> float:
    """Seconds from the fault until the verdict is there and no process of the group is, on any host.

    Args:
        case: what is measured.
        first: the host of a bed that starts the group; None for this machine.
    """
    nodes: dict[str, Any] = {"nodes": ["h0", "h1"], "transport": "ssh"} if case.ssh else {"nodes": NODES}
    with tempfile.TemporaryDirectory() as tmp:
        words = [sys.executable, "-m", "benchmarks.failure"]
        if first is not None:
            running = first.popen(words, env={**ENVIRON, "HOME": "/root"}, **_PIPES)
        else:
            running = subprocess.Popen(words, text=True, **_PIPES)
        output, _ = running.communicate(
            json.dumps({"folder": tmp, "group": nodes, "victim": case.victim}), timeout=BOUND
        )
        ended = json.loads(output)
        deadline = time.time() + _GONE
        # The hosts of a bed are seen from here, for their namespaces are below ours.
        while (left := procs.with_variable(agent_dir.DIR_VARIABLE, ended["launch"])) and time.time() < deadline:
            time.sleep(0.01)
        took = time.time() - float(Path(tmp, "marks", "fault").read_text())
    expected = "stopped" if case.victim is None else "failed"
    if left or ended["leftovers"] or ended["outcome"] != expected:
        raise RuntimeError(f"{case.name}: {left} are left, and {ended}")
    if case.victim is not None and (ended["failure"]["rank"], ended["failure"]["what"][:7]) != (
        case.victim,
        "SIGKILL",
    ):
        raise RuntimeError(f"{case.name}: blamed for it was {ended['failure']}")
    return took


def lacking() -> str | None:
    """Why this machine cannot have hosts for ssh; None if it can."""
    return SshBed.lacking()


def measure(repeats: int) -> dict[Case, list[float]]:
    """Seconds of ``repeats`` faults of each case, by turns; none of those that this machine cannot have."""
    found: dict[Case, list[float]] = {}
    with ExitStack() as stack:
        bed = stack.enter_context(SshBed(("h0", "h1"))) if lacking() is None else None
        for _ in range(repeats):
            for case in CASES:
                if case.ssh and bed is None:
                    continue
                took = _seconds(case, bed["h0"] if case.ssh and bed is not None else None)
                found.setdefault(case, []).append(took)
                print(f"{case.name}: {took:.2f} s", flush=True)
    return found


if __name__ == "__main__":
    json.dump(_run_here(json.load(sys.stdin)), sys.stdout)
