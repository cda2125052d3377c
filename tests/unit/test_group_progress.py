"""How far a group comes, and who says that it comes no further: phases, stopped ranks, NVFlare that gives up."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
from pathlib import Path

import pytest
from group_runs import ENDS, TRAINS, UP, failure, run, run_with, said
from standins import HELLO, LATE, READY, end, launch, says

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.supervision import group, progress
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervision.group import Group

pytestmark = pytest.mark.usefixtures("short_bounds")


HALT = wire.encode(wire.Halt(0, LATE)).decode().strip()
NEWS = wire.encode(wire.Line(0, "still there")).decode().strip()


def test_a_silent_node_that_cannot_be_seen_to_for_want_of_descriptors_is_told_of(tmp_path: Path) -> None:
    dies = "while ! [ -e $1/die ]; do sleep 0.02; done; kill -9 $$"
    agent = f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; {dies}"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def steps(group: Group, lines: list[str]) -> None:
        await said(lines, "training")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        (tmp_path / "die").mkdir()
        await asyncio.wrap_future(group.decided)

    try:
        verdict = run_with(launch(tmp_path, agent), steps)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert verdict.leftovers == (
        "node 0 (host-0): it is not confirmed that all processes there are gone: no agent could be started for"
        " that: [Errno 24] Too many open files",
    )


def test_a_rank_that_is_stopped_for_too_long_fails_its_group(tmp_path: Path) -> None:
    agent = f"read prepare; {says(HELLO, READY)}; read start; {says(UP, HALT)}; {ENDS}"
    verdict = run(launch(tmp_path, agent))
    assert (failure(verdict).rank, failure(verdict).cause) == (0, "infrastructure")
    assert failure(verdict).what == "stopped (SIGSTOP) for 60 s (node_timeout)"


def test_once_the_result_is_there_a_rank_may_be_stopped_until_the_next_task(tmp_path: Path) -> None:
    accepted, resumed = (f"while [ ! -e $1/{name} ]; do sleep 0.02; done" for name in ("accepted", "resumed"))
    agent = (
        f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; {accepted}; {says(HALT, NEWS)};"
        f" {resumed}; {says(HALT)}; {ENDS}"
    )

    async def accept_and_resume(group: Group, lines: list[str]) -> None:
        await said(lines, "training")
        group.accept()
        (tmp_path / "accepted").touch()
        while not any("still there" in line for line in lines):
            await asyncio.sleep(0.01)
        assert group.well
        group.resume()
        assert group.well
        (tmp_path / "resumed").touch()

    verdict = run_with(launch(tmp_path, agent), accept_and_resume)
    assert failure(verdict).what == "stopped (SIGSTOP) for 60 s (node_timeout)"


def test_the_log_tells_each_phase_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK", 0.01)

    async def steps(running: Group, lines: list[str]) -> None:
        for phase in ("starting", "joining", "training", "finishing"):
            await said(lines, phase)
            if phase == "joining":
                (tmp_path / "up").touch()
            elif phase == "training":
                running.accept()
        running.stop("the test asked for it")
        found.extend(line.partition(", ")[0] for line in lines if line.startswith("task group "))

    found: list[str] = []
    run_with(launch(tmp_path, TRAINS), steps)
    phases = ("starting", "joining", "training", "finishing")
    assert found == [f"task group standin: {phase}" for phase in phases]


def test_a_phase_that_lasts_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    monkeypatch.setattr(progress, "_TELL_AGAIN", 0.05)

    async def steps(running: Group, lines: list[str]) -> None:
        while sum(line.startswith("task group standin: joining, ") for line in lines) < 3:
            await asyncio.sleep(0.01)
        (tmp_path / "up").touch()
        running.stop("the test asked for it")

    run_with(launch(tmp_path, TRAINS), steps)


def test_a_torchrun_that_starts_no_rank_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped torchrun on node 0, which would open the port, keeps the others for longer than their bound."""
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    monkeypatch.setattr(progress, "_JOIN_MARGIN", 0.2)
    joins = f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; read stop; {says(end(0, stopped=True))}"
    hangs = f"read prepare; {says(HELLO, READY)}; read start; read stop; {says(end(0, stopped=True))}"
    verdict = run(launch(tmp_path, joins, hangs, join_timeout=2))
    assert failure(verdict).node_rank == 1
    assert failure(verdict).what == "its torchrun has started no rank within join_timeout, 2 s"
    assert failure(verdict).cause == "infrastructure"
    assert 2.2 <= failure(verdict).seconds < 4


