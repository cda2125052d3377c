"""Models that are spread over the ranks: what NVFlare gives goes in, and comes out whole on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
from client_ranks import STAND_IN, run_nodes

pytestmark = pytest.mark.real

# The received model differs from each rank's own; the weights and the buffer count as parameters for NVFlare.
ROUND_TRIP = (
    STAND_IN
    + """
    import copy
    import numpy as np
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def make():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False))

    def sharded(net):
        for layer in net:
            if list(layer.parameters()):
                fully_shard(layer)
        return fully_shard(net)

    KINDS = {
        "plain": lambda net: net,
        "ddp": DistributedDataParallel,
        "fsdp2": sharded,
        "fsdp1": lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
    }

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    reference = make()
    batch = torch.randn(4, 6)
    with torch.no_grad():
        expected = reference.eval()(batch)
    torch.manual_seed(RANK)
    net = KINDS[sys.argv[2]](make())
    params = reference.state_dict()
    if sys.argv[3] == "numpy":
        params = {name: value.numpy() for name, value in params.items()}
    flare.load_model(net, flare.FLModel(params=params))
    with torch.no_grad():
        right = torch.allclose(net.eval()(batch), expected, atol=1e-6)
    # A step of training, the same on all ranks, so that what comes out is not what went in.
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    net(batch).sum().backward()
    optimizer.step()
    full = flare.full_params(net)
    if full is None:
        out = None
    else:
        changed = {name for name in full if not torch.equal(full[name], reference.state_dict()[name])}
        again = make()
        again.load_state_dict(full)
        out = [sorted(full), sorted(changed), sorted({str(value.device) for value in full.values()})]
    tell(right=right, out=out)
    dist.destroy_process_group()
"""
)

NAMES = ["0.bias", "0.weight", "1.bias", "1.num_batches_tracked", "1.running_mean", "1.running_var", "1.weight"]


@pytest.mark.parametrize(
    ("kind", "params"),
    [("plain", "numpy"), ("ddp", "torch"), ("fsdp2", "torch"), ("fsdp2", "numpy"), ("fsdp1", "torch")],
)
def test_a_model_goes_in_and_comes_out(tmp_path: Path, kind: str, params: str) -> None:
    facts = run_nodes(tmp_path, ROUND_TRIP, "0", kind, params, nodes=2, nproc=1)
    assert [fact["right"] for fact in facts] == [True, True]
    names, changed, devices = facts[0]["out"]
    assert names == [*NAMES, "2.weight"]
    # The sum over a normalised batch does not depend on the first layer, nor on the scale.
    assert {"1.bias", "2.weight", "1.running_mean"} <= set(changed)
    assert devices == ["cpu"]
    assert facts[1]["out"] is None
