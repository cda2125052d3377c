"""Groups that are started ahead of their tasks, in NVFlare's simulator: what their ranks do and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation import LIMIT_S, Simulator, finish, in_folder, processes, the_one

from nvflare_torchrun_plugin import timeline
from nvflare_torchrun_plugin.node import procs

pytestmark = [pytest.mark.real, pytest.mark.alone]

SECOND_WAITS, THIRD_WAITS = (f"task group {number}-[0-9a-f]+: waiting" for number in (2, 3))

# Each rank adds its number, over all ranks, to the model, and says when it has begun and with which process.
CODE = """
import json, os, sys, time
began = time.time()
import torch, torch.distributed as dist
import nvflare.client as flare

def main():
    flare.init()
    dist.init_process_group("gloo")
    model = [flare.receive() if dist.get_rank() == 0 else None]
    received = time.time()
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    with open(os.path.join(sys.argv[1], f"{dist.get_rank()}"), "a+") as file:
        print(json.dumps([os.getpid(), began, received]), file=file)
        file.seek(0)
        number = len(file.readlines())
    while not os.path.exists(os.path.join(sys.argv[1], f"go on {number}")):
        time.sleep(0.05)
    if dist.get_rank() == 0:
        flare.send(flare.FLModel(params={"numpy_key": model[0].params["numpy_key"] + total.numpy()}))
    dist.destroy_process_group()

main()
"""


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[Simulator]:
    with in_folder(tmp_path) as simulator:
        simulator.sites = ("site-1",)
        (tmp_path / "seen").mkdir()
        yield simulator


def write(simulator: Simulator, rounds: int) -> Path:
    seen = simulator.job.parent / "seen"
    simulator.write_job(CODE, nodes=2, script_args=[str(seen)], rounds=rounds, warm_start=True)
    return seen


def ranks(simulator: Simulator, seen: Path, round_number: int) -> set[int]:
    """Ids of the processes that wait as ranks for the round after this one, as far as they have come."""
    past = {
        json.loads(line)[0] for file in seen.glob("[01]") for line in file.read_text().splitlines()[:round_number]
    }
    found = processes(simulator.tmp)
    return {pid for pid, words in found.items() if "nvflare_torchrun_plugin.rank train.py" in short(words)} - past


def short(words: str) -> str:
    """The command line of a rank, or nothing."""
    before, found, after = words.partition(" -u -m nvflare_torchrun_plugin.rank ")
    return (
        f"nvflare_torchrun_plugin.rank {Path(after.split(' ')[0]).name}" if found and "torch" not in before else ""
    )


def wait_for(simulator: Simulator, pattern: str) -> None:
    """Wait until the site's log has the pattern."""
    log = simulator.workspace / "site-1" / "log.txt"
    deadline = time.monotonic() + LIMIT_S
    while not (log.exists() and re.search(pattern, log.read_text())):
        assert time.monotonic() < deadline, f"{pattern!r} is not in {log}"
        time.sleep(0.1)


