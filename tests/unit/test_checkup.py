"""The parts of a checkup that need no other host: the probe's questions and answers, and what is made of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.checks import findings, node_clients, node_probe, trial_run
from nvflare_torchrun_plugin.checks.checkup import Checkup
from nvflare_torchrun_plugin.checks.findings import Check
from nvflare_torchrun_plugin.description.group_description import Node, NodeGroup

HERE = socket.gethostname()


def probe(*questions: object) -> list[Any]:
    """Ask a probe; return its answers."""
    text = "".join(json.dumps(question) + "\n" for question in questions)
    ended = subprocess.run(
        [sys.executable, "-m", "nvflare_torchrun_plugin.checks.node_probe"],
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return [json.loads(line)[node_probe.ANSWER] for line in ended.stdout.split("\n") if line]


def test_a_probe_listens_and_connects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can begin to
        there, silent = server.getsockname()[1], bound.getsockname()[1]
        first, second = probe(
            {"master": "127.0.0.1", "port": 0},
            {"targets": [["127.0.0.1", there], ["127.0.0.1", silent], ["none.invalid", 1]], "timeout": 5},
        )
    assert first["address"] == "127.0.0.1"
    assert 1 <= first["port"] <= 65535
    assert second[:2] == [None, "Connection refused"]
    assert second[2]


def test_a_probe_whose_port_is_taken_says_so_and_one_without_questions_ends() -> None:
    with socket.create_server(("", 0)) as server:
        [answer] = probe({"master": "127.0.0.1", "port": server.getsockname()[1]})
    assert "Address already in use" in answer["error"]
    assert probe() == []


def test_no_way_to_the_master_is_no_address() -> None:
    assert node_probe.own_address("none.invalid") is None
    assert node_probe.own_address("[::1]") in ("::1", None)


def run(group: NodeGroup, directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    """Check the group up to the all-reduce, which is another test's."""

    async def none(*_: object) -> Check:
        return Check("all-reduce (gloo)", "skipped", "")

    monkeypatch.setattr(trial_run, "check", none)
    begun: list[str] = []
    checks = asyncio.run(Checkup(group, directory, os.environ, begun.append).run())
    assert begun[0] == checks[0].name == "nodes reached"
    return {check.name: check for check in checks}


def test_nodes_on_one_host_have_names_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = run(NodeGroup((Node("localhost"), Node("localhost"))), tmp_path, monkeypatch)
    assert checks.pop("all-reduce (gloo)").state == "skipped"
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["agent started"].detail.startswith("localhost (node 0) ")
    assert checks["shared directory"].detail == f"{tmp_path} is seen by all"
    assert list(tmp_path.iterdir()) == []


def test_one_node_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = run(NodeGroup((Node(HERE),)), tmp_path, monkeypatch)
    assert checks.pop("all-reduce (gloo)").state == "skipped"
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["master address"].detail == "none: one node"
    assert {checks[name].detail for name in ("free port", "nodes connected")} == {"not needed: one node"}


def test_no_free_port_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        group = NodeGroup((Node("localhost"), Node("localhost")), master_port_range=(port, port))
        checks = run(group, tmp_path, monkeypatch)
    assert checks["free port"].state == "failed"
    assert checks["free port"].detail.startswith(f"no free port in master_port_range {port}..{port}")
    assert checks["agent started"].state == "skipped"


def test_a_transport_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = NodeGroup((Node(HERE), Node("other")), transport=("/opt/none", "{host}"))
    checks = run(group, tmp_path, monkeypatch)
    reached = checks["nodes reached"]
    assert (reached.state, reached.nodes) == ("failed", ("other",))
    assert reached.detail == "other: /opt/none cannot be started: No such file or directory"


def test_a_node_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_clients, "_REACH_BOUND", 0.5)
    group = NodeGroup((Node(HERE), Node("other")), transport=("sh", "-c", "sleep 600", "{host}"))
    reached = run(group, tmp_path, monkeypatch)["nodes reached"]
    assert reached.detail.startswith("other: no answer within 0.5 s; try: sh -c 'sleep 600' other true")


def test_an_agent_is_ended_before_a_checkup_that_is_stopped(tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    os.mkfifo(started)
    agent = (
        f"import sys; open({str(started)!r}, 'w').close()\n"
        "while 'stop' not in sys.stdin.readline(): pass\n"
        f"open({str(ended)!r}, 'w').close()"
    )

    async def stop_in_the_middle() -> None:
        argv = [sys.executable, "-c", agent]
        question = wire.Prepare(None, str(tmp_path), "marker", 10.0, 30.0)
        asking = asyncio.create_task(node_clients.ask_agent(argv, os.environ, question, 30.0))
        # It can be opened once the agent has opened its end.
        await asyncio.to_thread(started.read_text)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert ended.exists()

    asyncio.run(stop_in_the_middle())


def test_what_cannot_be_connected_is_told_with_both_ends() -> None:
    places = [("10.0.0.1", 29400), ("10.0.0.2", 4000), ("10.0.0.3", 4001)]
    results = [[None, None, None], [None, None, "No route to host"], ["timed out", None, None]]
    to_master, pairs = findings.connections(["a", "b", "c"], places, results, (29400, 30399))
    assert (to_master.state, to_master.nodes, pairs.state, pairs.nodes) == ("failed", ("c",), "failed", ("b",))
    assert to_master.detail.startswith("c cannot connect to a at 10.0.0.1:29400: timed out: give node rank 0")
    assert pairs.detail.startswith("b cannot connect to c at 10.0.0.3: No route to host: ranks connect")
