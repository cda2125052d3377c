"""One rank of the benchmark ``model.py``: by turns the same model in each way, from a barrier to the last rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvflare.client
import torch
import torch.distributed as dist
from nvflare.client import FLModel
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from nvflare_torchrun_plugin import client

TENSORS = 64


def params(nbytes: int) -> dict[str, torch.Tensor]:
    """A model of 64 tensors."""
    return {f"layer-{number}": torch.rand(nbytes // TENSORS // 4) for number in range(TENSORS)}


def memory() -> int:
    """Bytes that this process has in memory; what it shares counts in parts."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def over_all(value: float, operation: Any) -> float:
    """The largest, or the sum, over all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, operation)
    return tensor.item()


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the last rank has done it, and bytes by which the memory of all ranks has grown then."""
    if act.__name__ == "receive":
        # Without the memory of the last one.
        client.send(FLModel(metrics={}))
    before = memory()
    dist.barrier()
    began = time.perf_counter()
    result = act()
    took = time.perf_counter() - began
    if isinstance(result, FLModel):
        # What nobody has read yet counts for none of its ranks.
        assert all(value.sum() for value in result.params.values())
    dist.barrier()
    grown = memory() - before
    dist.barrier()
    del result
    return over_all(took, dist.ReduceOp.MAX), over_all(grown, dist.ReduceOp.SUM)


def broadcasts(nbytes: int) -> dict[str, Callable[[], object]]:
    """The three ways for a model that rank 0 has."""
    rank = dist.get_rank()
    given = params(nbytes) if rank == 0 else {}
    flat = torch.rand(nbytes // 4) if rank == 0 else None
    if rank == 0:
        # A stand-in for NVFlare, which hands out the same object until it was sent.
        answers: dict[str, Any] = {"init": None, "system_info": {}, "get_config": {}, "get_job_id": ""}
        answers |= {"get_site_name": "", "get_task_name": "train", "is_train": True}
        for name, answer in {**answers, "is_evaluate": False, "is_submit_model": False, "send": None}.items():
            setattr(nvflare.client, name, lambda *_, answer=answer, **__: answer)
        nvflare.client.receive = lambda *_: FLModel(params=dict(given))
    client.init()

    def objects() -> object:
        held = [given if rank == 0 else None]
        dist.broadcast_object_list(held, src=0)
        return held

    def one_flat() -> object:
        tensor = flat if flat is not None else torch.empty(nbytes // 4)
        dist.broadcast(tensor, src=0)
        return tensor

    return {"broadcast_object_list": objects, "one flat broadcast": one_flat, "receive()": client.receive}


def sharded(nbytes: int) -> dict[str, Callable[[], object]]:
    """A model under FSDP2, loaded from full parameters and gathered again: by torch, and by this package."""
    side = int((nbytes / 4 / 8) ** 0.5)
    with torch.no_grad():
        net = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(8)))
    full = {name: value.clone() for name, value in net.state_dict().items()}
    for layer in net:
        fully_shard(layer)
    fully_shard(net)

    def by_torch() -> object:
        set_model_state_dict(net, full, options=StateDictOptions(full_state_dict=True))
        return get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def ours() -> object:
        client.load_model(net, FLModel(params=full))
        return client.full_params(net)

    return {"torch's own": by_torch, "load_model() and full_params()": ours}


def main() -> None:
    what, nbytes, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    ways = (sharded if what == "sharded" else broadcasts)(nbytes)
    if what == "two nodes":
        del ways["broadcast_object_list"]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, act in ways.items():
            measured = timed(act)
            if turn:
                found[name].append(measured)
    if dist.get_rank() == 0:
        Path(sys.argv[4]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
