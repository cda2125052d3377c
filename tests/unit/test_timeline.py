"""Where the time went, from the events that a run has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvflare_torchrun_plugin import timeline
from nvflare_torchrun_plugin.supervision.events import GROUP_FILE, TASKS_FILE

T0 = 1_700_000_000.0


def at(seconds: float, event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "at": T0 + seconds, **fields}


def write(path: Path, *events: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def task(seconds: float, number: int = 0) -> dict[str, Any]:
    return at(seconds, "task", site="site-1", job="j", task="train", round=number)


def group(begin: float, name: str, ahead: bool = False) -> list[dict[str, Any]]:
    """Two nodes with two ranks each, whose ranks are there 6 s after the group's begin."""
    events = [
        at(begin, "group", name=name, hosts=["a", "b"], ahead=ahead, serves_job=False),
        at(begin + 1, "agent", place=0, host="a"),
        at(begin + 2, "chosen", places=[0, 1]),
        at(begin + 2, "started"),
    ]
    return events + [
        at(begin + 5 + place, "rank", place=place, rank=2 * place + local) for place in (0, 1) for local in (0, 1)
    ]


def moments(**times: float) -> list[dict[str, Any]]:
    return [at(seconds, what, place=place) for what, seconds in times.items() for place in (0, 1)]


def ends(seconds: float, outcome: str = "ok") -> list[dict[str, Any]]:
    return [
        *(at(seconds, "end", place=place, code=0) for place in (0, 1)),
        at(seconds, "verdict", outcome=outcome, reason=None),
    ]


def phases(node: timeline.NodeTime) -> list[tuple[str, float, float]]:
    return [(part.phase, part.begin - T0, part.end - T0) for part in node.segments]


def test_a_task_that_starts_cold(tmp_path: Path) -> None:
    write(tmp_path / TASKS_FILE, task(0), at(1, "attempt", group="g"), at(20, "reply", group="g", code="OK"))
    told = moments(receive=10, received=11, send=18, sent=19)
    write(tmp_path / "attempt-0001" / GROUP_FILE, *group(3, "g"), *told, at(20, "accepted"), *ends(22))
    (found,) = timeline.read(tmp_path)
    assert (found.site, found.task, found.round, found.number, found.start) == ("site-1", "train", 0, 1, "cold")
    assert (found.begin - T0, found.end - T0, found.outcome) == (0, 22, "ok")
    assert [(node.node_rank, node.host, node.ranks, node.failure) for node in found.nodes] == [
        (0, "a", 2, None),
        (1, "b", 2, None),
    ]
    assert phases(found.nodes[0]) == [
        ("waiting", 0, 3),
        ("launching", 3, 5),
        ("joining", 5, 8),
        ("importing", 8, 10),
        ("receiving", 10, 11),
        ("training", 11, 18),
        ("sending", 18, 20),
        ("cleaning up", 20, 22),
    ]
    # The second node's ranks come a second later, and ask at the same time.
    assert [found.nodes[1].seconds(phase) for phase in ("joining", "importing")] == [4, 1]
    assert not any(part.ahead or part.failed for node in found.nodes for part in node.segments)


def test_where_nothing_is_told_all_is_training(tmp_path: Path) -> None:
    write(tmp_path / TASKS_FILE, task(0), at(0, "attempt", group="g"), at(20, "reply", group="g", code="OK"))
    write(tmp_path / "attempt-0001" / GROUP_FILE, *group(0, "g"), *ends(21))
    (found,) = timeline.read(tmp_path)
    assert phases(found.nodes[1]) == [
        ("launching", 0, 2),
        ("joining", 2, 6),
        ("training", 6, 20),
        ("cleaning up", 20, 21),
    ]


def test_what_a_warm_start_did_ahead_costs_the_task_nothing(tmp_path: Path) -> None:
    write(tmp_path / TASKS_FILE, task(30, 1), at(30, "attempt", group="w"), at(40, "reply", group="w", code="OK"))
    warm = [at(12, "warm", place=place, rank=2 * place + local) for place in (0, 1) for local in (0, 1)]
    told = moments(receive=32, received=33, send=38)
    write(
        tmp_path / "attempt-0002" / GROUP_FILE, *group(3, "w", ahead=True), *warm, at(31, "go"), *told, *ends(41)
    )
    (found,) = timeline.read(tmp_path)
    node = found.nodes[0]
    assert found.start == "warm"
    assert [(part.phase, part.ahead) for part in node.segments] == [
        ("launching", True),
        ("joining", True),
        ("importing", True),
        ("waiting", True),
        ("waiting", False),
        ("importing", False),
        ("receiving", False),
        ("training", False),
        ("sending", False),
        ("cleaning up", False),
    ]
    assert [node.seconds(phase) for phase in timeline.PHASES] == [1, 0, 0, 1, 1, 5, 2, 1]


def test_one_group_that_serves_two_tasks(tmp_path: Path) -> None:
    write(
        tmp_path / TASKS_FILE,
        task(10),
        at(10, "attempt", group="k"),
        at(20, "reply", group="k", code="OK"),
        task(25, 1),
        at(25, "attempt", group="k"),
        at(40, "reply", group="k", code="OK"),
    )
    first = [*moments(receive=8), *moments(receive=8.5, received=11, send=19, sent=19.5), *moments(receive=19.6)]
    second = [*moments(receive=25.5, received=26, send=39), *moments(receive=39.5)]
    write(tmp_path / "attempt-0001" / GROUP_FILE, *group(0, "k"), *first, *second, *ends(42))
    one, two = timeline.read(tmp_path)
    assert (one.start, two.start) == ("cold", "kept")
    assert phases(one.nodes[0])[-3:] == [("receiving", 10, 11), ("training", 11, 19), ("sending", 19, 20)]
    assert phases(two.nodes[0]) == [
        ("receiving", 25, 26),
        ("training", 26, 39),
        ("sending", 39, 40),
        ("cleaning up", 40, 42),
    ]