SILENT = GivenUp("heartbeat timed out", "infrastructure")


def test_nvflare_gives_up_on_a_rank_0_that_another_node_has_kept_from_starting(tmp_path: Path) -> None:
    joins = f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; read stop; {says(end(0, stopped=True))}"
    hangs = f"read prepare; {says(HELLO, READY)}; read start; > $1/on; read stop; {says(end(0, stopped=True))}"

    async def steps(running: Group, lines: list[str]) -> None:
        while not (tmp_path / "on").exists():
            await asyncio.sleep(0.01)
        running.give_up(SILENT)

    verdict = run_with(launch(tmp_path, joins, hangs), steps)
    assert (failure(verdict).node_rank, failure(verdict).rank, failure(verdict).cause) == (
        1,
        None,
        "infrastructure",
    )
    assert failure(verdict).what == ("it has started no rank, and NVFlare gave up on rank 0: heartbeat timed out")


def test_nvflare_gives_up_before_it_is_known_which_nodes_make_the_group(tmp_path: Path) -> None:
    async def steps(running: Group, lines: list[str]) -> None:
        while not all(
            file.exists() and file.read_text() for file in (tmp_path / "on", tmp_path / "logs/node-0.log")
        ):
            await asyncio.sleep(0.01)
        running.give_up(SILENT)

    # Its line comes after its answer, and is in its file when that has been read.
    line = wire.encode(wire.Line(None, "ready")).decode().strip()
    ready = f"read prepare; {says(HELLO, READY, line)}; read stop; {says(end(0, stopped=True))}"
    silent = "read prepare; echo > $1/on; exec sleep 1000"
    verdict = run_with(launch(tmp_path, ready, silent, least=1), steps)
    assert (failure(verdict).node_rank, verdict.ranks_ran) == (1, False)
    assert failure(verdict).what.startswith("it has started no rank, and NVFlare gave up on rank 0: ")


def test_nvflare_gives_up_on_a_group_that_has_failed_already(tmp_path: Path) -> None:
    async def steps(running: Group, lines: list[str]) -> None:
        while running.well:
            await asyncio.sleep(0.01)
        running.give_up(SILENT)

    died = wire.encode(wire.RankEnd(0, 3, 1.0, False, 0)).decode().strip()
    agent = f"read prepare; {says(HELLO, READY)}; read start; {says(UP, died)}; read stop; {says(end(1))}"
    verdict = run_with(launch(tmp_path, agent), steps)
    assert (failure(verdict).rank, failure(verdict).what) == (0, "exit code 3")


@pytest.mark.parametrize("first", [True, False], ids=["its first task", "the next task"])
def test_a_group_that_waits_for_a_task_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Only from the task on is a group that serves a whole job expected to say something."""
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    monkeypatch.setattr(group, "_SETTLE", 0.0)
    limit = 0.3

    async def steps(running: Group, lines: list[str]) -> None:
        await said(lines, "training")
        if not first:
            running.resume()
            running.accept()
        # It is silent for so long, and nothing comes of it.
        await asyncio.sleep(3 * limit)
        began.append(running._roster.now())
        running.resume()

    began: list[float] = []
    (tmp_path / "up").touch()
    what = dataclasses.replace(launch(tmp_path, TRAINS), hang_timeout=limit, serves_job=True)
    verdict = run_with(what, steps)
    assert failure(verdict).what.startswith("no rank has printed anything for ")
    assert failure(verdict).seconds > began[0] + limit
