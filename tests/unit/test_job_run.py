"""What an attempt takes of the host and of the nodes, and that it is given back however the attempt comes out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from nvflare_torchrun_plugin.description.group_description import Node, NodeGroup
from nvflare_torchrun_plugin.job.job_run import JobRun
from nvflare_torchrun_plugin.launching import master, ports
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.launching.node_locks import BusyError, NodeLocks
from nvflare_torchrun_plugin.launching.planning import Options, Plan
from nvflare_torchrun_plugin.launching.program import Program
from nvflare_torchrun_plugin.supervision.attempt import Attempt
from nvflare_torchrun_plugin.supervisor import Supervisor
from nvflare_torchrun_plugin.verdict import Failure, Verdict

PORT = 28999
SPARE_PORTS = (28990, 28998)


def plan(folder: Path, nodes: tuple[Node, ...], ports: tuple[int, int], least: int = 0) -> Plan:
    group = NodeGroup(nodes, least=least, transport="ssh", master_port_range=ports)
    options = Options((), 10, 30.0, None, 1.0, None)
    return Plan(group, Program("x.py", None, (), {}), "/x.py", "/", str(folder / "logs"), options)


def test_an_attempt_that_cannot_be_armed_gives_back_its_port_and_its_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = (Node("localhost", "10.0.0.1"), Node("other.invalid"))
    folder = str(tmp_path / "locks")
    supervisor = Supervisor(logging.getLogger("job run"))
    run = JobRun.begin(
        plan(tmp_path, nodes, (PORT, PORT)), supervisor, False, NodeLocks(folder, "job 1", print), print
    )

    def refuse(_launch: object) -> None:
        raise RuntimeError("the loop is closed")

    monkeypatch.setattr(supervisor, "arm", refuse)
    try:
        with pytest.raises(RuntimeError, match="the loop is closed"):
            run.attempt_for_task(lambda: False)
    finally:
        run.end()
    others = NodeLocks(folder, "job 2", print)
    others.acquire([node.host for node in nodes], 0.0, lambda: False)
    others.release()
    ports.reserve((PORT, PORT)).release()


OTHER = "other.invalid"


@contextmanager
def run_of(folder: Path, monkeypatch: pytest.MonkeyPatch, least: int, warnings: list[str]) -> Iterator[JobRun]:
    """A run with two nodes."""
    monkeypatch.setattr(master, "address", lambda *_: "10.0.0.1")
    described = plan(folder, (Node("localhost"), Node(OTHER, "127.0.0.1")), SPARE_PORTS, least)
    locks = NodeLocks(str(folder / "locks"), "job 1", print)
    run = JobRun.begin(described, Supervisor(logging.getLogger("job run")), False, locks, warnings.append)
    try:
        yield run
    finally:
        run.end()


def test_the_next_attempt_waits_for_a_node_that_it_needs_and_that_is_still_seen_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unswept = {OTHER}
    monkeypatch.setattr(Attempt, "unswept", unswept)
    looks = []

    def looked() -> bool:
        looks.append(OTHER)
        if len(looks) == 3:
            unswept.clear()
        return False

    with run_of(tmp_path, monkeypatch, 2, []) as run:
        first = run.attempt_for_task(looked)
        assert looks == []
        first.decided.set_result(None)
        second = run.attempt_for_task(looked)
        assert looks == [OTHER] * 3
        assert [member.host for member in second.launch.members] == ["localhost", OTHER]
        unswept.add(OTHER)
        for attempt in (first, second):
            attempt.ended.set_result(None)
        run.attempt_for_task(looked)
        assert looks == [OTHER] * 3


def test_a_node_that_is_still_seen_to_has_no_part_in_an_attempt_that_can_do_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(Attempt, "unswept", {OTHER})
    with run_of(tmp_path, monkeypatch, 1, warnings) as run:
        run.attempt_for_task(lambda: False).decided.set_result(None)
        second = run.attempt_for_task(lambda: False)
    assert [member.host for member in second.launch.members] == ["localhost"]
    assert warnings == [f"node {OTHER} sits out, for what an attempt has left there is still being ended"]


def test_nor_has_one_where_what_a_group_started_ahead_has_left_is_still_seen_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Verdict("stopped", "no task can have it", None, (), (), 1.0)
    with run_of(tmp_path, monkeypatch, 1, []) as run:
        first = run.attempt_for_task(lambda: False)
        for end in (first.decided, first.ended):
            end.set_result(None)
        ahead = Mock(launch=first.launch, left_out=(), silent=(), began=0.0, taken=False, unswept={OTHER})
        ahead.decided, ahead.ended = Future(), Future()
        ahead.decided.set_result(stopped)
        run._learn_of_waiting(ahead)
        second = run.attempt_for_task(lambda: False)
        assert [member.host for member in second.launch.members] == ["localhost"]
        ahead.ended.set_result(stopped)
        third = run.attempt_for_task(lambda: False)
        assert [member.host for member in third.launch.members] == ["localhost", OTHER]


def test_what_an_attempt_has_taken_is_given_back_as_soon_as_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port when it is decided, the nodes when it has ended."""
    others = NodeLocks(str(tmp_path / "locks"), "job 2", print)
    with run_of(tmp_path, monkeypatch, 2, []) as run:
        attempt = run.attempt_for_task(lambda: False)
        port = attempt.launch.contract.master_port
        with pytest.raises(OSError, match="no free port"):
            ports.reserve((port, port))
        attempt.decided.set_result(None)
        ports.reserve((port, port)).release()
        with pytest.raises(BusyError, match="is in use by job 1"):
            others.acquire([OTHER], 0.0, lambda: False)
        attempt.ended.set_result(None)
        others.acquire([OTHER], 0.0, lambda: False)
        others.release()


