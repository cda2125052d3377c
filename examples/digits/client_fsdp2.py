"""The same with FSDP2: parameters, gradients and optimizer state are divided among all ranks of the site."""

import torch
import torch.distributed as dist
from client import main
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard(net: torch.nn.Module) -> torch.nn.Module:
    """Divides each layer by itself, so that only one at a time is whole on a rank, and then what is left."""
    # On a host with GPUs, FSDP2 would divide over them whatever the network is on.
    mesh = init_device_mesh(next(net.parameters()).device.type, (dist.get_world_size(),))
    for layer in net.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


if __name__ == "__main__":
    main(shard)
