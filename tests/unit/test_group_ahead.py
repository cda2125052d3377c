"""A group that is started ahead of its task: it waits, the task has it or not, and nothing is left."""

from __future__ import annotations

import pytest
from stage import WORKS, Stage
from standins import BOUND, end, launch, until
from waiting_groups import accept, comes, environ, holds, lines, no_cold, order, wait_until_it_waits, warm

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.launching import planning
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node import bootstrap


def test_a_group_that_waits_takes_up_its_task(stage: Stage) -> None:
    file = stage.folder / "bootstrap"
    file.write_text('{"launch_token": "s3cr3t", "cj_pid": 1, "site": "x"}')
    ahead = stage.supervisor.start_ahead(warm(stage.folder, holds(0), holds(1)), environ())
    wait_until_it_waits(stage, ahead)
    start = order(stage.folder, "start1")
    assert isinstance(start, wire.Start)
    assert (start.holds, start.preload, start.bootstrap) == (True, ("json",), None)
    attempt = stage.supervisor.arm_ahead(ahead, no_cold)
    assert not (stage.folder / "next0").exists()
    process = comes(stage, **{bootstrap.FILE_VARIABLE: str(file)})
    until(lambda: (stage.folder / "next1").exists(), "go never came")
    accept(stage, attempt)
    assert process.wait(BOUND) == 0
    assert order(stage.folder, "next0") == wire.Go({bootstrap.FILE_VARIABLE: str(file)}, None)
    go = order(stage.folder, "next1")
    assert go == wire.Go({}, bootstrap.without_secret(file.read_text()))
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert (verdict.outcome, ahead.ended.result(BOUND)) == ("ok", verdict)
    (told,) = (line for line in stage.lines if ": warm, " in line)
    assert told.startswith("task group ahead: warm, all ranks were waiting, started ")
    assert attempt.trains.done()


def test_a_failure_after_go_is_the_task_s_and_told_in_its_seconds(stage: Stage) -> None:
    fails = lines(wire.RankEnd(0, 7, 1e9, False, 0), end(1))
    ahead = stage.supervisor.start_ahead(warm(stage.folder, holds(0, after_go=fails)), environ())
    wait_until_it_waits(stage, ahead)
    ahead._loop.call_soon_threadsafe(lambda: setattr(ahead._group._roster, "_began", -1e6))
    attempt = stage.supervisor.arm_ahead(ahead, no_cold)
    assert comes(stage).wait(BOUND) == 1
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert verdict.failure is not None
    assert (verdict.failure.rank, verdict.failure.what) == (0, "exit code 7")
    assert verdict.failure.seconds < BOUND
    assert not any("a group started ahead has failed" in line for line in stage.lines)


@pytest.mark.parametrize("imported", [False, True])
def test_one_that_fails_before_rank_0_has_imported_all_has_used_up_nothing(stage: Stage, imported: bool) -> None:
    """The task is tried again then, with a cold start: what fails may be what is imported ahead only."""
    then = lines(*([wire.Warm(0, 1, ())] if imported else []), wire.RankEnd(0, 3, 1e9, False, 0), end(1))
    up = wire.RankUp(0, 0, 1)
    agent = holds(0, after_go=then).replace(lines(up, wire.Warm(0, 1, ())), lines(up))
    ahead = stage.supervisor.start_ahead(warm(stage.folder, agent), environ())
    until(lambda: ahead._group.ranks == 1, "the rank never came")
    attempt = stage.supervisor.arm_ahead(ahead, no_cold)
    assert comes(stage).wait(BOUND) == 1
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert (verdict.outcome, verdict.ranks_ran) == ("failed", imported)


def test_a_group_waits_once_all_ranks_of_each_node_do(stage: Stage) -> None:
    second = f"while ! [ -e $1/second ]; do sleep 0.05; done; {lines(wire.RankUp(1, 1, 2), wire.Warm(1, 2, ()))}"
    agent = (
        holds(0)
        .replace('"of": 1', '"of": 2')
        .replace(
            "get $1; printf '%s\\n' \"$order\" > $1/next", f"{second}; get $1; printf '%s\\n' \"$order\" > $1/next"
        )
    )
    ahead = stage.supervisor.start_ahead(warm(stage.folder, agent), environ())
    until(lambda: 0 in ahead._group._progress._warm, "the first rank never came")
    assert not ahead._group.waits
    (stage.folder / "second").touch()
    wait_until_it_waits(stage, ahead)
    assert ahead._group.waits
    ahead.stop("that is all")
    ahead.ended.result(BOUND)


