"""Jobs in NVFlare's simulator, each with the configuration written by hand: what two sites log, send and leave."""

from __future__ import annotations

import re
from typing import Any

import pytest
from simulation import SITES, Simulator

pytestmark = pytest.mark.real

# Upstream style: rank 0 alone talks to NVFlare. Each rank adds its rank + 1 and ten times its node rank, so the
# model that the server keeps shows which ranks have taken part. With "once" it serves one task, as an ordinary
# script does; with "loop" it takes tasks until there is none.
TRAIN = """
    import os
    import sys

    import nvflare.client as flare
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flare.init(rank=rank)
    try:
        while True:
            received = flare.receive()
            print(f"got {received is not None} on {rank} of {dist.get_world_size()}", flush=True)
            more = [received is not None]
            dist.broadcast_object_list(more, src=0)
            if not more[0]:
                break
            total = torch.tensor([rank + 1.0 + 10 * int(os.environ["GROUP_RANK"])])
            dist.all_reduce(total)
            if received:
                params = {name: value + total.item() for name, value in received.params.items()}
                flare.send(flare.FLModel(params=params))
            if sys.argv[1] == "once":
                break
    finally:
        flare.shutdown()
    dist.destroy_process_group()
"""

RAISE = """
    import time

    import nvflare.client as flare
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flare.init(rank=dist.get_rank())
    flare.receive()
    if dist.get_rank() == 0:
        print("about to fail", flush=True)
        raise RuntimeError("broken on purpose")
    time.sleep(600)
"""


@pytest.mark.parametrize(("nodes", "launch_once"), [(1, True), (2, False)])
def test_rounds_with_two_ranks_per_site(simulator: Simulator, nodes: int, launch_once: bool) -> None:
    simulator.write_job(
        TRAIN,
        nodes=nodes,
        rounds=2,
        nproc_per_node=2 // nodes,
        launch_once=launch_once,
        script_args="loop" if launch_once else "once",
    )

    output = simulator.run()

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    assert simulator.model() == [2 * (1 + 2 if nodes == 1 else 1 + 12)]
    for site in SITES:
        said = simulator.messages(site)
        assert said.count("got True on 0 of 2") == 2
        # The loop asks once more and is told that there is no more.
        assert said.count("got False on 0 of 2") == (1 if launch_once else 0)
        assert said.count("got False on 1 of 2") == (3 if launch_once else 2)
        assert f"node group of {nodes} " in said
        assert simulator.errors(site) == []


def test_site_file_goes_before_the_job(simulator: Simulator) -> None:
    simulator.write_site_file("nodes: 2\ntransport: local\n")
    simulator.write_job(TRAIN, nodes=1, script_args="once")

    output = simulator.run()

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    assert simulator.model() == [1 + 12]
    for site in SITES:
        # The site's own copy, not the workspace's.
        file = simulator.workspace / site / "local" / "node_group.yaml"
        assert re.search(rf"node group of 2 .* from site file {re.escape(str(file))}", simulator.messages(site))


@pytest.mark.alone
def test_exception_on_rank_0_is_told_within_seconds(simulator: Simulator) -> None:
    simulator.write_job(RAISE, nodes=2)

    simulator.run()

    for site in SITES:
        (block,) = [error for error in simulator.errors(site) if "group failed" in error]
        # The group is stopped soon after the exception; on a busy host before the rank has got to its exit code.
        what = r"(?:exit code 1|uncaught exception), \d+\.\d s after the start"
        raised = r": RuntimeError: broken on purpose\n  traceback:\n"
        begin = r"task 'train' failed: group failed: node 0 \(\S+\) rank 0 \(local rank 0\): "
        assert re.search(begin + what + raised, block)
        script = simulator.app(site) / "custom" / "train.py"
        assert f'File "{script}", line 12, in <module>' in block
        assert '    raise RuntimeError("broken on purpose")' in block
        assert "RuntimeError: broken on purpose" in block
        assert re.search(r"  last lines:\n(    .*\n)*    about to fail\n", block)
        assert "stopped because of it: rank 1" in block
        # NVFlare's own patience with a silent trainer is 30 s, torchrun's with a lost node 300 s.
        assert simulator.seconds_between(site, "about to fail", "group failed") < 10


@pytest.mark.parametrize(
    ("args", "site_file", "sentence"),
    [
        ({"script": "lost.py"}, None, r"script 'lost\.py' is not there; looked for /\S+/custom/lost\.py, /\S+"),
        (
            {"nnodes": 3},
            "nodes: 2\n",
            r"the job wants 3 nodes \(nnodes\), but site file /\S+/node_group\.yaml offers 2: lower nnodes",
        ),
        ({}, "nodes: [\n", r"site file /\S+/local/node_group\.yaml line \d is no valid YAML: "),
    ],
    ids=["missing script", "too many nodes", "broken site file"],
)
def test_bad_input_is_one_sentence_and_a_failed_task(
    simulator: Simulator, args: dict[str, Any], site_file: str | None, sentence: str
) -> None:
    if site_file is not None:
        simulator.write_site_file(site_file)
    simulator.write_job(TRAIN, script_args="once", **args)

    output = simulator.run()

    assert "Finished FedAvg" not in simulator.messages("server")
    # The first failed task ends the run, perhaps before the other site has got its own.
    starts = [[e for e in simulator.errors(site) if re.search(sentence, e)] for site in SITES]
    assert all(starts), output[-5000:]
    tasks = [e for found in starts for e in found if re.search(rf"task 'train' failed: {sentence}", e)]
    assert tasks, output[-5000:]
    # The server may show one: how NVFlare ends a workflow without results depends on the moment.
    assert not any("Traceback" in simulator.messages(site) for site in SITES)


def test_a_syntax_error_is_shown_and_fails_the_task(simulator: Simulator) -> None:
    simulator.sites = ("site-1",)
    simulator.write_job("def broken(:\n")

    simulator.run()

    (verdict,) = [error for error in simulator.errors("site-1") if "task 'train' failed: " in error]
    assert "rank 0 (local rank 0): exit code 1" in verdict
    assert "def broken(:" in verdict
    assert "SyntaxError: invalid syntax" in verdict
    assert "Finished FedAvg" not in simulator.messages("server")


@pytest.mark.parametrize("nnodes", ["x", 0])
def test_an_argument_that_is_wrong_is_told_by_nvflare(simulator: Simulator, nnodes: object) -> None:
    """NVFlare builds the executor from its configuration when the job begins, and shows what was wrong."""
    simulator.sites = ("site-1",)
    simulator.write_job(TRAIN, nnodes=nnodes)

    simulator.run()

    sentence = f"executor argument nnodes is {nnodes!r}: must be a number of nodes of at least 1"
    assert any(sentence in error for error in simulator.errors("site-1"))
    assert "Finished FedAvg" not in simulator.messages("server")
