"""What an attempt takes of the host and of the nodes, and that it is given back however the attempt comes out."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path

import pytest

from nvflare_torchrun_plugin import master, ports
from nvflare_torchrun_plugin.group_description import Node, NodeGroup
from nvflare_torchrun_plugin.job_run import JobRun
from nvflare_torchrun_plugin.node_locks import NodeLocks
from nvflare_torchrun_plugin.planning import Options, Plan
from nvflare_torchrun_plugin.program import Program
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


def test_the_next_attempt_does_without_the_node_that_has_just_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even when it comes between the end of the last one and those who are called at that end."""
    nodes = (Node("localhost"), Node("other.invalid", "127.0.0.1"))
    warnings: list[str] = []
    supervisor = Supervisor(logging.getLogger("job run"))
    run = JobRun.begin(
        plan(tmp_path, nodes, SPARE_PORTS, least=1),
        supervisor,
        False,
        NodeLocks(str(tmp_path / "locks"), "job 1", print),
        warnings.append,
    )
    monkeypatch.setattr(master, "address", lambda *_: "10.0.0.1")
    assert warnings == []
    try:
        first = run.attempt_for_task(lambda: False)
        assert [member.host for member in first.launch.members] == ["localhost", "other.invalid"]
        lost = Failure(1, "other.invalid", None, None, "lost", 1.0, None, (), None, "infrastructure")
        verdict = Verdict("failed", None, lost, (), (), 1.0)
        with monkeypatch.context() as patch:
            patch.setattr(Future, "_invoke_callbacks", lambda _future: None)
            first.ended.set_result(verdict)
        second = run.attempt_for_task(lambda: False)
        assert [member.host for member in second.launch.members] == ["localhost"]
        assert warnings == ["node other.invalid sits out for 60 s more, for it has failed: lost"]
    finally:
        run.end()
