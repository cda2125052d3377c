"""Does the same as client.py, but for all tasks of a job: a trainer that is there when a task comes."""

import sys
import time
from pathlib import Path

import nvflare.client as flare
import torch.distributed as dist

dist.init_process_group("gloo")
flare.init(rank=dist.get_rank())
for _ in range(int(sys.argv[3])):
    model = flare.receive()
    if model:
        with Path(sys.argv[1]).open("a") as file:
            file.write(f"{time.time()}\n")
    dist.barrier()
    time.sleep(float(sys.argv[2]))
    if model:
        with Path(sys.argv[1]).with_name("sending").open("a") as file:
            file.write(f"{time.time()}\n")
        flare.send(flare.FLModel(params=model.params))
dist.destroy_process_group()
