"""Scripts that end too early, in NVFlare's simulator: the task fails within seconds, with one clear sentence."""

from __future__ import annotations

import re

import pytest
from simulation import Simulator

pytestmark = pytest.mark.real

# Only rank 0 ends; rank 1, on the other node, would stay for ten minutes.
SCRIPT = """
    import sys
    import time

    import torch.distributed as dist

    how = sys.argv[1]
    if how.startswith("after shutdown"):
        import nvflare_torchrun_plugin.client as flare
    else:
        import nvflare.client as flare

    def be_slow():
        # The task is handled once the script leaves NVFlare, or a second later; to leave takes a second.
        from nvflare.client.cell import api

        handle, stop = api.CellClientAPI._handle_task_ready, api._shutdown_f3_streaming

        def handle_late(self, request):
            deadline = time.monotonic() + 1
            while not self._stopped and time.monotonic() < deadline:
                time.sleep(0.01)
            return handle(self, request)

        def stop_slowly():
            stop()
            time.sleep(1)

        api.CellClientAPI._handle_task_ready, api._shutdown_f3_streaming = handle_late, stop_slowly

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if how.endswith("on a slow machine"):
        be_slow()
    if how != "before init":
        flare.init(rank=rank)
    if rank:
        time.sleep(600)
    if how == "after receive":
        flare.receive()
    if how.startswith("after shutdown"):
        flare.shutdown()
    print("ends now", flush=True)
"""

NO_RESULT = (
    r"rank 0 ended with exit code 0, but no result was accepted; does the script call flare\.init\(\),"
    r" flare\.receive\(\) and flare\.send\(\) on it"
)


@pytest.mark.parametrize(
    "how",
    [
        "before init",
        "after init",
        "after init, on a slow machine",
        "after shutdown, on a slow machine",
        "after receive",
    ],
)
def test_rank_0_ends_without_a_result(simulator: Simulator, how: str) -> None:
    simulator.sites = ("site-1",)
    simulator.write_job(SCRIPT, nodes=2, script_args=[how])

    output = simulator.run()

    assert "Finished FedAvg" not in simulator.messages("server")
    sentence = (
        rf"task 'train' failed: group failed: node 0 \(\S+\) rank 0 \(local rank 0\): {NO_RESULT}, \d+\.\d s after"
    )
    assert [bool(re.match(sentence, error)) for error in simulator.errors("site-1")].count(True) == 1, output[
        -5000:
    ]
    assert "  stopped because of it: rank 1" in simulator.messages("site-1")
    # 4 s on an idle machine. NVFlare's own patience is 30 s with a trainer that does not acknowledge its shutdown,
    # and 300 s with one that never says hello.
    assert simulator.seconds_between("site-1", r"rank 0 \| ends now", "finished processing task") < 20
