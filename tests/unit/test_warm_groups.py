"""A run's groups that are started ahead of their tasks: who gets one, who does not and why."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stage import RELAY, WORKS, Stage
from standins import BOUND, children, launch, until
from waiting_groups import accept, comes, holds, order

from nvflare_torchrun_plugin import relay, wire
from nvflare_torchrun_plugin.description.group_description import Node, NodeGroup
from nvflare_torchrun_plugin.job import script_imports, warm_groups
from nvflare_torchrun_plugin.job.job_run import JobRun
from nvflare_torchrun_plugin.job.warm_start import WarmStart
from nvflare_torchrun_plugin.launching import planning, ports
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.launching.node_locks import NodeLocks
from nvflare_torchrun_plugin.launching.planning import Options, Plan
from nvflare_torchrun_plugin.launching.program import Program


class Run:
    """A job's run whose groups are stand-ins."""

    def __init__(self, stage: Stage, settings: WarmStart, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stage = stage
        self.folder = stage.folder
        self.told: list[str] = []
        self.ports = (28980, 28989)
        self.planned: list[tuple[Launch, list[Node]]] = []
        self.reservations: list[ports.Reservation] = []
        (stage.folder / "custom").mkdir()
        (stage.folder / "custom" / "script.py").write_text("import json")
        nodes = (Node("host-0"), Node("host-1"))
        group = NodeGroup(nodes, least=1, transport="local", master_port_range=(28980, 28989))
        options = Options((), 10, 30.0, None, 1.0, None)
        target = str(stage.folder / "custom" / "script.py")
        plan = Plan(group, Program("script.py", None, (), {}), target, str(stage.folder), "", options)
        monkeypatch.setattr(planning, "launch", self._launch)
        locks = NodeLocks(str(stage.folder / "locks"), "job", print)
        self.run = JobRun.begin(plan, stage.supervisor, False, locks, self.told.append, settings, self.told.append)

    def _launch(
        self, _plan: Plan, number: int, without: list[Node], *, serves_job: bool = False, preload: Any = None
    ) -> tuple[Launch, ports.Reservation]:
        assert not serves_job
        agents = [holds(rank) if preload is not None else WORKS for rank in range(2 - len(without))]
        planned = dataclasses.replace(
            launch(self.folder, *agents, least=1), preload=preload, name=f"group-{number}"
        )
        self.planned.append((planned, without))
        try:
            self.reservations.append(ports.reserve(self.ports))
        except OSError as e:
            raise planning.PlanError(str(e)) from None
        return planned, self.reservations[-1]

    def waits(self, number: int) -> None:
        until(lambda: any(f"group-{number}: waiting" in line for line in self.stage.lines), "no group waits")

    def task(self, meanwhile: Callable[[], object] = lambda: None) -> str:
        """Have one task done; return the name of its group."""
        attempt = self.run.attempt_for_task(lambda: False)
        meanwhile()
        relay_environ = warm_groups.relay_environ(str(self.folder / "custom"))
        with subprocess.Popen(
            RELAY, env={**relay_environ, **{relay.DIR_VARIABLE: self.stage.supervisor.directory}}
        ):
            until(lambda: attempt._group is not None, "the group never began")
            accept(self.stage, attempt)
            attempt.wait(BOUND)
        (self.folder / "accepted").unlink()
        return attempt.launch.name


@pytest.fixture
def begin(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[WarmStart], Run]]:
    made: list[Run] = []

    def begin(settings: WarmStart) -> Run:
        made.append(Run(stage, settings, monkeypatch))
        return made[-1]

    yield begin
    for run in made:
        run.run.end()
        # Every port is given back.
        assert [claim._claim.fileno() for claim in run.reservations] == [-1] * len(run.reservations)
    stage.supervisor = type(stage.supervisor)(stage.logger)


def test_each_task_has_the_group_that_was_started_during_the_one_before(
    begin: Callable[[WarmStart], Run],
) -> None:
    run = begin(WarmStart())
    assert os.environ[relay.DIR_VARIABLE] == run.stage.supervisor.directory
    for number in (1, 2, 3):
        run.waits(number)
        assert run.task() == f"group-{number}", (run.told, run.stage.lines)
    run.waits(4)
    assert run.told == []
    assert [planned.preload for planned, _ in run.planned] == [("json", "torch")] * 4


def held(run: Run) -> tuple[int, int, int, int]:
    """Descriptors, threads and children of this process, and files of ours."""
    files = sum(path.name.startswith("nvfl") for path in (run.folder / "tmp").iterdir())
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(children()), files


def resident() -> int:
    """KiB of memory of this process."""
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


