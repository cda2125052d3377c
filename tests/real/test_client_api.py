"""The Client API on every rank: in NVFlare's simulator, and over torchrun with a stand-in for it on rank 0."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import tb_events
from client_ranks import LIMIT_S, STAND_IN, run_nodes
from simulation import SITES, Simulator, leaving_nothing

from nvflare_torchrun_plugin import timeline

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """No test here leaves a process whose TMPDIR is its folder or one in it, nor a file of ours there."""
    with leaving_nothing(tmp_path):
        yield


# A script for one process, but for its imports, the sum over the ranks, and a writer beside log().
TRAIN = """
    import torch
    import torch.distributed as dist
    import nvflare_torchrun_plugin.client as flare
    from nvflare_torchrun_plugin.client.tracking import SummaryWriter

    flare.init()
    dist.init_process_group("gloo")
    while flare.is_running():
        model = flare.receive()
        task = f"{flare.get_task_name()} {model.current_round} {flare.is_train()}"
        print(f"{flare.get_site_name()} {task}", flush=True)
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        flare.log("rank", dist.get_rank(), flare.AnalyticsDataType.SCALAR, global_step=model.current_round)
        SummaryWriter().add_scalar("total", total.item() + dist.get_rank(), model.current_round)
        flare.send(flare.FLModel(params={k: v + total.item() for k, v in model.params.items()}))
    dist.destroy_process_group()
    print("left the loop", flush=True)
"""

REFUSED = """
    import nvflare_torchrun_plugin.client as flare

    flare.init()
    flare.receive()
    try:
        flare.send(flare.FLModel())
    except RuntimeError as e:
        print(f"refused: {e}", flush=True)
        raise
"""


@pytest.mark.parametrize(("launch_once", "sites"), [(False, SITES[:1]), (True, SITES)])
def test_every_rank_goes_through_the_rounds(
    simulator: Simulator, launch_once: bool, sites: tuple[str, ...]
) -> None:
    simulator.sites = sites
    simulator.receivers = [tb_events.RECEIVER]
    simulator.write_job(TRAIN, nodes=2, rounds=2, nproc_per_node=2, launch_once=launch_once)

    output = simulator.run()

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    assert simulator.model() == [2 * (1 + 2 + 3 + 4)]
    for site in sites:
        said = simulator.messages(site)
        for turn in range(2):
            assert said.count(f"{site} train {turn} True") == 4
        assert said.count("left the loop") == (4 if launch_once else 8)
        assert simulator.errors(site) == []
        # Of what the ranks log, rank 0's part.
        assert tb_events.scalars(simulator.workspace, site) == {
            "rank": [(0, 0), (1, 0)],
            "total": [(0, 10), (1, 10)],
        }
    for site in sites:
        tasks = [task for task in timeline.read(simulator.workspace) if task.site == site]
        assert [(task.round, task.outcome, len(task.nodes)) for task in tasks] == [(0, "ok", 2), (1, "ok", 2)]
        assert [task.start for task in tasks] == ["cold", "kept" if launch_once else "cold"]
        for node in (node for task in tasks for node in task.nodes):
            phases = [part.phase for part in node.segments if not part.ahead]
            middle = [phase for phase in phases if phase in ("receiving", "training", "sending")]
            assert middle == ["receiving", "training", "sending"]
            assert (node.ranks, node.failure) == (2, None)
            if not launch_once:
                # The relay comes when the task has: nothing was ahead.
                assert phases[:3] == ["waiting", "launching", "joining"]
                assert phases[-1] == "cleaning up"


def test_what_nvflare_refuses_on_rank_0_is_refused_to_every_rank(simulator: Simulator) -> None:
    simulator.sites = ("site-1",)
    simulator.write_job(REFUSED, nodes=2)

    simulator.run()

    said = simulator.messages("site-1")
    refused = "refused: the model to send does not have either params or metrics"
    assert sorted(re.findall(rf"(?m)^(node . rank .) \| {refused}$", said)) == ["node 0 rank 0", "node 1 rank 1"]
    assert "group failed: node" in "\n".join(simulator.errors("site-1"))


WAITS = (
    STAND_IN
    + """
    FIRST = sys.argv[2] == "group-first"
    if FIRST:
        dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    flare.init()
    if not FIRST:
        dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    torch.manual_seed(1)
    expected = torch.randn(300, 1000)
    for _ in range(2):
        before = time.process_time()
        model = flare.receive()
        used = time.process_time() - before
        right = torch.equal(model.params["w"], expected) and torch.equal(model.params["b"], expected.bfloat16())
        total = torch.ones(1)
        dist.all_reduce(total)
        shared = [line.split()[-2:] for line in open("/proc/self/maps") if "nvflare-model" in line]
        tell(right=right, used=used, total=total.item(), shared=shared)
        flare.send(model)
    dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("order", ["group-first", "api-first"])
