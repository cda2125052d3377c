"""Who is blamed."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from traceback import format_exception

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin import verdict
from nvflare_torchrun_plugin.verdict import Failure, NodeRecord, RankRecord, Verdict


def node(number: int, *ranks: RankRecord, ended: float | None = None, code: int | None = 0) -> NodeRecord:
    return NodeRecord(number, f"host-{number}", {record.rank: record for record in ranks}, ended, code)


def rank(number: int, ended: float, code: int | None, traceback: str | None = None) -> RankRecord:
    return RankRecord(
        number, 0, 100 + number, ended, code, traceback, deque([f"last of {number}"]), f"{number}.log"
    )


def reach(
    *nodes: NodeRecord, stopped_at: float | None = None, reason: str | None = None, suspect: Failure | None = None
) -> Verdict:
    return verdict.reach(list(nodes), stopped_at=stopped_at, reason=reason, suspect=suspect, seconds=9.0)


def test_all_well() -> None:
    result = reach(node(0, rank(0, 5.0, 0)), node(1, rank(1, 5.0, 0)))
    assert result == Verdict("ok", None, None, (), (), 9.0, ranks_ran=True)
    assert result.text() == "group ok after 9.0 s"


def test_a_stop_without_a_failure_blames_nobody() -> None:
    nodes = [node(n, rank(n, 6.0, -15), ended=6.1, code=1) for n in (0, 1)]
    result = reach(*nodes, stopped_at=5.0, reason="abort")
    assert (result.outcome, result.reason, result.failure) == ("stopped", "abort", None)
    assert result.text() == "group stopped after 9.0 s: abort"


def test_the_earliest_failure_is_blamed() -> None:
    result = reach(node(0, rank(0, 4.0, 1), ended=4.5, code=1), node(1, rank(1, 3.0, 7), ended=4.6, code=1))
    assert result.outcome == "failed"
    assert result.failure == Failure(1, "host-1", 1, 0, "exit code 7", 3.0, None, ("last of 1",), "1.log")
    assert result.victims == (0,)


@pytest.mark.parametrize(
    "echo",
    [
        rank(0, 1.0, -15),
        rank(0, 1.0, 1, "RuntimeError: [gloo/tcp/pair.cc] Connection closed by peer [127.0.0.1]:4711\n"),
        rank(0, 1.0, 1, "torch.distributed.DistBackendError: NCCL error: remote process exited\n"),
        rank(0, 1.0, 1, "BrokenPipeError: [Errno 32] Broken pipe\n"),
        rank(0, 1.0, 1, "nvflare_torchrun_plugin.client.links.LinkError: receive(): local rank 1 has ended\n"),
    ],
)
def test_an_echo_is_not_blamed_though_it_came_first(echo: RankRecord) -> None:
    result = reach(node(0, echo, ended=2.0, code=1), node(1, rank(1, 1.5, 3), ended=2.0, code=1))
    assert result.failure is not None
    assert (result.failure.node_rank, result.failure.rank, result.failure.what) == (1, 1, "exit code 3")


def test_an_echo_alone_is_blamed() -> None:
    result = reach(node(0, rank(0, 1.0, -15), ended=1.0, code=1))
    assert result.failure is not None
    assert (result.failure.rank, result.failure.what) == (0, "SIGTERM")


def test_what_fails_after_the_stop_is_our_doing() -> None:
    late = node(0, rank(0, 5.1, 1), ended=5.2, code=1)
    early = node(1, rank(1, 4.9, 3), ended=5.0, code=1)
    result = reach(late, early, stopped_at=5.0)
    assert result.failure is not None
    assert (result.failure.rank, result.victims) == (1, (0,))
    assert reach(late, stopped_at=5.0, reason="abort").outcome == "stopped"


def test_sigkill_comes_with_its_usual_reason() -> None:
    assert verdict.describe(-9) == "SIGKILL (killed from outside; memory is the usual reason)"
    assert verdict.describe(-11) == "SIGSEGV"
    assert verdict.describe(3) == "exit code 3"


def test_a_node_whose_ranks_never_failed_is_blamed_itself() -> None:
    lost = NodeRecord(1, "gpu-1", ended=2.0, error="no word from the agent", log="node-1.log")
    lost.last_lines.append("ssh: no route to host")
    result = reach(node(0, rank(0, 3.0, 1), ended=3.0, code=1), lost)
    assert result.failure == Failure(
        1,
        "gpu-1",
        None,
        None,
        "no word from the agent",
        2.0,
        None,
        ("ssh: no route to host",),
        "node-1.log",
        "infrastructure",
    )


def test_the_suspect_counts_only_without_another_failure() -> None:
    suspect = Failure(0, "host-0", 0, 0, "no result", 1.0, None, (), None)
    assert reach(node(0, rank(0, 1.0, 0)), suspect=suspect, stopped_at=3.0).failure == suspect
    other = reach(node(0, rank(0, 1.0, 0)), node(1, rank(1, 2.0, 5)), suspect=suspect, stopped_at=3.0)
    assert other.failure is not None
    assert other.failure.rank == 1


def test_text_and_json() -> None:
    left = node(0, rank(0, 2.0, -15))
    left.leftovers = (41, 42)
    traceback = 'Traceback (most recent call last):\n  File "a.py", line 2, in <module>\n    x()\nValueError: x\n'
    result = reach(left, node(1, rank(1, 1.0, 1, traceback)))
    assert result.text().splitlines() == [
        "group failed: node 1 (host-1) rank 1 (local rank 0): exit code 1, 1.0 s after the start: ValueError: x",
        "  traceback:",
        "    Traceback (most recent call last):",
        '      File "a.py", line 2, in <module>',
        "        x()",
        "    ValueError: x",
        "  last lines:",
        "    last of 1",
        "  all its lines: 1.log",
        "  stopped because of it: rank 0",
        "  LEFT OVER: node 0 (host-0): cannot end process 41, 42",
    ]
    assert json.loads(json.dumps(result.as_dict()))["failure"]["rank"] == 1


class OfItsOwnError(Exception):
    pass


def _raise(error: BaseException) -> None:
    raise error


def _raise_in_turn(first: BaseException, second: BaseException) -> None:
    try:
        raise first
    except type(first):
        raise second  # noqa: B904 - as scripts do


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: _raise(ValueError("batch 3 has 0 samples")), "ValueError: batch 3 has 0 samples"),
        (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt"),
        (lambda: _raise(OfItsOwnError("x")), "test_verdict.OfItsOwnError: x"),
        (lambda: _raise(RuntimeError("first line\nsecond line\n  third line\nlast")), "RuntimeError: first line"),
        (lambda: _raise_in_turn(KeyError("a"), TypeError("b")), "TypeError: b"),
        (lambda: compile("x = (", "train.py", "exec"), "SyntaxError: '(' was never closed"),
        (lambda: _raise(MemoryError("x" * 500)), f"MemoryError: {'x' * 187}..."),
    ],
)
def test_the_first_line_says_what_was_raised(call: Callable[[], None], said: str) -> None:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - it is known which one
        call()
    text = "".join(format_exception(caught.value))
    result = reach(node(0, rank(0, 1.0, 1, text)))
    assert result.failure is not None
    assert result.failure.exception == said
    first, _, rest = result.text().partition("\n")
    assert first.endswith(f", 1.0 s after the start: {said}")
    assert rest.startswith("  traceback:\n    Traceback (most recent call last):\n")


@given(
    st.lists(st.sampled_from(['  File "a.py", line 1', "    x()", ""]) | st.text(), max_size=8), st.text("\n\r\v")
)
def test_whatever_a_rank_raises_the_first_line_is_one(lines: list[str], end: str) -> None:
    failure = Failure(0, "host-0", 0, 0, "exit code 1", 1.0, "\n".join(lines) + end, (), None)
    (said,) = (failure.exception or "nothing").splitlines()
    assert said.strip() == said
    assert len(said) <= 203


def test_a_rank_that_raised_is_no_victim_of_a_signal_that_came_after() -> None:
    raised = rank(0, 3.0, -15, "ValueError: boom\n")
    result = reach(node(0, raised, ended=4.0, code=1), node(1, rank(1, 3.5, -15), ended=4.0, code=1))
    assert result.failure is not None
    assert (result.failure.rank, result.failure.what) == (0, "uncaught exception")


def test_what_its_agent_had_begun_to_end_is_not_blamed_however_early_it_looks() -> None:
    told = rank(0, 1.0, 1)
    told.stopped = True
    first = node(0, told, ended=1.0, code=1)
    first.stopped = True
    result = reach(first, node(1, rank(1, 2.0, 7), ended=2.0, code=1), stopped_at=5.0)
    assert result.failure is not None
    assert (result.failure.rank, result.victims) == (1, (0,))
    assert reach(first, stopped_at=5.0, reason="abort").outcome == "stopped"


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (rank(0, 1.0, -9), "infrastructure"),
        (rank(0, 1.0, -2), "infrastructure"),
        (rank(0, 1.0, -9, "ValueError: x\n"), "script"),
        (rank(0, 1.0, -11), "script"),
        (rank(0, 1.0, 1), "script"),
    ],
)
def test_whose_business_a_failure_is(record: RankRecord, cause: str) -> None:
    failure = reach(node(0, record, ended=2.0, code=1)).failure
    assert failure is not None
    assert failure.cause == cause


def test_a_rank_that_was_stopped_is_blamed_whatever_became_of_it_then() -> None:
    halted, waiting = rank(1, 6.0, -15), rank(0, 6.0, -15)
    halted.halted = 2.0, "stopped (SIGSTOP) for 3 s"
    gave_up = rank(2, 4.0, 1, "TimeoutError: nobody answers\n")
    for record in (halted, waiting):
        record.stopped = True
    result = reach(node(0, waiting), node(1, halted), node(2, gave_up), stopped_at=5.0)
    assert result.failure is not None
    assert (result.failure.rank, result.failure.what) == (1, "stopped (SIGSTOP) for 3 s")
    assert (result.failure.seconds, result.failure.cause, result.victims) == (2.0, "infrastructure", (0, 2))


def test_a_rank_may_have_been_stopped_before_its_task_came() -> None:
    halted = rank(1, 18.5, -15)
    halted.halted = -12.0, "stopped (SIGSTOP) for 30 s (node_timeout)"
    first = reach(node(0, halted)).text().splitlines()[0]
    assert first.endswith("stopped (SIGSTOP) for 30 s (node_timeout), 12.0 s before the start")


@pytest.mark.parametrize(("code", "cause"), [(-9, "infrastructure"), (1, "infrastructure"), (2, "configuration")])
def test_a_torchrun_that_did_not_understand_its_options_is_nothing_to_try_again(code: int, cause: str) -> None:
    failure = reach(node(0, ended=2.0, code=code)).failure
    assert failure is not None
    assert failure.cause == cause


def alone(number: int, text: str) -> NodeRecord:
    """A node whose torchrun has waited for the others in vain."""
    return NodeRecord(number, f"host-{number}", {}, 8.0, 1, last_lines=deque(["self._store = TCPStore(", text]))


WAITED = "torch.distributed.DistStoreError: Timed out after 9 seconds waiting for clients. 1/2 clients joined."
FOUND_NOBODY = "torch.distributed.DistNetworkError: The client socket has timed out after 8000ms while trying to"


@pytest.mark.parametrize(("witness", "absent"), [(alone(0, WAITED), 1), (alone(1, FOUND_NOBODY), 0)])
def test_a_node_that_does_not_join_is_blamed_and_not_the_one_that_waits(witness: NodeRecord, absent: int) -> None:
    late = node(absent, ended=9.5, code=-15)
    late.stopped = True
    result = reach(witness, late, stopped_at=9.0)
    assert result.failure is not None
    assert (result.failure.node_rank, result.failure.host, result.failure.rank) == (absent, f"host-{absent}", None)
    assert result.failure.what == "its torchrun has not joined the others within join_timeout"
    assert (result.failure.cause, result.failure.seconds) == ("infrastructure", 8.0)


def test_all_nodes_that_do_not_join_are_named() -> None:
    lost = NodeRecord(1, "host-1", {}, 8.1, 1, last_lines=deque(["DistNetworkError: connection closed"]))
    result = reach(
        alone(0, WAITED), lost, node(2, ended=None, code=None), node(3, ended=9.5, code=1), stopped_at=9.0
    )
    assert result.failure is not None
    assert (result.failure.node_rank, result.failure.what) == (
        2,
        "its torchrun has not joined the others within join_timeout, nor has that of node 3 (host-3)",
    )


def test_a_torchrun_that_nobody_keeps_waiting_fails_by_itself() -> None:
    result = reach(alone(0, FOUND_NOBODY), alone(1, FOUND_NOBODY), stopped_at=9.0)
    assert result.failure is not None
    assert (result.failure.node_rank, result.failure.what) == (0, "torchrun ended with exit code 1")