@pytest.mark.slow
def test_what_a_run_holds_does_not_grow_with_its_tasks(begin: Callable[[WarmStart], Run]) -> None:
    run = begin(WarmStart())
    found: list[tuple[int, int, int, int]] = []
    memory: list[int] = []
    for number in range(1, 51):
        run.waits(number)
        # What ended with the task before may take a moment to be gone.
        if found:
            until(
                lambda: all(now <= first for now, first in zip(held(run), found[0], strict=True)),
                "more is held than in the first task",
            )
        found.append(held(run))
        memory.append(resident())
        run.task()
    assert max(memory[40:]) - max(memory[:10]) < 4096
    assert run.told == []


def test_a_task_does_without_the_node_that_fell_silent_as_its_group_waited(
    begin: Callable[[WarmStart], Run],
) -> None:
    run = begin(WarmStart())
    run.waits(1)
    (run.folder / "silent1").touch()
    assert run.task() == "group-2"
    assert [node.host for node in run.planned[1][1]] == ["host-1"]
    reason = "nodes of the group started ahead are silent: host-1: no answer from its agent within 2 s"
    assert f"the task starts cold: {reason}" in run.stage.lines
    (told,) = run.told
    assert re.fullmatch(
        "node host-1 sits out for (59|60) s more, for it has failed: no answer .* within 2 s", told
    )


def test_a_node_of_which_a_rank_was_killed_as_it_waited_takes_part_in_the_cold_start(
    begin: Callable[[WarmStart], Run],
) -> None:
    run = begin(WarmStart())
    run.waits(1)
    (run.folder / "killed1").touch()
    learnt = threading.Event()
    assert run.run._warm is not None
    assert run.run._warm._ahead is not None
    # Called after those that were added before.
    run.run._warm._ahead.ended.add_done_callback(lambda _: learnt.set())
    assert run.task() == "group-2"
    assert run.planned[1][1] == []
    assert learnt.wait(BOUND)
    assert run.run._health._times == {}
    assert run.told == []
    assert "the task starts cold: the group started ahead has failed, and ends" in run.stage.lines


def test_a_group_that_was_started_without_a_node_is_to_be_had_and_the_node_sits_out(
    begin: Callable[[WarmStart], Run], tmp_path: Path
) -> None:
    (tmp_path / "missing1").touch()
    run = begin(WarmStart())
    run.waits(1)
    assert run.task() == "group-1"
    assert [node.host for node in run.run._sitting_out()] == ["host-1"]
    assert run.run._health._times == {"host-1": 1}


def test_neither_a_task_nor_the_end_of_the_run_waits_for_a_plan_that_takes_long(
    begin: Callable[[WarmStart], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_groups, "_BOUND", 0.1)
    planning_goes_on = threading.Event()

    def takes_long(*_: object, **__: object) -> tuple[str, ...]:
        assert planning_goes_on.wait(BOUND)
        return ("json",)

    monkeypatch.setattr(script_imports, "ahead_of", takes_long)
    run = begin(WarmStart())
    assert run.task() == "group-1" or run.planned[0][0].preload is None
    assert run.told == ["the task starts cold: its group is still being planned"]
    assert run.run._warm is not None
    run.run._warm.close()
    planner = run.run._warm._thread
    assert planner is not None
    assert planner.is_alive()
    planning_goes_on.set()
    planner.join(BOUND)
    # Planned it was, but nothing is started any more.
    assert [planned.preload for planned, _ in run.planned] == [None, ("json",)]
    assert run.run._warm._ahead is None


def changes_the_script(run: Run) -> None:
    (run.folder / "custom" / "script.py").write_text("import os, json")


def adds_a_file(run: Run) -> None:
    (run.folder / "custom" / "package").mkdir()
    (run.folder / "custom" / "package" / "new.py").touch()


def loses_a_node(run: Run) -> None:
    run.run._health.failed("host-1", "lost")


def ends_the_group(run: Run) -> None:
    assert run.run._warm is not None
    assert run.run._warm._ahead is not None
    run.run._warm._ahead.stop("somebody wants it so")
    run.run._warm._ahead.ended.result(BOUND)


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (changes_the_script, "the job's files have changed since the group was started ahead"),
        (adds_a_file, "the job's files have changed since the group was started ahead"),
        (loses_a_node, "other nodes can take part now than when the group was started ahead"),
        (ends_the_group, "the group started ahead has ended: "),
    ],
)
def test_a_stale_group_is_replaced(
    begin: Callable[[WarmStart], Run], happens: Callable[[Run], None], reason: str
) -> None:
    run = begin(WarmStart())
    run.waits(1)
    happens(run)
    assert run.task() == "group-2"
    assert run.told[0].startswith(f"the task starts cold: {reason}")
    assert run.planned[1][0].preload is None
    assert len(run.planned[1][1]) == (1 if happens is loses_a_node else 0)
    if happens is not ends_the_group:
        assert isinstance(order(run.folder, "next0"), wire.Stop)


