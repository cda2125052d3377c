"""From options, node group and program to a launch."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from nvflare_torchrun_plugin import transports
from nvflare_torchrun_plugin.contract import Contract
from nvflare_torchrun_plugin.description.group_description import Node, NodeGroup
from nvflare_torchrun_plugin.launching import planning, ports
from nvflare_torchrun_plugin.launching.planning import Options, Plan, PlanError
from nvflare_torchrun_plugin.launching.program import Program
from nvflare_torchrun_plugin.supervision import start_order


def options(
    torchrun_args: object = None,
    join_timeout: object = None,
    launch_timeout: float | None = 300.0,
    log_ranks: object = "all",
    node_timeout: object = 30,
    grace: Any = 4.0,
) -> Options:
    return Options.parse(
        torchrun_args=torchrun_args,
        join_timeout=join_timeout,
        launch_timeout=launch_timeout,
        node_timeout=node_timeout,
        grace=grace,
        log_ranks=log_ranks,
    )


def plan(group: NodeGroup) -> Plan:
    program = Program("train.py", None, ("--key=${secret:PLAN_KEY}",), {"A": "job", "B": "${secret:PLAN_KEY}"})
    return Plan(group, program, "/app/train.py", "/app", "/logs", options("--tee 3", 50))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's secret."""
    monkeypatch.setenv("PLAN_KEY", "s3cr3t")


def test_options() -> None:
    assert options() == Options((), 240, 30.0, None, 4.0, None)
    assert options("--tee '3'", 100, log_ranks=[0, 3]) == Options(
        ("--tee", "3"), 100, 30.0, None, 4.0, frozenset({0, 3})
    )
    assert options(["--tee", "3"], launch_timeout=None, log_ranks=2) == Options(
        ("--tee", "3"), 600, 30.0, None, 4.0, frozenset({2})
    )
    assert options(launch_timeout=80.0).join_timeout == 40
    assert options(launch_timeout=1.0).join_timeout == 1
    assert options(launch_timeout=1e300).join_timeout == 1_000_000
    assert options(grace=None).grace == 4.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("torchrun_args", "'", 'torchrun_args is "\'": cannot be split into words (No closing quotation)'),
        ("torchrun_args", 5, "torchrun_args is 5: must be a string or a list of strings"),
        ("torchrun_args", "--nnodes=2", "torchrun_args is ['--nnodes=2']: "),
        ("torchrun_args", ["train.py"], "torchrun_args is ['train.py']: "),
        ("join_timeout", 0, "join_timeout is 0: must be a whole number of seconds, from 1 to 1000000"),
        ("join_timeout", 1.5, "join_timeout is 1.5: must be a whole number of seconds, from 1 to 1000000"),
        ("join_timeout", True, "join_timeout is True: must be a whole number of seconds, from 1 to 1000000"),
        ("join_timeout", 300, "join_timeout is 300, but launch_timeout is 300: it must be less"),
        ("node_timeout", 0.5, "node_timeout is 0.5: must be a number of seconds, from 1 to 1000000"),
        ("node_timeout", "x", "node_timeout is 'x': must be a number of seconds, from 1 to 1000000"),
        ("node_timeout", float("inf"), "node_timeout is inf: must be a number of seconds, from 1 to 1000000"),
        ("node_timeout", 1e9, "node_timeout is 1000000000.0: must be a number of seconds, from 1 to 1000000"),
        ("join_timeout", 10**4000, "join_timeout is 1000"),
        ("grace", 1e300, "stop_grace_period is 1e+300: must be at most 1000000 seconds"),
        ("log_ranks", "none", "log_ranks is 'none': must be 'all' or a list of global ranks such as [0]"),
        ("log_ranks", [-1], "log_ranks is [-1]: must be 'all' or a list of global ranks such as [0]"),
        ("log_ranks", [True], "log_ranks is [True]: must be 'all' or a list of global ranks such as [0]"),
        ("log_ranks", None, "log_ranks is None: must be 'all' or a list of global ranks such as [0]"),
    ],
)
def test_a_wrong_option_is_named(name: str, value: object, message: str) -> None:
    given: dict[str, object] = {"torchrun_args": None, "join_timeout": None, "log_ranks": "all", name: value}
    with pytest.raises(PlanError) as caught:
        options(
            given["torchrun_args"],
            given["join_timeout"],
            300.0,
            given["log_ranks"],
            given.get("node_timeout", 30),
            given.get("grace", 4.0),
        )
    assert str(caught.value).startswith(message)