def test_a_failure_and_the_second_try(tmp_path: Path) -> None:
    write(
        tmp_path / TASKS_FILE,
        task(0),
        at(0, "attempt", group="g1"),
        at(15, "reply", group="g1", code="EXECUTION_EXCEPTION"),
        at(16, "attempt", group="g2"),
        at(30, "reply", group="g2", code="OK"),
    )
    failure = at(12, "failure", node_rank=1, host="b", rank=3, what="SIGKILL")
    write(
        tmp_path / "attempt-0001" / GROUP_FILE,
        *group(0, "g1"),
        *moments(receive=7, received=8),
        at(12.3, "stop", reason=None),
        failure,
        *ends(14, "failed"),
    )
    write(tmp_path / "attempt-0002" / GROUP_FILE, *group(16, "g2"), *moments(receive=23), *ends(30))
    one, two = timeline.read(tmp_path)
    assert (one.number, one.outcome, two.number, two.outcome) == (1, "execution exception", 2, "ok")
    assert [node.failure for node in one.nodes] == [None, "rank 3: SIGKILL"]
    assert [(part.phase, part.failed) for part in one.nodes[1].segments][-2:] == [
        ("training", True),
        ("cleaning up", False),
    ]
    assert not any(part.failed for part in one.nodes[0].segments)
    assert phases(two.nodes[0])[0] == ("waiting", 15, 16)


def test_the_seconds_for_which_a_rank_was_stopped_are_training(tmp_path: Path) -> None:
    """It counts as failed since it was stopped; its group went on until it had been stopped for too long."""
    write(tmp_path / TASKS_FILE, task(0), at(0, "attempt", group="g"), at(43, "reply", group="g", code="TIMEOUT"))
    write(
        tmp_path / "attempt-0001" / GROUP_FILE,
        *group(0, "g"),
        *moments(receive=7, received=8),
        at(42, "stop", reason=None),
        at(12, "failure", node_rank=1, host="b", rank=3, what="stopped (SIGSTOP) for 30 s"),
        *ends(44, "failed"),
    )
    (found,) = timeline.read(tmp_path)
    for node in found.nodes:
        assert phases(node)[-2:] == [("training", 8, 42), ("cleaning up", 42, 44)]
    assert [node.segments[-2].failed for node in found.nodes] == [False, True]


def test_a_node_that_the_group_does_without(tmp_path: Path) -> None:
    write(tmp_path / TASKS_FILE, task(0), at(0, "attempt", group="g"), at(9, "reply", group="g", code="OK"))
    events = [event | {"places": [1]} if event["event"] == "chosen" else event for event in group(0, "g")]
    write(tmp_path / "attempt-0001" / GROUP_FILE, *events, *ends(9))
    (found,) = timeline.read(tmp_path)
    assert [(node.node_rank, node.host) for node in found.nodes] == [(0, "b"), (None, "a")]


def test_a_run_that_is_not_over_and_a_line_cut_short(tmp_path: Path) -> None:
    write(tmp_path / TASKS_FILE, task(0), at(0, "attempt", group="g"))
    file = tmp_path / "attempt-0001" / GROUP_FILE
    write(file, *group(0, "g"))
    file.write_text(file.read_text() + '{"event": "end", "pl')
    (found,) = timeline.read(tmp_path)
    assert (found.code, found.outcome, found.end - T0) == (None, "not over", 6)
    assert [part.phase for part in found.nodes[0].segments] == ["launching", "joining", "training"]


def test_a_task_without_a_group(tmp_path: Path) -> None:
    write(tmp_path / TASKS_FILE, task(0), at(5, "reply", group=None, code="RESOURCE_BUSY"))
    (found,) = timeline.read(tmp_path)
    assert (found.nodes, found.outcome, found.end - found.begin) == ((), "resource busy", 5)


def test_a_group_without_tasks(tmp_path: Path) -> None:
    write(tmp_path / "attempt" / GROUP_FILE, *group(0, "g"), at(9, "rank_end", place=0, rank=0, code=0), *ends(10))
    (found,) = timeline.read(tmp_path)
    # That of several runs can be told apart.
    assert (found.site, found.task, found.code, found.end - T0) == ("", tmp_path.name, "OK", 10)
    assert phases(found.nodes[0])[-1] == ("cleaning up", 9, 10)


def test_several_sites_below_one_folder(tmp_path: Path) -> None:
    for number, site in enumerate(("b", "a")):
        run = tmp_path / f"x{number}" / "torchrun"
        events = [
            task(number) | {"site": site},
            at(1, "attempt", group="g"),
            at(20, "reply", group="g", code="OK"),
        ]
        write(run / TASKS_FILE, *events)
        write(run / "attempt-0001" / GROUP_FILE, *group(1, "g"), *ends(20))
    assert [(found.site, len(found.nodes)) for found in timeline.read(tmp_path)] == [("b", 2), ("a", 2)]


def test_what_is_no_folder(tmp_path: Path) -> None:
    assert timeline.read(tmp_path) == []
    with pytest.raises(NotADirectoryError, match="is no folder"):
        timeline.read(tmp_path / "none")
