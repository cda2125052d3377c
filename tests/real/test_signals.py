"""Signals to the client job and to its relay while two nodes train, in NVFlare's simulator: like an abort."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from simulation import Simulator, finish, processes, the_one

pytestmark = [pytest.mark.real, pytest.mark.alone]

GRACE = 2.0
BOUND = 5.0
"""Seconds beyond the grace in which nothing of a group that was told to end may be left."""

# Rank 1 takes all of the grace.
TRAIN = """
    import signal
    import time

    import nvflare.client as flare
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flare.init(rank=rank)
    flare.receive()
    if rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.barrier()
    print("training", flush=True)
    time.sleep(600)
"""


def ours(simulator: Simulator) -> dict[int, str]:
    """The relay, the agents, torchruns and ranks."""
    return {pid: words for pid, words in processes(simulator.tmp).items() if "nvflare_torchrun_plugin." in words}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("whom", ["client job", "relay"])
def test_a_signal_to_end_ends_all_nodes(simulator: Simulator, whom: str, number: signal.Signals) -> None:
    simulator.sites = ("site-1",)
    simulator.write_job(TRAIN, nodes=2, stop_grace_period=GRACE, max_task_attempts=2)
    running = simulator.start()
    for rank in (0, 1):
        simulator.wait_for_message("site-1", f"rank {rank} | training")
    words = "simulator_worker" if whom == "client job" else "nvflare_torchrun_plugin.relay"
    victim = the_one(processes(simulator.tmp), words)
    assert victim is not None
    assert len(ours(simulator)) >= 1 + 2 * 3

    sent = time.monotonic()
    os.kill(victim, number)
    while left := ours(simulator):
        assert time.monotonic() - sent < BOUND + GRACE, left
        time.sleep(0.02)
    finish(running)

    said = simulator.messages("site-1")
    name = number.name
    if whom == "client job":
        assert f"the client job got {name}: the run ends at this site" in simulator.errors("site-1")
        how, blame = "aborted", f"the client job got {name}"
    else:
        how, blame = "failed", f"its relay got {name}, from outside"
    assert re.search(rf"task 'train' {how}: group stopped after \d+\.\d s: {re.escape(blame)}", said)
    assert "LEFT OVER" not in said
    assert "attempt 2 begins" not in said
    assert "Finished FedAvg" not in simulator.messages("server")


# Once both sites train, one fails, and the server ends the job.
FAILS = """
    import pathlib
    import sys
    import time

    import nvflare.client as flare

    trains = pathlib.Path(sys.argv[1], "trains")
    flare.init(rank=0)
    flare.receive()
    if flare.get_site_name() == "site-1":
        trains.touch()
        time.sleep(600)
    while not trains.exists():
        time.sleep(0.02)
    raise ValueError("bad day")
"""


def test_a_task_that_nvflare_ends_for_an_abort_is_nobody_s_fault(simulator: Simulator, tmp_path: Path) -> None:
    simulator.write_job(FAILS, script_args=[str(tmp_path)], max_task_attempts=2)

    simulator.run()

    said = simulator.messages("site-1")
    assert re.search(r"task 'train' aborted: group stopped after \d+\.\d s: NVFlare has ended its relay", said)
    assert "group failed" not in said
    assert "begins" not in said
    assert "ValueError: bad day" in simulator.messages("site-2")
