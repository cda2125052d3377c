"""From the nodes' answers to running ranks: who takes part, the job's folder on each, and the order to start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node.staging import StagingError
from nvflare_torchrun_plugin.supervision import agreement, start_order
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.roster import Roster, RunningNode


class BringUp:
    """The way of one attempt to its start.

    Args:
        launch: the attempt.
        roster: its nodes.
        environ: the environment that NVFlare gave the relay.
        client_environ: the environment of the clients that connect to the nodes.
        copies: the copies of the job's folder on the nodes.
        warn: gets a sentence for the log.
        tell: gets what an agent that takes a copy prints besides.
        chosen: is called once the roster tells which nodes make the group.
    """

    def __init__(
        self,
        launch: Launch,
        roster: Roster,
        environ: Mapping[str, str],
        client_environ: Mapping[str, str],
        copies: Copies,
        *,
        warn: Callable[[str], None],
        tell: Callable[[RunningNode, str], None],
        chosen: Callable[[], None],
    ) -> None:
        self._launch = launch
        self._roster = roster
        self._environ = environ
        self._client_environ = client_environ
        self._copies = copies
        self._warn = warn
        self._tell = tell
        self._chosen = chosen

    async def run(self) -> None:
        """Start the ranks once every node has answered that it can take part, or enough of them have."""
        for node in self._roster.nodes:
            await node.settled.wait()
        self._check_agreement()
        if not self._roster.choose():
            return
        self._chosen()
        directories = await asyncio.gather(*(self._stage(node) for node in self._roster.nodes))
        if self._roster.failed.is_set():
            return
        for node, directory in zip(self._roster.nodes, directories, strict=True):
            order = start_order.build(
                self._launch,
                self._environ,
                start_order.contract(self._launch, node.record.node_rank, len(self._roster.nodes)),
                node.member.nproc_per_node,
                node.hello,
                tag=node.tag,
                copy=directory,
                elapsed=self._roster.now(),
            )
            node.post(order)

    def _check_agreement(self) -> None:
        answers = [(node, node.hello, node.ready) for node in self._roster.nodes if node.hello and node.ready]
        complaints, warnings = agreement.check(
            [(node.record.host, hello, ready) for node, hello, ready in answers],
            [node.member.nproc_per_node for node, _, _ in answers],
            spans_hosts=self._launch.spans_hosts,
        )
        for warning in warnings:
            self._warn(warning)
        for number, complaint in complaints.items():
            self._roster.lose(answers[number][0], complaint, "configuration")

    async def _stage(self, node: RunningNode) -> str | None:
        """Return where the copy of the job's folder is on the node; None when it needs none."""
        launch = self._launch
        if node.record.node_rank == 0 or launch.stage == "never":
            return None
        if launch.stage == "auto" and node.ready is not None and node.ready.shares:
            return None
        try:
            return await self._copies.place(
                node.record.host,
                node.member.agent_argv,
                self._client_environ,
                launch,
                lambda text: self._tell(node, text),
            )
        except (StagingError, asyncio.TimeoutError) as e:
            self._roster.lose(node, str(e) or f"the job's folder did not arrive within {launch.join_timeout:g} s")
            return None
