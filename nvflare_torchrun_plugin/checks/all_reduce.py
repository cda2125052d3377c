"""A small all-reduce over all ranks of a group, run by torchrun, with the backend that is named (gloo, nccl)."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

RIGHT = "all-reduce is right"
"""What every rank says when it is."""
_BOUND = timedelta(seconds=60)


def main(backend: str) -> None:
    """Add up the ranks' numbers and compare.

    Raises:
        SystemExit: the sum is wrong.
    """
    import torch
    import torch.distributed as dist

    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_BOUND)
    total = torch.tensor([float(dist.get_rank() + 1)], device=device)
    dist.all_reduce(total)
    ranks = dist.get_world_size()
    found, wanted = total.item(), ranks * (ranks + 1) / 2
    dist.destroy_process_group()
    if found != wanted:
        raise SystemExit(f"the sum of 1 to {ranks} came out as {found:g}, not {wanted:g}")
    print(RIGHT)


if __name__ == "__main__":
    main(sys.argv[1])
