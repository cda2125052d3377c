"""A model of 300 MB in NVFlare's simulator: it arrives whole, whatever becomes of other ranks in the meantime."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Simulator, finish

pytestmark = [pytest.mark.real, pytest.mark.alone]

ELEMENTS = 75_000_000

# Rank 1, on node 1, dies as soon as the file "die" is in the working directory.
ADD = """
    import os
    import signal
    import time
    from pathlib import Path

    import nvflare.client as flare
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flare.init(rank=rank)
    received = flare.receive()
    if rank == 0:
        flare.send(flare.FLModel(params={name: value + 1 for name, value in received.params.items()}))
        print("has sent", flush=True)
    else:
        while not Path("die").exists():
            time.sleep(0.01)
        print("dies now", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_is_killed_during_the_upload_does_no_harm(simulator: Simulator) -> None:
    checkpoint = simulator.job.parent / "start.npy"
    start = np.arange(ELEMENTS, dtype=np.float32) % 1000
    np.save(checkpoint, start)
    simulator.sites = ("site-1",)
    simulator.persistor = {"source_ckpt_file_full_name": str(checkpoint)}
    simulator.write_job(ADD, nodes=2)

    running = simulator.start()
    # The executor has returned the result by then, as a reference: the server fetches the array from rank 0.
    simulator.wait_for_message("site-1", "start to send task result to server")
    (simulator.app("site-1") / "die").touch()
    output = finish(running)

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    np.testing.assert_array_equal(simulator.model_array(), start + 1)
    said = simulator.messages("site-1")
    assert said.index("node 1 rank 1 | dies now") < said.index("node 0 rank 0 | has sent")
    assert "a rank failed after the task's result was accepted; the task is not affected" in said
    assert simulator.errors("site-1") == []
