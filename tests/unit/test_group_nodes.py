"""A group and its nodes: which it does without, and which it cannot lose."""

from __future__ import annotations

from pathlib import Path

import pytest
from group_runs import WAITS, failure, run
from standins import HELLO, READY, end, launch, says

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.supervision import group

pytestmark = pytest.mark.usefixtures("short_bounds")


STARTS = f'read prepare; {says(HELLO, READY)}; read start; echo "$start" >> $1/starts; {says(end(0))}'
MISSING = "echo no route to host >&2; exit 255"


def starts(folder: Path) -> list[wire.Start]:
    orders = [wire.decode_order(line) for line in (folder / "starts").read_bytes().splitlines()]
    return sorted((order for order in orders if isinstance(order, wire.Start)), key=lambda start: start.tag)


def test_an_elastic_group_does_without_a_node_that_cannot_be_reached(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, STARTS, MISSING, STARTS, least=2))
    assert verdict.outcome == "ok"
    why = "no agent could be started there, sh ended with exit code 255: no route to host"
    assert verdict.left_out == (("host-1", why),)
    shares = [(order.tag, order.env["NVFL_NNODES"], order.env["NVFL_NODE_RANK"]) for order in starts(tmp_path)]
    assert shares == [("standin-0", "2", "0"), ("standin-2", "2", "1")]


def test_an_elastic_group_may_shrink_to_the_client_s_own_host(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, STARTS, MISSING, MISSING, least=1))
    assert (verdict.outcome, len(verdict.left_out)) == ("ok", 2)
    (order,) = starts(tmp_path)
    assert order.env["NVFL_NNODES"] == "1"
    assert "NVFL_MASTER_ADDR" not in order.env


def test_below_the_minimum_every_node_is_named_with_its_reason(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, WAITS, MISSING, "exit 3", least=2))
    assert not (tmp_path / "starts").exists()
    assert failure(verdict).what == (
        "1 of at least 2 nodes can take part. host-1: no agent could be started there, sh ended with exit code"
        " 255: no route to host; host-2: no agent could be started there, sh ended with exit code 3"
    )
    assert (failure(verdict).cause, verdict.ranks_ran) == ("infrastructure", False)


def test_without_node_rank_0_there_is_no_group(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, MISSING, WAITS, WAITS, least=1))
    assert failure(verdict).node_rank == 0


def test_versions_that_do_not_fit_are_nothing_to_try_again(tmp_path: Path) -> None:
    other = HELLO.replace('"torch": "2.4"', '"torch": "2.5"')
    assert other != HELLO
    agent = f"read prepare; {says(other, READY)}; read stop; {says(end(0, stopped=True))}"
    verdict = run(launch(tmp_path, WAITS, agent))
    assert failure(verdict).node_rank == 1
    assert failure(verdict).cause == "configuration"
    assert failure(verdict).what.startswith("torch is 2.5 on node host-1, but 2.4 on node host-0: ")


OTHER_TORCH = HELLO.replace('"torch": "2.4"', '"torch": "2.5"')


@pytest.mark.parametrize(
    "agent",
    [
        f"read prepare; {says(OTHER_TORCH, READY)}; read order; {says(end(None, stopped=True))}",
        f"read prepare; {says(OTHER_TORCH, READY)}; exec sleep 1000",
        "exec sleep 1000",
    ],
    ids=["reads its orders", "hangs", "has never greeted"],
)
def test_a_node_that_the_group_does_without_does_not_keep_it_from_its_end(tmp_path: Path, agent: str) -> None:
    verdict = run(launch(tmp_path, STARTS, agent, least=1, join_timeout=0.5))
    assert (verdict.outcome, [host for host, _ in verdict.left_out]) == ("ok", ["host-1"])


def test_the_late_end_of_a_node_that_the_group_does_without_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_SETTLE", 0.0)
    works = (
        f"read prepare; {says(HELLO, READY)}; read start; while ! [ -e $1/late ]; do sleep 0.01; done; "
        f"timeout 1 cat > $1/stop; {says(end(0))}"
    )
    late = f"read prepare; {says(OTHER_TORCH, READY)}; read stop; {says(end(3, 'a mistake'))}; > $1/late; exit 255"
    verdict = run(launch(tmp_path, works, late, least=1))
    assert verdict.outcome == "ok"
    assert (tmp_path / "stop").read_bytes() == b""


@pytest.mark.parametrize(
    "agent",
    [
        f"read prepare; {says(HELLO, end(None, stopped=True))}",
        f"read prepare; {says(HELLO, READY, end(None, stopped=True))}",
        f"read prepare; {says(HELLO, READY)}; read start; {says(end(-15, stopped=True))}",
    ],
    ids=["before it has answered", "before it has started", "while it runs"],
)
def test_an_agent_that_somebody_else_ends_is_a_lost_node(tmp_path: Path, agent: str) -> None:
    verdict = run(launch(tmp_path, WAITS, agent))
    assert (failure(verdict).node_rank, failure(verdict).cause) == (1, "infrastructure")
    assert failure(verdict).what == (
        "its agent got a signal to end there, or heard nothing for 60 s (node_timeout)"
    )


def test_an_agent_that_somebody_else_ends_is_blamed_though_a_peer_of_its_rank_fails_first(tmp_path: Path) -> None:
    def rank(number: int, *ends: wire.Frame) -> str:
        return says(*(wire.encode(frame).decode().strip() for frame in (wire.RankUp(number, 0, 1), *ends)))

    lost = wire.RankError(0, "RuntimeError: Connection closed by peer", 1.0, False)
    peer = (
        f"read prepare; {says(HELLO, READY)}; read start; while ! [ -e $1/gone ]; do sleep 0.01; done; "
        f"{rank(0, lost, wire.RankEnd(0, 1, 1.0, False, 0))}; read stop; {says(end(1, stopped=True))}"
    )
    ended = (
        f"read prepare; {says(HELLO, READY)}; read start; {rank(1, wire.RankEnd(1, -15, 1.0, True, 0))}; "
        f"> $1/gone; read stop; {says(end(-15, stopped=True, at=1.0))}"
    )
    verdict = run(launch(tmp_path, peer, ended))
    assert (failure(verdict).node_rank, failure(verdict).rank, failure(verdict).cause) == (
        1,
        None,
        "infrastructure",
    )
    assert failure(verdict).what.startswith("its agent got a signal to end there, or heard nothing for ")


def test_an_elastic_group_does_without_a_node_whose_agent_somebody_else_ends(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, STARTS, f"read prepare; {says(HELLO, end(None, stopped=True))}", least=1))
    assert (verdict.outcome, [host for host, _ in verdict.left_out]) == ("ok", ["host-1"])


def test_a_rank_0_that_left_without_a_result_is_blamed_though_nvflare_noticed_first(tmp_path: Path) -> None:
    up = wire.encode(wire.RankUp(0, 0, 1)).decode().strip()
    left = wire.encode(wire.RankEnd(0, 0, 1.5, False, 0)).decode().strip()
    agent = (
        f"read prepare; {says(HELLO, READY)}; read start; {says(up, left)}; touch $1/left; read stop;"
        f" {says(end(0, stopped=True))}"
    )
    verdict = run(launch(tmp_path, agent), stop_when=tmp_path / "left")
    assert (verdict.outcome, failure(verdict).rank) == ("failed", 0)
    assert failure(verdict).what.startswith("rank 0 ended with exit code 0, but no result was accepted")
