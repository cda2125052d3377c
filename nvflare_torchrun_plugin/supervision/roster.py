"""The nodes of one attempt: what is known of each so far, and which of them take part."""

from __future__ import annotations

import asyncio
import logging
import math

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.launching.launch import Launch, Member
from nvflare_torchrun_plugin.supervision.channel import Channel
from nvflare_torchrun_plugin.verdict import Cause, NodeRecord


class RunningNode:
    """A member of the launch while the attempt lasts.

    Attributes:
        tag: the name of its agent.
        record: what the verdict will be reached from.
        hello: what its agent has found on the node; None until it has greeted.
        ready: whether it can take part; None until it has said so.
        settled: is set once it is known whether the node can take part.
        said_end: whether its agent has said that everything there is gone.
    """

    def __init__(self, member: Member, node_rank: int, tag: str) -> None:
        self.member = member
        self.tag = tag
        self.record = NodeRecord(node_rank, member.host)
        self.channel: Channel | None = None
        self.hello: wire.Hello | None = None
        self.ready: wire.Ready | None = None
        self.settled = asyncio.Event()
        self.said_end = False
        self._offset = math.inf

    def post(self, order: wire.Order) -> None:
        """Send the order to the agent, if it was ever looked for."""
        if self.channel is not None:
            self.channel.post(order)

    def time_of(self, at: float, now: float) -> float:
        """Return a time of the node's clock on ours; the quickest frame so far tells how far they are apart."""
        self._offset = min(self._offset, now - at)
        return at + self._offset

    def shift_clock(self, seconds: float) -> None:
        """Take note that our clock shows so much more."""
        self._offset += seconds


class Roster:
    """All nodes of the attempt.

    Attributes:
        nodes: those of the group, in the order of their ranks; all members until it is chosen.
        left_out: those that the group does without.
        chosen: whether it is known which nodes make the group.
        too_few: why the nodes that are well are not enough; None when they are.
        stopped_at: when its nodes were told to end, in seconds since the attempt began; None until then.
        failed: is set once something has gone wrong that the group cannot do without.
    """

    def __init__(self, launch: Launch, logger: logging.Logger) -> None:
        self._least = launch.least
        self._logger = logger
        self._elastic = launch.least < len(launch.members)
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self.nodes = [
            RunningNode(member, node_rank, f"{launch.name}-{node_rank}")
            for node_rank, member in enumerate(launch.members)
        ]
        self.left_out: list[RunningNode] = []
        self.chosen = False
        self.too_few: str | None = None
        self.stopped_at: float | None = None
        self.failed = asyncio.Event()

    @property
    def everyone(self) -> tuple[RunningNode, ...]:
        """All members of the launch."""
        return (*self.nodes, *self.left_out)

    def start_clock(self) -> None:
        """Let the attempt begin now."""
        waited = self.now()
        self._began += waited
        for node in self.everyone:
            node.shift_clock(-waited)

    def now(self) -> float:
        """Return the seconds since the attempt began."""
        return self._clock() - self._began

    def lose(
        self, node: RunningNode, error: str, cause: Cause = "infrastructure", when: float | None = None
    ) -> None:
        """Take note that the node cannot take part any more, since now or an earlier time."""
        if node.record.ended is None:
            node.record.ended = self.now() if when is None else when
            node.record.error, node.record.cause = error, cause
        node.settled.set()
        if node in self.left_out:
            return
        # Until its nodes are chosen, a group that can do without this one does.
        if self.chosen or not self._elastic or node is self.nodes[0]:
            self.failed.set()

    def choose(self) -> bool:
        """Make the group of the nodes that are well; return whether they are enough."""
        lost = [node for node in self.nodes if node.record.error is not None]
        well = [node for node in self.nodes if node.record.error is None]
        if self.failed.is_set() or (not self._elastic and lost):
            return False
        if len(well) < self._least or self.nodes[0] in lost:
            reasons = "; ".join(f"{node.record.host}: {node.record.error}" for node in lost)
            self.too_few = f"{len(well)} of at least {self._least} nodes can take part. {reasons}"
            self.failed.set()
            return False
        self.chosen = True
        if lost:
            self.left_out, self.nodes = lost, well
            for node_rank, node in enumerate(well):
                node.record.node_rank = node_rank
            self._logger.warning(
                "group of %d nodes: %s; without %s",
                len(well),
                ", ".join(node.record.host for node in well),
                "; ".join(f"{node.record.host}: {node.record.error}" for node in lost),
            )
        return True