def test_one_node_needs_no_rendezvous() -> None:
    launch, reservation = planning.launch(plan(NodeGroup((Node("here", nproc_per_node=3),))), 1)
    assert reservation is None
    (member,) = launch.members
    assert launch.contract == Contract(run_id=launch.name)
    assert (member.nproc_per_node, launch.join_timeout, launch.torchrun_args) == (3, 50, ("--tee", "3"))
    assert not launch.spans_hosts
    assert member.agent_argv == (sys.executable, "-m", "nvflare_torchrun_plugin.node_agent")


def test_two_nodes_share_one_reserved_port() -> None:
    nodes = (Node("localhost", nproc_per_node=1), Node("127.0.0.1", nproc_per_node="gpu", python="/b/python"))
    group = NodeGroup(nodes, env={"A": "site", "C": "site"}, python="/g/python")
    launch, reservation = planning.launch(plan(group), 12)
    assert reservation is not None
    try:
        first, second = launch.members
        port = reservation.port
        assert 29400 <= port <= 30399
        with pytest.raises(OSError, match="no free port"):
            ports.reserve((port, port))
        assert start_order.contract(launch, 0, 2) == Contract(2, 0, "127.0.0.1", port, launch.name)
        assert start_order.contract(launch, 1, 2) == Contract(2, 1, "127.0.0.1", port, launch.name)
        assert (first.host, second.host) == ("localhost", "127.0.0.1")
        assert (first.agent_argv[0], second.agent_argv[0]) == ("/g/python", "/b/python")
        assert (first.nproc_per_node, second.nproc_per_node) == (1, "gpu")
        assert launch.env == {"A": "job", "B": "s3cr3t", "C": "site"}
        assert launch.args == ("--key=s3cr3t",)
        assert launch.shown_args == ("--key=${secret:PLAN_KEY}",)
        assert (launch.cwd, launch.module, launch.target) == ("/app", False, "/app/train.py")
        assert (launch.join_timeout, launch.grace, launch.log_ranks) == (50, 4.0, None)
        assert launch.log_dir == "/logs/attempt-0012"
    finally:
        reservation.release()


def test_a_contract_that_is_there_is_kept() -> None:
    contract = Contract(3, 0, "10.0.0.1", 29400, "theirs")
    launch, reservation = planning.launch(plan(NodeGroup((Node("a", nproc_per_node=1),), contract=contract)), 1)
    assert reservation is None
    assert (len(launch.members), start_order.contract(launch, 0, 1)) == (1, contract)


def test_every_attempt_has_a_name_of_its_own() -> None:
    group = NodeGroup((Node("here", nproc_per_node=1),))
    names = {planning.launch(plan(group), 1)[0].name for _ in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch(r"1-[0-9a-f]{16}", name) for name in names)


def test_no_free_port_is_a_plan_error() -> None:
    whole = ports.reserve((29400, 30399))
    try:
        nodes = (Node("localhost", nproc_per_node=1), Node("127.0.0.1", nproc_per_node=1))
        with pytest.raises(PlanError, match="no free port in master_port_range"):
            planning.launch(plan(NodeGroup(nodes, master_port_range=(whole.port, whole.port))), 1)
    finally:
        whole.release()


@pytest.mark.parametrize(("transport", "client"), [("ssh", sys.executable), ("srun", "srun")])
def test_the_client_job_s_own_host_is_entered_only_by_a_step(transport: str, client: str) -> None:
    group = NodeGroup((Node("here", "192.0.2.1"), Node("there.invalid")), transport=transport)
    launch, reservation = planning.launch(plan(group), 1)
    assert reservation is not None
    reservation.release()
    assert transports.client(launch.members[0].agent_argv) == Path(client).name
    assert transports.client(launch.members[1].agent_argv) == transport