def agent_of(rank: int, waiting: set[int]) -> int:
    """The node agent above the one of these ranks that has the number."""
    (pid,) = [
        pid for pid in waiting if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    torchrun = procs.parent(pid)
    assert torchrun is not None
    agent = procs.parent(torchrun)
    assert agent is not None
    assert b"node_agent" in Path(f"/proc/{agent}/cmdline").read_bytes()
    return agent


def cpu_ticks(pid: int) -> int:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_task_has_the_group_that_was_waiting_for_it_unless_a_node_has_fallen_silent(
    simulator: Simulator,
) -> None:
    seen = write(simulator, rounds=3)
    process = simulator.start()
    try:
        wait_for(simulator, SECOND_WAITS)
        waiting = ranks(simulator, seen, 1)
        assert len(waiting) == 2
        before = {pid: cpu_ticks(pid) for pid in waiting}
        time.sleep(3)
        assert {pid: cpu_ticks(pid) for pid in waiting} == before
        (seen / "go on 1").touch()
        wait_for(simulator, THIRD_WAITS)
        os.kill(agent_of(1, ranks(simulator, seen, 2)), signal.SIGSTOP)
        for number in (2, 3):
            (seen / f"go on {number}").touch()
        output = finish(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    log = simulator.messages("site-1")
    # The first task may come while its group is still being started.
    assert log.count(": warm, ") + log.count("the task starts cold: ") == 3, output
    assert log.count(": warm, all ranks were waiting") >= 1, log
    assert "the task starts cold: nodes of the group started ahead are silent: " in log
    assert simulator.errors("site-1") == []
    assert simulator.model() == [9.0]
    tasks = timeline.read(simulator.workspace)
    assert [task.outcome for task in tasks] == ["ok"] * 3
    assert sum(task.start == "warm" for task in tasks) == log.count(": warm, ")
    for node in tasks[1].nodes:
        # It had waited for its task before that came, and then only became the script.
        ahead = [part.phase for part in node.segments if part.ahead]
        assert ahead == ["launching", "joining", "importing", "waiting"]
        assert [node.seconds(phase) for phase in ("launching", "joining", "importing")] == [0, 0, 0]
    rounds = [[json.loads(line) for line in (seen / str(rank)).read_text().splitlines()] for rank in (0, 1)]
    assert [len(of_rank) for of_rank in rounds] == [3, 3]
    assert len({of_round[0] for of_rank in rounds for of_round in of_rank}) == 6  # fresh processes each time
    assert waiting == {rounds[0][1][0], rounds[1][1][0]}


def test_a_run_that_is_killed_leaves_no_group_that_waits(simulator: Simulator) -> None:
    seen = write(simulator, rounds=3)
    process = simulator.start()
    wait_for(simulator, SECOND_WAITS)
    assert len(ranks(simulator, seen, 1)) == 2
    found = processes(simulator.tmp)
    for pid, words in found.items():
        if "nvflare" in words and "nvflare_torchrun_plugin" not in words:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    finish(process)
    deadline = time.monotonic() + 60
    while (left := processes(simulator.tmp)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == {}


# Rank 0 returns its model, one more; no framework, to be quick.
SHORT = """
import os, sys
import nvflare.client as flare

flare.init()
if os.environ["RANK"] == "0":
    model = flare.receive()
    with open(sys.argv[1], "a") as file:
        print("done", file=file)
    flare.send(flare.FLModel(params={"numpy_key": model.params["numpy_key"] + 1}))
"""
TASKS = 14
HELD = ("descriptors", "processes", "files")


def held(simulator: Simulator) -> tuple[int, int, int] | None:
    """Descriptors of the client job, processes of the run, files of ours; None if the client job is gone."""
    found = processes(simulator.tmp)
    job = the_one(found, "simulator_worker", "--root_url")
    try:
        descriptors = len(list(Path(f"/proc/{job}/fd").iterdir()))
    except OSError:
        return None
    files = sum(path.name.startswith("nvfl") for path in simulator.tmp.iterdir())
    return descriptors, len(found), files


def test_what_a_run_holds_does_not_grow_with_its_tasks(simulator: Simulator) -> None:
    done = simulator.job.parent / "done"
    simulator.write_job(SHORT, rounds=TASKS, script_args=[str(done)], warm_start={"preload": ["nvflare.client"]})
    process = simulator.start()
    early: list[tuple[int, int, int]] = []
    late: list[tuple[int, int, int]] = []
    try:
        while process.poll() is None:
            number = len(done.read_text().split()) if done.exists() else 0
            part = early if 3 <= number < 8 else late if TASKS - 5 <= number < TASKS else None
            if part is not None and (now := held(simulator)) is not None:
                part.append(now)
            time.sleep(0.1)
    finally:
        output = finish(process)
    assert simulator.errors("site-1") == [], output
    assert simulator.model() == [TASKS]
    assert simulator.messages("site-1").count(": warm, ") >= TASKS - 1
    # One more may be open for a moment.
    for what, slack, before, after in zip(
        HELD, (4, 4, 1), zip(*early, strict=True), zip(*late, strict=True), strict=True
    ):
        assert max(after) <= max(before) + slack, (what, max(before), max(after))
