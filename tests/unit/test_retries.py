"""Who is tried again, when, and without which nodes."""

from __future__ import annotations

from typing import Any

import pytest

from nvflare_torchrun_plugin.description.group_description import Node
from nvflare_torchrun_plugin.group_values import NodeGroupError
from nvflare_torchrun_plugin.job.retries import NodeHealth, RetryPolicy
from nvflare_torchrun_plugin.verdict import Cause, Failure, Verdict

NODES = [Node("gpu-0"), Node("gpu-1"), Node("gpu-2")]
HOSTS = [node.host for node in NODES]


def verdict(
    cause: Cause | None = "infrastructure",
    *,
    ran: bool = True,
    outcome: str = "failed",
    node_rank: int = 1,
    left_out: tuple[tuple[str, str], ...] = (),
) -> Verdict:
    failure = (
        Failure(node_rank, f"gpu-{node_rank}", None, None, "lost", 1.0, None, (), None, cause) if cause else None
    )
    return Verdict(outcome, None, failure, (), (), 2.0, ran, left_out)


def test_by_default_only_what_has_cost_nothing_is_tried_again() -> None:
    policy = RetryPolicy()
    assert policy.pause([verdict()]) is None
    assert policy.pause([verdict("script")]) is None
    unreached = verdict(ran=False)
    assert policy.pause([unreached]) == policy.pause([unreached] * 2) == 0.0
    assert policy.pause([unreached] * 3) is None


def test_the_machines_fault_is_tried_again_within_the_limit_and_less_often_each_time() -> None:
    policy = RetryPolicy(8)
    assert [policy.pause([verdict()] * n) for n in range(1, 9)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]
    assert policy.pause([verdict("script")]) is None
    # Attempts before any rank ran do not count.
    assert policy.pause([verdict(ran=False), verdict()]) == 1.0


def test_any_and_never() -> None:
    assert RetryPolicy(2, "any").pause([verdict("script")]) == 1.0
    assert RetryPolicy(2, "any").pause([verdict(None, outcome="ok")]) == 1.0
    assert RetryPolicy(2, "never").pause([verdict(ran=False)]) is None


def test_a_group_for_the_whole_job_is_not_started_again() -> None:
    assert RetryPolicy.parse(1, "any", launch_once=True).pause([verdict(ran=False)]) is None
    assert RetryPolicy.parse(1, "any", launch_once=False).pause([verdict(ran=False)]) == 0.0


@pytest.mark.parametrize("failed", [verdict("configuration", ran=False), verdict(None, outcome="stopped")])
def test_what_no_retry_changes_is_not_tried_again(failed: Verdict) -> None:
    assert RetryPolicy(5, "any").pause([failed]) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_task_attempts": 0}, "max_task_attempts is 0: must be a number of at least 1"),
        ({"max_task_attempts": "x"}, "max_task_attempts is 'x': must be a number of at least 1"),
        ({"max_task_attempts": True}, "max_task_attempts is True: must be a number of at least 1"),
        ({"retry_on": "always"}, "retry_on is 'always': must be one of infrastructure, any, never"),
        ({"max_task_attempts": 2, "launch_once": True}, "max_task_attempts is 2, but launch_once is true: "),
    ],
)
def test_a_wrong_value_is_named(given: dict[str, Any], message: str) -> None:
    values = {"max_task_attempts": 1, "retry_on": "infrastructure", "launch_once": False, **given}
    with pytest.raises(NodeGroupError) as caught:
        RetryPolicy.parse(**values)
    assert str(caught.value).startswith(message)


def test_a_node_that_failed_sits_out_and_comes_back() -> None:
    now = [100.0]
    health = NodeHealth(lambda: now[0])
    assert health.sitting_out(NODES, 1) == []
    health.learn(verdict(), HOSTS)
    assert health.sitting_out(NODES, 1) == [NODES[1]]
    now[0] += 61
    assert health.sitting_out(NODES, 1) == []
    # The second time it takes longer, until it has done its part again.
    health.failed("gpu-1", "no route")
    assert health.reason("gpu-1") == "sits out for 120 s more, for it has failed: no route"
    health.learn(verdict(left_out=(("gpu-1", "no route"),), cause=None, outcome="ok"), HOSTS)
    now[0] += 61
    assert health.sitting_out(NODES, 1) == [NODES[1]]
    now[0] += 60
    health.learn(verdict(None, outcome="ok"), HOSTS)
    health.learn(verdict(), HOSTS)
    now[0] += 61
    assert health.sitting_out(NODES, 1) == []


def test_nobody_sits_out_when_all_are_needed() -> None:
    health = NodeHealth(lambda: 0.0)
    health.learn(verdict(), HOSTS)
    assert health.sitting_out(NODES, 3) == health.sitting_out(NODES, 0) == []
    assert health.sitting_out(NODES, 2) == [NODES[1]]


def test_a_script_s_fault_and_node_rank_0_make_nobody_sit_out() -> None:
    health = NodeHealth(lambda: 0.0)
    health.learn(verdict("script"), HOSTS)
    health.learn(verdict(node_rank=0), HOSTS)
    assert health.sitting_out(NODES, 1) == []


def test_nodes_on_the_client_s_own_host_never_sit_out() -> None:
    health = NodeHealth(lambda: 0.0)
    health.learn(verdict(), HOSTS)
    assert health.sitting_out([Node("gpu-1")] * 2, 1) == []


def test_a_node_that_has_been_started_anew_does_not_sit_out_for_what_was_before() -> None:
    now = [100.0]
    health = NodeHealth(lambda: now[0])
    health.learn(verdict(), HOSTS, 90.0)
    assert health.sitting_out(NODES, 1) == [NODES[1]]
    health.returned("gpu-1")
    assert health.sitting_out(NODES, 1) == []
    # An attempt that began before, and is over only now.
    health.learn(verdict(), HOSTS, 95.0)
    health.failed("gpu-1", "was absent", 95.0)
    assert health.sitting_out(NODES, 1) == []
    health.failed("gpu-1", "lost again", 101.0)
    assert health.sitting_out(NODES, 1) == [NODES[1]]


def test_a_host_that_is_still_seen_to_does_not_bring_one_back_that_has_failed() -> None:
    health = NodeHealth(lambda: 0.0)
    health.failed("gpu-1", "no route")
    assert health.sitting_out(NODES, 1, {"gpu-2"}) == [NODES[1], NODES[2]]
    # Both are too many: the one that is still seen to will do once that is over.
    assert health.sitting_out(NODES, 2, {"gpu-2"}) == [NODES[1]]
    assert health.sitting_out(NODES, 3, {"gpu-2"}) == []


def test_a_host_that_has_sat_out_long_ago_does_so_for_what_is_left_there() -> None:
    now = [100.0]
    health = NodeHealth(lambda: now[0])
    health.failed("gpu-1", "no route")
    now[0] += 61
    assert health.sitting_out(NODES, 1, {"gpu-1"}) == [NODES[1]]
    assert health.reason("gpu-1") == "sits out, for what an attempt has left there is still being ended"