def test_ranks_wait_for_longer_than_a_collective_may_take(tmp_path: Path, order: str) -> None:
    shm = set(os.listdir("/dev/shm"))  # noqa: PTH208 - names are all that is compared
    facts = run_nodes(tmp_path, WAITS, "17", order, nodes=2, nproc=2)
    assert [fact["rank"] for fact in facts] == [0, 0, 1, 1, 2, 2, 3, 3]
    for fact in facts:
        assert fact["right"]
        assert fact["total"] == 4
        # Seventeen seconds of waiting, and a model of two megabytes.
        assert fact["used"] < 2.0, facts
        # The memory has a name for people only, and none that could stay behind.
        assert fact["shared"] == [["/memfd:nvflare-model", "(deleted)"]]
    assert set(os.listdir("/dev/shm")) <= shm  # noqa: PTH208


BEGINS_AGAIN = (
    STAND_IN
    + """
    if RANK == 0:
        def refuse(rank=None, config_file=None):
            nvflare.client.init = lambda rank=None, config_file=None: "context"
            raise RuntimeError("not yet")
        nvflare.client.init = refuse
    try:
        flare.init()
    except RuntimeError as e:
        refused = str(e)
    if RANK == 0:
        # So the others would find what the first time has left.
        time.sleep(2)
    contexts = [flare.init(), flare.init()]
    tell(refused=refused, contexts=contexts, weights=len(flare.receive().params["w"]))
"""
)


def test_it_can_begin_after_a_refusal_and_only_once(tmp_path: Path) -> None:
    facts = run_nodes(tmp_path, BEGINS_AGAIN, "0", nodes=2, nproc=2)
    assert facts == [
        {"rank": rank, "refused": "not yet", "contexts": ["context" if rank == 0 else None] * 2, "weights": 300}
        for rank in range(4)
    ]


NO_MEMORY = (
    STAND_IN
    + """
    from nvflare_torchrun_plugin.client import block

    flare.init()
    map_shared = block.map_shared
    def refuse(descriptor, nbytes):
        raise MemoryError("none on node 1")
    if RANK == 2:
        block.map_shared = refuse
    before = len(os.listdir("/proc/self/fd"))
    try:
        flare.receive()
    except MemoryError as e:
        refused = str(e)
    left = len(os.listdir("/proc/self/fd")) - before
    block.map_shared = map_shared
    tell(refused=refused, left=left, weights=len(flare.receive().params["w"]))
"""
)


def test_a_node_without_memory_for_the_model_keeps_no_other_waiting(tmp_path: Path) -> None:
    facts = run_nodes(tmp_path, NO_MEMORY, "0", nodes=2, nproc=2)
    assert facts == [{"rank": rank, "refused": "none on node 1", "left": 0, "weights": 300} for rank in range(4)]


FORKS = (
    STAND_IN
    + """
    import signal
    flare.init()
    flare.receive()
    if RANK == 0:
        # A child that outlives its rank, as a worker of a DataLoader might.
        if os.fork() == 0:
            for _ in range(600):
                time.sleep(0.1)
                if os.path.exists(sys.argv[2]):
                    break
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        flare.is_running()
    except RuntimeError as e:
        with open(sys.argv[2] + ".new", "w") as file:
            file.write(str(e))
        os.rename(sys.argv[2] + ".new", sys.argv[2])
"""
)


def test_a_rank_that_was_killed_is_missed_though_its_child_lives(tmp_path: Path) -> None:
    script, said = tmp_path / "script.py", tmp_path / "said"
    script.write_text(dedent(FORKS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(script), "0", str(said)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert "Signal 9 (SIGKILL)" in ended.stderr
    assert said.read_text() == "is_running(): the first rank of node 0 has ended"


WITHOUT_TORCHRUN = """
    import os
    import nvflare_torchrun_plugin.client as flare

    for call in (flare.is_running, flare.receive, flare.get_task_name, flare.system_info):
        try:
            call()
        except RuntimeError as e:
            print(e)
"""


def test_before_init_it_says_what_nvflare_says(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(dedent(WITHOUT_TORCHRUN))
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    assert ended.stdout.count("Did you call flare.init()") == 4
