"""Whether a task whose attempt has failed is tried again, and which nodes sit the next attempt out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from nvflare_torchrun_plugin.description.group_description import Node
from nvflare_torchrun_plugin.group_values import NodeGroupError, integer_of, shown
from nvflare_torchrun_plugin.verdict import Verdict

RETRY_ON = ("infrastructure", "any", "never")
_FREE_ATTEMPTS = 3
"""Attempts of a task that may fail before any rank ran; they have used up nothing."""
_MAX_PAUSE = 30.0
_SIT_OUT, _MAX_SIT_OUT = 60.0, 900.0


@dataclass(frozen=True)
class RetryPolicy:
    """When a task is tried again.

    Attributes:
        max_task_attempts: most attempts of one task in which ranks ran.
        retry_on: ``infrastructure`` (a node or agent was lost, a rank was killed from outside), ``any``
            failure, or ``never``.
    """

    max_task_attempts: int = 1
    retry_on: str = RETRY_ON[0]

    @classmethod
    def parse(cls, max_task_attempts: object, retry_on: object, *, launch_once: bool) -> RetryPolicy:
        """Return the policy.

        Raises:
            NodeGroupError: a value is wrong, or the launch serves the whole job; the message names it.
        """
        number = integer_of(max_task_attempts)
        if number is None or number < 1:
            raise NodeGroupError(
                f"max_task_attempts is {shown(max_task_attempts)}: must be a number of at least 1"
            )
        if not isinstance(retry_on, str) or retry_on not in RETRY_ON:
            raise NodeGroupError(f"retry_on is {shown(retry_on)}: must be one of {', '.join(RETRY_ON)}")
        if number > 1 and launch_once:
            raise NodeGroupError(
                f"max_task_attempts is {number}, but launch_once is true: a trainer for the whole job cannot be"
                " started again for one task; set launch_once to false"
            )
        # A group that serves the whole job is not started again, not even one that never came up.
        return cls(number, "never" if launch_once else retry_on)

    def pause(self, failed: Sequence[Verdict]) -> float | None:
        """Return the seconds to wait before the next attempt of a task, None to give up.

        Args:
            failed: the verdicts of its attempts so far, at least one.
        """
        last = failed[-1]
        if self.retry_on == "never" or last.outcome == "stopped":
            return None
        if last.cause == "configuration":
            return None
        if not last.ranks_ran:
            return 0.0 if sum(not verdict.ranks_ran for verdict in failed) < _FREE_ATTEMPTS else None
        ran = sum(verdict.ranks_ran for verdict in failed)
        if ran >= self.max_task_attempts or (last.cause == "script" and self.retry_on != "any"):
            return None
        return float(min(2 ** (ran - 1), _MAX_PAUSE))


@dataclass
class NodeHealth:
    """Which nodes have failed lately. Node rank 0 is always in: it is the client job's own host.

    Attributes:
        clock: monotonic seconds.
    """

    clock: Callable[[], float]
    _back: dict[str, float] = field(default_factory=dict)
    _times: dict[str, int] = field(default_factory=dict)
    _why: dict[str, str] = field(default_factory=dict)
    _returned: dict[str, float] = field(default_factory=dict)

    def failed(self, host: str, why: str, began: float = math.inf) -> None:
        """Let the node sit out for a while, the longer the more often in a row it has failed.

        Args:
            host: the node.
            why: in words.
            began: when the attempt did in which it failed: what it was before it was started anew does not count.
        """
        if self._returned.get(host, -math.inf) > began:
            return
        self._why[host] = why
        times = self._times[host] = self._times.get(host, 0) + 1
        self._back[host] = self.clock() + min(_SIT_OUT * 2 ** (times - 1), _MAX_SIT_OUT)

    def returned(self, host: str) -> None:
        """A node has been started anew: what it was before does not count."""
        self._returned[host] = self.clock()
        self._back.pop(host, None)

    def learn(self, verdict: Verdict, hosts: Iterable[str], began: float = math.inf) -> None:
        """Take note of who failed in an attempt that was under way, and of who did not.

        Args:
            verdict: of the attempt; of nodes that it did without, :meth:`failed` is told.
            hosts: the nodes that were to take part.
            began: when the attempt did.
        """
        failure = verdict.failure
        if failure is not None:
            if failure.cause == "infrastructure" and failure.node_rank > 0:
                self.failed(failure.host, failure.what, began)
        elif verdict.ranks_ran:
            for host in set(hosts) - {host for host, _ in verdict.left_out}:
                self._times.pop(host, None)
                self._back.pop(host, None)

    def reason(self, host: str) -> str:
        """Return for how long the node sits out yet, and why, to be read after its name."""
        left = self._back.get(host, -math.inf) - self.clock()
        if left <= 0:
            return "sits out, for what an attempt has left there is still being ended"
        return f"sits out for {left:.0f} s more, for it has failed: {self._why[host]}"

    def sitting_out(self, nodes: Sequence[Node], least: int, unswept: Collection[str] = ()) -> list[Node]:
        """Return the nodes that sit the next attempt out: those that failed lately, if the others are enough.

        Nodes on node rank 0's host (``nodes: 2``) are as well as that one.

        Args:
            nodes: all.
            least: how many a group has at least; 0 means all.
            unswept: hosts on which the end of an earlier attempt is still seen to; they sit out as well, if there
                are enough without them too: they will do once that is over.
        """
        # A group that ends just now, in the supervisor's thread, changes this.
        late = {host for host, back in tuple(self._back.items()) if back > self.clock()}
        for hosts in (late | set(unswept), late):
            bad = [node for node in nodes if node.host in hosts and node.host != nodes[0].host]
            if len(nodes) - len(bad) >= (least or len(nodes)):
                return bad
        return []