def test_a_task_waits_for_the_only_port_of_the_group_that_it_cannot_have(
    begin: Callable[[WarmStart], Run],
) -> None:
    run = begin(WarmStart())
    run.waits(1)
    run.ports = (run.reservations[0].port,) * 2
    changes_the_script(run)
    # The first plan found no port.
    assert run.task() == "group-3"


def test_what_a_cold_start_takes_after_its_task_has_gone_is_given_back(
    begin: Callable[[WarmStart], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(WarmStart())
    run.waits(1)
    plan = planning.launch

    def withdrawn(*how: Any, **more: Any) -> tuple[Launch, ports.Reservation | None]:
        attempt.stop("the task was aborted")
        assert attempt.wait(BOUND) is None
        return plan(*how, **more)

    attempt = run.run.attempt_for_task(lambda: False)
    monkeypatch.setattr(planning, "launch", withdrawn)
    with comes(run.stage, OTHER="1") as process:
        assert process.wait(BOUND) == 1
    assert [planned.preload is None for planned, _ in run.planned] == [False, True]
    assert run.reservations[1]._claim.fileno() == -1


def test_files_that_change_while_a_task_runs_have_no_group_started_on_them(
    begin: Callable[[WarmStart], Run],
) -> None:
    """A node with a copy of the files would be given another, under the feet of the ranks at work."""
    run = begin(WarmStart())
    run.waits(1)
    assert run.task(lambda: adds_a_file(run)) == "group-1"
    assert run.task() == "group-2"
    assert run.told == ["the task starts cold: the job's files have changed while the last task was running"]
    assert [planned.preload is None for planned, _ in run.planned[:2]] == [False, True]


def test_the_modules_beside_a_script_that_is_elsewhere_are_of_the_job_as_well(
    begin: Callable[[WarmStart], Run],
) -> None:
    run = begin(WarmStart())
    elsewhere = run.folder / "elsewhere"
    elsewhere.mkdir()
    plan = dataclasses.replace(run.run._plan, target=str(elsewhere / "script.py"))
    seen = [warm_groups._fingerprint(plan)]
    for name in ("script.py", "helper.py", "checkpoint.pt"):
        (elsewhere / name).touch()
        seen.append(warm_groups._fingerprint(plan))
    assert [before == after for before, after in itertools.pairwise(seen)] == [False, False, True]


def test_what_python_writes_as_it_imports_changes_nothing(begin: Callable[[WarmStart], Run]) -> None:
    run = begin(WarmStart())
    run.waits(1)
    (run.folder / "custom" / "__pycache__").mkdir()
    (run.folder / "custom" / "__pycache__" / "script.pyc").touch()
    assert run.task() == "group-1"


def test_a_group_that_is_too_old_is_replaced(begin: Callable[[WarmStart], Run]) -> None:
    run = begin(WarmStart(max_age=1e-9))
    run.waits(1)
    assert run.task() == "group-2"
    (told,) = run.told
    assert re.fullmatch(r"the task starts cold: the group started ahead is \d+ s old \(max_age is 1e-09\)", told)


def test_a_group_that_cannot_be_planned_ahead_fails_no_task(
    begin: Callable[[WarmStart], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> tuple[str, ...]:
        raise planning.PlanError("no port is free")

    monkeypatch.setattr(script_imports, "ahead_of", refuse)
    run = begin(WarmStart())
    assert run.task() == "group-1" or run.planned[0][0].preload is None
    assert run.told == ["the task starts cold: no group could be started ahead: no port is free"]


def test_the_job_s_own_list_counts(begin: Callable[[WarmStart], Run]) -> None:
    run = begin(WarmStart(preload=("csv",)))
    run.waits(1)
    assert [planned.preload for planned, _ in run.planned] == [("csv",)]


def test_the_environment_of_a_relay_is_what_nvflare_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(relay.DIR_VARIABLE, "/somewhere")
    monkeypatch.setenv("CLIENT_API_TYPE", "x")
    found = warm_groups.relay_environ("/the/custom")
    assert {"CLIENT_API_TYPE", relay.DIR_VARIABLE} & set(found) == set()
    assert found["PYTHONPATH"].endswith(f"{os.pathsep}/the/custom")