def test_a_task_may_come_before_its_group_waits(stage: Stage) -> None:
    late = holds(0).replace("> $1/start0", "> $1/start0; while ! [ -e $1/import ]; do sleep 0.05; done")
    ahead = stage.supervisor.start_ahead(
        warm(stage.folder, f"while ! [ -e $1/come ]; do sleep 0.05; done; {late}"), environ()
    )
    attempt = stage.supervisor.arm_ahead(ahead, no_cold)
    process = comes(stage)
    until(lambda: any("not all ranks were waiting yet" in line for line in stage.lines), "it was not taken")
    (stage.folder / "come").touch()
    (stage.folder / "import").touch()
    assert order(stage.folder, "next0") == wire.Go({}, None)
    accept(stage, attempt)
    assert process.wait(BOUND) == 0
    assert attempt.wait(BOUND) is not None


def test_another_environment_makes_the_task_start_cold(stage: Stage) -> None:
    ahead = stage.supervisor.start_ahead(warm(stage.folder, holds(0)), {**environ(), "B": "1"})
    wait_until_it_waits(stage, ahead)
    cold = launch(stage.folder, WORKS)

    attempt = stage.supervisor.arm_ahead(ahead, lambda: cold)
    assert comes(stage, A="2").wait(BOUND) == 0
    assert attempt.launch is cold
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert verdict.outcome == "ok"
    assert isinstance(order(stage.folder, "next0"), wire.Stop)
    reason = "the task's environment differs from that of the group started ahead: A, B"
    assert f"the task starts cold: {reason}" in stage.lines


def test_a_group_that_dies_as_it_waits_fails_no_task(stage: Stage) -> None:
    dies = holds(0).replace(
        "get $1; printf '%s\\n' \"$order\" > $1/next0",
        f"{lines(wire.RankEnd(0, -9, 1e9, False, 0), end(1))}; exit;",
    )
    ahead = stage.supervisor.start_ahead(warm(stage.folder, dies), environ())
    attempt = stage.supervisor.arm_ahead(ahead, lambda: launch(stage.folder, WORKS))
    ahead.ended.result(BOUND)
    assert comes(stage).wait(BOUND) == 0
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert verdict.outcome == "ok"
    assert [line for line in stage.lines if "a group started ahead has failed, no task does: " in line]
    assert [
        line for line in stage.lines if line.startswith("the task starts cold: the group started ahead has ended")
    ]


def test_a_task_that_cannot_be_planned_cold_either_has_no_group(stage: Stage) -> None:
    def plan() -> Launch:
        raise planning.PlanError("no port is free")

    ahead = stage.supervisor.start_ahead(warm(stage.folder, holds(0)), {"OTHER": "1"})
    attempt = stage.supervisor.arm_ahead(ahead, plan)
    assert comes(stage).wait(BOUND) == 1
    assert attempt.wait(BOUND) is None
    assert "the group ahead cannot be run: no port is free" in stage.lines


def test_an_attempt_that_is_withdrawn_takes_its_group_along(stage: Stage) -> None:
    ahead = stage.supervisor.start_ahead(warm(stage.folder, holds(0)), environ())
    wait_until_it_waits(stage, ahead)
    attempt = stage.supervisor.arm_ahead(ahead, no_cold)
    attempt.stop("the task ended")
    assert attempt.wait(BOUND) is None
    verdict = ahead.ended.result(BOUND)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("stopped", "the task ended")


def test_the_end_of_the_run_ends_a_group_that_waits(stage: Stage) -> None:
    ahead = stage.supervisor.start_ahead(warm(stage.folder, holds(0), holds(1)), environ())
    wait_until_it_waits(stage, ahead)
    stage.supervisor.close("the run ended", BOUND)
    verdict = ahead.ended.result(0)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("stopped", "the run ended")
    stage.supervisor = type(stage.supervisor)(stage.logger)  # for the fixture to close
