"""The contract in the client job's environment, as NVFlare's Slurm launcher sets it, in NVFlare's simulator."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import uuid
from dataclasses import dataclass

import pytest
from simulation import SITES, Simulator, finish

pytestmark = pytest.mark.real

# Nobody gives node 1 the bootstrap of the Client API, so only rank 0 joins it.
TRAIN = """
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        import nvflare.client as flare

        flare.init(rank=rank)
    while True:
        received = flare.receive() if rank == 0 else None
        more = [received is not None]
        dist.broadcast_object_list(more, src=0)
        if not more[0]:
            break
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        if rank == 0:
            nodes = []
            for file in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = file.read_bytes().decode(errors="replace").split("\\0")
                except OSError:
                    continue
                if f"--rdzv_id={sys.argv[1]}" in words:
                    nodes += [word for word in words if word.startswith("--node_rank=")]
            print(f"{dist.get_world_size()} ranks of {sorted(nodes)}", flush=True)
            flare.send(flare.FLModel(params={name: v + total.item() for name, v in received.params.items()}))
    dist.destroy_process_group()
    print(f"rank {rank} is done", flush=True)
"""


@dataclass
class Preset:
    """A simulator whose one site's environment holds the contract of node 0."""

    simulator: Simulator
    contract: dict[str, str]

    @property
    def run_id(self) -> str:
        return self.contract["NVFL_RUN_ID"]


@pytest.fixture
def preset(simulator: Simulator) -> Preset:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    contract = {
        "NVFL_NNODES": "2",
        "NVFL_NODE_RANK": "0",
        "NVFL_MASTER_ADDR": "127.0.0.1",
        "NVFL_MASTER_PORT": str(port),
        "NVFL_RUN_ID": f"preset-{uuid.uuid4().hex}",
    }
    simulator.sites = SITES[:1]
    simulator.environ.update(contract)
    return Preset(simulator, contract)


def test_the_other_node_was_started_by_somebody_else(preset: Preset) -> None:
    simulator = preset.simulator
    # What the job itself describes does not count then.
    simulator.write_job(TRAIN, nodes=3, rounds=2, launch_once=True, script_args=[preset.run_id])
    running = simulator.start()
    script = simulator.job / "app" / "custom" / "train.py"
    node_1 = subprocess.Popen(
        [sys.executable, "-m", "nvflare_torchrun_plugin.torchrun_node", "--nproc-per-node", "1", script],
        env={**simulator.environ, "NVFL_NODE_RANK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    output = finish(running)
    told = finish(node_1)

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    assert simulator.model() == [2 * (1 + 2)]
    assert (node_1.returncode, told.count("rank 1 is done")) == (0, 1), told
    said = simulator.messages("site-1")
    assert re.search(r"node group of 2 \(\S+ x 1\), transport local, from environment of the client job", said)
    # One torchrun for each node: ours is node 0, nothing was started a second time.
    assert said.count("node 0 rank 0 | 2 ranks of ['--node_rank=0', '--node_rank=1']") == 2
    assert "node 1 " not in said
    assert simulator.errors("site-1") == []


def test_processes_per_task_are_refused(preset: Preset) -> None:
    simulator = preset.simulator
    simulator.write_job(TRAIN, script_args=[preset.run_id])

    simulator.run()

    sentence = (
        "environment of the client job (NVFL_NNODES=2): its launcher has started the other nodes once for the"
        " whole job, so launching for each task is impossible unless they dial in: set launch_once to true, or"
        " describe the node group by nodes: auto and transport: join"
    )
    assert "Finished FedAvg" not in simulator.messages("server")
    assert [error for error in simulator.errors("site-1") if "torchrun" in error or "NVFL" in error] == [
        sentence,
        f"task 'train' failed: {sentence}",
    ]
    # The server may show one: how NVFlare ends a workflow without results depends on the moment.
    assert "Traceback" not in simulator.messages("site-1")
