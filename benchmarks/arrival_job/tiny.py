"""Returns the model unchanged, as often as it is told: one process, without a framework, to be quick."""

import sys
import time
from pathlib import Path

import nvflare.client as flare

flare.init(rank="0")
for _ in range(int(sys.argv[2])):
    model = flare.receive()
    with Path(sys.argv[1]).open("a") as file:
        file.write(f"{time.time()}\n")
    with Path(sys.argv[1]).with_name("sending").open("a") as file:
        file.write(f"{time.time()}\n")
    flare.send(flare.FLModel(params=model.params))
flare.shutdown()
