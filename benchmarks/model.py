"""A model from rank 0 to all ranks, and in and out of an FSDP2 model, beside what torch offers for it.

Between two nodes over hosts that the tests make (namespaces of this machine), which only root can have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The tests are no package.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "real"))

from beds.ssh import SshBed

NBYTES = 512 << 20
RANKS = 4
BOUND = 1200.0
Found = dict[str, list[tuple[float, float]]]
"""By the way that was measured: seconds and bytes of each turn."""

_RANK = Path(__file__).with_name("model_ranks.py")
_ROOT = _RANK.parents[1]


def _command(what: str, repeats: int, output: Path, *torchrun: str) -> list[str]:
    arguments = [what, str(NBYTES), str(repeats), str(output)]
    return [sys.executable, "-m", "torch.distributed.run", *torchrun, str(_RANK), *arguments]


def _environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}


def one_node(what: str, repeats: int) -> Found:
    """Ranks of one node: ``broadcasts`` or ``sharded``."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found")
        command = _command(what, repeats, output, "--standalone", f"--nproc-per-node={RANKS}")
        done = subprocess.run(command, env=_environ(), capture_output=True, text=True, check=False, timeout=BOUND)
        if done.returncode:
            raise RuntimeError(f"{what}: {done.stdout}{done.stderr}")
        return dict(json.loads(output.read_text()))


def lacking() -> str | None:
    """Why two nodes cannot be measured here; None when they can."""
    return SshBed.lacking()


def two_nodes(repeats: int) -> Found:
    """Two nodes with two ranks each, beside one flat broadcast to all four."""
    with tempfile.TemporaryDirectory() as folder, SshBed(names=("h0", "h1")) as bed:
        output = Path(folder, "found")
        nodes = []
        for number, name in enumerate(("h0", "h1")):
            rendezvous = ("--rdzv_backend=static", "--rdzv_endpoint=h0:29500", "--rdzv_id=model")
            place = ("--nnodes=2", f"--node_rank={number}", "--nproc-per-node=2")
            command = _command("two nodes", repeats, output, *place, *rendezvous)
            environ = {**_environ(), "GLOO_SOCKET_IFNAME": "eth0"}
            nodes.append(bed[name].popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        ends = [node.communicate(timeout=BOUND)[0] for node in nodes]
        if any(node.returncode for node in nodes):
            raise RuntimeError(f"two nodes: {ends}")
        return dict(json.loads(output.read_text()))
