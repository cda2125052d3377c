"""`nvflare-torchrun doctor` over three hosts by ssh: healthy ones, and what it says of each that is not."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cli_runs import Command, Ended, command
from ssh_groups import SshGroups, wait_until

pytestmark = pytest.mark.real

HOSTS = ("h0", "h1", "h2")
ALL = (
    "nodes reached",
    "free port",
    "agent started",
    "versions",
    "cores and GPUs",
    "shared directory",
    "master address",
    "master connected",
    "nodes connected",
    "all-reduce (gloo)",
)


def doctor(groups: SshGroups, *words: str) -> Ended:
    host = groups.bed["h0"]
    return command(["doctor", "--nodes", ",".join(HOSTS), "--json", *words], groups.folder, host)


def states(ended: Ended) -> dict[str, str]:
    return {check["name"]: check["state"] for check in ended.json()["checks"]}


def failed(ended: Ended) -> dict[str, tuple[list[str], str]]:
    """Nodes and words of each check that failed."""
    assert ended.code == 1, ended.out + ended.err
    return {
        check["name"]: (check["nodes"], check["detail"])
        for check in ended.json()["checks"]
        if check["state"] == "failed"
    }


@contextmanager
def no_route(groups: SshGroups, name: str, to: str) -> Iterator[None]:
    """The host cannot reach the other one; all others reach both."""
    route = ["unreachable", groups.bed[to].address]
    groups.bed[name].run(["ip", "route", "add", *route])
    try:
        yield
    finally:
        groups.bed[name].run(["ip", "route", "del", *route])


def test_healthy_hosts(groups: SshGroups) -> None:
    ended = doctor(groups)
    assert ended.code == 0, ended.out + ended.err
    checks = {check["name"]: check for check in ended.json()["checks"]}
    assert tuple(checks) == ALL
    assert {check["state"] for check in checks.values()} == {"ok"}
    assert checks["all-reduce (gloo)"]["detail"].startswith("3 ranks on 3 nodes, ")
    assert checks["nodes connected"]["detail"] == "each to each, 3 pairs"
    assert checks["shared directory"]["detail"] == f"{groups.folder} is seen by all"
    assert list(groups.folder.iterdir()) == []


def test_a_host_that_is_down_is_named_and_the_rest_not_tried(groups: SshGroups) -> None:
    groups.bed.cable("h2", up=False)
    try:
        began = time.monotonic()
        ended = doctor(groups)
        assert time.monotonic() - began < 60
    finally:
        groups.bed.cable("h2", up=True)
    [(name, (nodes, detail))] = failed(ended).items()
    assert (name, nodes) == ("nodes reached", ["h2"])
    assert "ssh ended with exit code 255" in detail
    assert "try: ssh " in detail
    assert set(states(ended).values()) == {"failed", "skipped"}


def test_a_host_without_a_way_to_another(groups: SshGroups) -> None:
    with no_route(groups, "h1", "h2"):
        ended = doctor(groups)
    [(name, (nodes, detail))] = failed(ended).items()
    assert name == "nodes connected"
    assert "h1" in nodes
    assert f"h1 cannot connect to h2 at {groups.bed['h2'].address}: No route to host" in detail
    assert states(ended)["all-reduce (gloo)"] == "skipped"
    assert states(ended)["master connected"] == "ok"


def test_a_wrong_master_address(groups: SshGroups) -> None:
    ended = doctor(groups, "--master-addr", groups.bed["h1"].address, "--nnodes", "2")
    [(name, (nodes, detail))] = failed(ended).items()
    assert (name, nodes) == ("master connected", ["h0", "h1"])
    assert "cannot connect to h0 at" in detail
    assert "give node rank 0 another address (--master-addr, address)" in detail


def test_a_name_that_a_host_does_not_know_and_a_python_that_is_not_there(groups: SshGroups) -> None:
    with groups.bed.own_hosts("h1", "127.0.1.1 h0"):
        ended = doctor(groups, "--nnodes", "2", "--master-addr", "h0")
    assert failed(ended)["master address"][0] == ["h1"]
    assert "the master address means 127.0.1.1 there" in failed(ended)["master address"][1]
    ended = doctor(groups, "--python", "/opt/none/python")
    [(name, (nodes, detail))] = failed(ended).items()
    assert (name, nodes) == ("agent started", list(HOSTS))
    assert "it must be able to run /opt/none/python -m nvflare_torchrun_plugin.node_agent" in detail


def test_ctrl_c_in_the_middle_of_the_all_reduce_leaves_nothing(groups: SshGroups) -> None:
    running = Command(["doctor", "--nodes", "h0,h1"], groups.folder, groups.bed["h0"])
    wait_until("torchrun on h1", lambda: "torch.distributed.run" in str(groups.processes("h1")))
    running.signal(signal.SIGINT)
    ended = running.finish()
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.endswith("nvflare-torchrun: stopped\n")
    groups.wait_until_gone()
