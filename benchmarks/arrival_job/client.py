"""Notes when the script has its model, and returns it unchanged, after as many seconds as it is told."""

import json
import os
import sys
import time
from pathlib import Path

import nvflare.client as flare
import torch.distributed as dist

folder = Path(sys.argv[1]).parent
ancestry = [os.getpid()]
while ancestry[-1] > 1:
    ancestry.append(int(Path(f"/proc/{ancestry[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
with (folder / "pids").open("a") as file:
    file.write(json.dumps(ancestry) + "\n")
dist.init_process_group("gloo")
flare.init(rank=dist.get_rank())
model = flare.receive()
if model:
    with Path(sys.argv[1]).open("a") as file:
        file.write(f"{time.time()}\n")
dist.barrier()
time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0)
if model:
    with (folder / "sending").open("a") as file:
        file.write(f"{time.time()}\n")
    flare.send(flare.FLModel(params=model.params))
dist.destroy_process_group()