def test_a_task_that_starts_cold_on_more_nodes_than_the_group_ahead_had_has_their_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = NodeLocks(str(tmp_path / "locks"), "job 2", print)
    with run_of(tmp_path, monkeypatch, 1, []) as run:
        both = run.attempt_for_task(lambda: False)
        for end in (both.decided, both.ended):
            end.set_result(None)
        ahead = SimpleNamespace(
            launch=replace(both.launch, members=both.launch.members[:1], spans_hosts=False), left_out=(), silent=()
        )
        ahead.began, ahead.decided, ahead.taken = 0.0, Future(), False
        monkeypatch.setattr(run, "_take_ahead", lambda: ahead)
        plans: list[Callable[[], Launch]] = []
        aborted: list[bool] = []
        attempt = Attempt(both.launch, run._supervisor._loop)

        def arm_ahead(_ahead: object, cold: Callable[[], Launch]) -> Attempt:
            plans.append(cold)
            return attempt

        monkeypatch.setattr(run._supervisor, "arm_ahead", arm_ahead)
        run.attempt_for_task(lambda: bool(aborted))
        others.acquire([OTHER], 0.0, lambda: False)
        aborted.append(True)
        with pytest.raises(BusyError, match="is in use by job 2"):
            plans[0]()
        others.release()
        assert len(plans[0]().members) == 2
        with pytest.raises(BusyError, match="is in use by job 1"):
            others.acquire([OTHER], 0.0, lambda: False)
        attempt.decided.set_result(None)
        attempt.ended.set_result(None)
        others.acquire([OTHER], 0.0, lambda: False)
        others.release()
        # One that is planned for a task that has gone has nothing.
        plans[0]()
        others.acquire([OTHER], 0.0, lambda: False)
        others.release()


def test_the_next_attempt_does_without_the_node_that_has_just_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when it comes between the end of the last one and those who are called at that end."""
    warnings: list[str] = []
    with run_of(tmp_path, monkeypatch, 1, warnings) as run:
        first = run.attempt_for_task(lambda: False)
        assert [member.host for member in first.launch.members] == ["localhost", OTHER]
        assert warnings == []
        lost = Failure(1, OTHER, None, None, "lost", 1.0, None, (), None, "infrastructure")
        verdict = Verdict("failed", None, lost, (), (), 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(Future, "_invoke_callbacks", lambda _future: None)
            first.decided.set_result(verdict)
        second = run.attempt_for_task(lambda: False)
        assert [member.host for member in second.launch.members] == ["localhost"]
        assert warnings == [f"node {OTHER} sits out for 60 s more, for it has failed: lost"]
