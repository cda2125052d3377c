"""One group: start its agents, watch them, stop them, reach one verdict (asyncio; runs in the supervisor)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare_torchrun_plugin import node_agent, verdict, wire
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node import bootstrap
from nvflare_torchrun_plugin.supervision import start_order
from nvflare_torchrun_plugin.supervision.bring_up import BringUp
from nvflare_torchrun_plugin.supervision.channel import CLOSING, KILL_BOUND, Channel, sweep
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervision.group_events import GroupEvents
from nvflare_torchrun_plugin.supervision.intake import Intake
from nvflare_torchrun_plugin.supervision.progress import Progress
from nvflare_torchrun_plugin.supervision.rank_0 import Rank0
from nvflare_torchrun_plugin.supervision.rank_logs import RankLogs, Show
from nvflare_torchrun_plugin.supervision.roster import Roster, RunningNode
from nvflare_torchrun_plugin.verdict import Verdict

_SETTLE = 0.3
"""Seconds between a failure and the stop: for the news that rank 0's result was accepted just before, and
for an earlier failure elsewhere that is still on its way."""
_ECHOES = 1.0
"""Seconds more when torchruns have waited for a node in vain: until those that have come have said so too."""
_ANSWER = 2.0
"""Seconds for a node to answer when a task is about to have the group that was started ahead."""
_STOP_MARGIN = node_agent.KILL_BOUND + node_agent.DRAIN_BOUND + 2.0
"""Seconds beyond the grace in which an agent must have ended everything and said so."""
_SWEEP_BOUND = node_agent.SWEEP_BOUND
END_BOUND = _STOP_MARGIN + KILL_BOUND + CLOSING + _SWEEP_BOUND + KILL_BOUND + CLOSING
"""Seconds beyond the grace in which a group that was told to end is gone, agents that died included."""


class Group:
    """One attempt. All methods belong to the supervisor's event loop.

    Args:
        launch: what to start.
        environ: of the relay; without NVFlare this process's own.
        logger: gets the ranks' lines and the group's phases at INFO, and warnings.
        copies: those of the job's folder on the nodes.
        show: gets the ranks' lines in place of the logger.

    Attributes:
        trains: is set once every node has started its ranks and they do not wait for their task any more.
        decided: the verdict, once nothing of the group is left on any node whose agent has said so; on the others,
            :attr:`unswept`, there may be something yet. None when the group could not be run.
    """

    def __init__(
        self,
        launch: Launch,
        environ: Mapping[str, str],
        logger: logging.Logger,
        copies: Copies,
        show: Show | None = None,
    ) -> None:
        self._launch = launch
        # The clients that connect to the nodes may hand on what they find (srun does); the token stays here.
        self._client_environ = {name: value for name, value in environ.items() if name != bootstrap.FILE_VARIABLE}
        self._logger = logger
        self._logs = RankLogs(launch.log_dir, logger, launch.log_ranks, show)
        self._roster = Roster(launch, logger)
        self._rank_0 = Rank0(self._roster, owes_result=launch.owes_result)
        self._progress = Progress(launch, self._roster, self._rank_0, logger)
        self._events = GroupEvents(launch, self._roster, lambda text: logger.warning("%s", text))
        self._intake = Intake(launch, self._roster, self._rank_0, self._progress, self._events, self._logs)
        self._bringing_up = BringUp(
            launch,
            self._roster,
            dict(environ),
            self._client_environ,
            copies,
            warn=lambda text: logger.warning("%s", text),
            tell=lambda node, text: self._intake.log(node, None, text),
            chosen=self._on_chosen,
        )
        self.trains = self._progress.trains
        self.decided: concurrent.futures.Future[Verdict | None] = concurrent.futures.Future()
        self._unswept: list[RunningNode] = []
        self._asked_to_stop = asyncio.Event()
        self._reason: str | None = None
        self._go_environ: Mapping[str, str] | None = None

    def go(self, environ: Mapping[str, str]) -> None:
        """The task for which the group was started ahead has come, with the environment of its relay.

        Ranks that still import, or are still to start, go on once they have.
        """
        self._progress.go(waited=self.waits)
        self._events.note("go")
        self._go_environ = environ
        if self._progress.started:
            self._post_go()

    async def ask_nodes(self) -> list[tuple[str, str]]:
        """Ask every agent that has greeted whether it is there; return host and reason for each that is silent.

        A node that falls silent is missed after ``node_timeout`` only, and a task cannot wait as long.
        """
        nodes = [node for node in self._roster.nodes if node.channel is not None]
        found = await asyncio.gather(
            *(node.channel.answers(_ANSWER) for node in nodes if node.channel is not None)
        )
        why = f"no answer from its agent within {_ANSWER:g} s"
        return [(node.record.host, why) for node, answers in zip(nodes, found, strict=True) if not answers]

    @property
    def waits(self) -> bool:
        """Whether every rank has been started ahead of its task and waits for it, and all is well."""
        return self.well and self.phase == "waiting"

    @property
    def well(self) -> bool:
        """Whether nothing has gone wrong so far, and nobody has asked it to end."""
        return not (self._roster.failed.is_set() or self._asked_to_stop.is_set())

    def accept(self) -> None:
        """Rank 0's result has been accepted: from now on failures are warnings and stop nothing."""
        self._events.note("accepted")
        self._rank_0.accepted.set()

    def resume(self) -> None:
        """A task begins on a group that was there before; a failure since the last result counts now."""
        self._progress.resume()
        self._rank_0.resume()

    @property
    def accepted(self) -> bool:
        """Whether the result of the task has been accepted."""
        return self._rank_0.accepted.is_set()

    @property
    def phase(self) -> str:
        """How far it has come."""
        return self._progress.phase

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to all ranks."""
        for node in self._roster.nodes:
            node.post(wire.Signal(number))

    @property
    def ranks(self) -> int:
        """Number of ranks that have been started."""
        return sum(len(node.record.ranks) for node in self._roster.nodes)

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Host and reason of each node that the group does without."""
        return tuple((node.record.host, node.record.error or "") for node in self._roster.left_out)

    @property
    def unswept(self) -> frozenset[str]:
        """Hosts whose agent has said nothing of its end, while another one is sent there to see to it."""
        return frozenset(node.record.host for node in tuple(self._unswept))

    def stop(self, reason: str) -> None:
        """End the group; the first reason counts."""
        if self._reason is None:
            self._reason = reason
        self._asked_to_stop.set()

    def give_up(self, why: GivenUp) -> None:
        """NVFlare has given up on rank 0, and ended its side of the task: end the group."""
        if not self.well:
            self.stop("NVFlare has ended its relay")
            return
        absent = [node for node in self._roster.nodes if not node.record.ranks]
        if not absent:
            self._rank_0.suspect(f"NVFlare gave up on it: {why.what}", why.cause)
        else:
            # Before there are ranks, all wait for the one that has not answered yet.
            first = min(absent, key=lambda node: node.settled.is_set())
            self._roster.lose(first, f"it has started no rank, and NVFlare gave up on rank 0: {why.what}")
            # Also of a group that could do without this node.
            self._roster.failed.set()

    async def run(self) -> Verdict:
        """Run the group to its end and return the verdict; nothing of it is left then, or the verdict says so."""
        try:
            result = await self._run()
            self._unswept = [
                node for node in self._roster.everyone if not node.said_end and node.hello is not None
            ]
            self.decided.set_result(result)
            unconfirmed = await self._sweep()
        finally:
            if not self.decided.done():
                self.decided.set_result(None)
        if unconfirmed:
            result = dataclasses.replace(result, leftovers=result.leftovers + unconfirmed)
            self._write(result)
        return result

    async def _run(self) -> Verdict:
        """Run the group to its verdict."""
        marker = Path(self._launch.cwd, self._launch.marker)
        with contextlib.suppress(OSError):
            # Without it no node sees the same directory, and each gets a copy of what it needs.
            marker.touch()
        self._events.begin()
        serving = [asyncio.create_task(self._serve(node)) for node in self._roster.nodes]
        bringing_up = asyncio.create_task(self._bringing_up.run())
        bringing_up.add_done_callback(self._on_brought_up)
        watching = asyncio.create_task(self._progress.watch())
        try:
            await self._watch(serving)
        finally:
            for task in (bringing_up, watching, *serving):
                task.cancel()
            with contextlib.suppress(OSError):
                marker.unlink()
            self._logs.close()
        if self._rank_0.left:
            # NVFlare may have noticed first, and asked us to end before we came to it.
            self._rank_0.miss_result()
        result = verdict.reach(
            [node.record for node in self._roster.nodes],
            stopped_at=self._roster.stopped_at,
            reason=self._reason if not self._rank_0.suspected else None,
            suspect=self._rank_0.failure(),
            seconds=self._roster.now(),
            too_few=self._roster.too_few,
            left_out=self.left_out,
            imports=self._progress.imports,
        )
        self._events.end(result)
        self._write(result)
        return result

    def _write(self, result: Verdict) -> None:
        path = Path(self._launch.log_dir, "verdict.json")
        try:
            # Who reads it while a longer one is written finds one of the two.
            path.with_suffix(".new").write_text(json.dumps(result.as_dict(), indent=2) + "\n", encoding="utf-8")
            path.with_suffix(".new").replace(path)
        except OSError as e:  # a full disk, for one, must not take the verdict away
            self._logger.warning("cannot write %s: %s", path, e)

    # -- watching -------------------------------------------------------------------------------------------

    async def _watch(self, serving: list[asyncio.Task[None]]) -> None:
        all_ended = asyncio.gather(*serving, return_exceptions=True)
        while not all_ended.done():
            news = [asyncio.create_task(event.wait()) for event in (self._asked_to_stop, self._roster.failed)]
            pending: set[asyncio.Future[Any]] = {all_ended, *news}
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for waiter in news:
                waiter.cancel()
            if all_ended.done():
                break
            if self._asked_to_stop.is_set() or await self._failure_counts():
                await self._stop_all(all_ended)
        await all_ended

    async def _failure_counts(self) -> bool:
        """Return whether the failure must end the group.

        Once rank 0's result has been accepted it must not, until rank 0 has ended: it may still be serving
        the result. Then it must, or torchrun waits 300 s in its exit barrier for the node that failed.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._rank_0.accepted.wait(), _SETTLE)
        if not self._rank_0.accepted.is_set() or self._rank_0.ended:
            if any(verdict.waited_in_vain(node.record) for node in self._roster.nodes):
                await asyncio.sleep(_ECHOES)
            return True
        self._logger.warning("a rank failed after the task's result was accepted; the task is not affected")
        self._rank_0.forgive()
        return False

    def _post_go(self) -> None:
        if self._roster.failed.is_set():
            return  # there may be nothing that waits
        try:
            for node in self._roster.nodes:
                node.post(start_order.go(self._go_environ or {}, node.record.node_rank))
        except (OSError, ValueError) as e:
            self._cannot_start(e)

    async def _stop_all(self, all_ended: asyncio.Future[list[BaseException | None]]) -> None:
        if self._roster.stopped_at is None:
            self._roster.stopped_at = self._roster.now()
            self._events.note("stop", reason=self._reason)
        for node in self._roster.everyone:
            node.post(wire.Stop(self._launch.grace, self._progress.hangs))
            if node.hello is None and node.channel is not None:
                # It has started nothing, and its client may try for hours.
                node.channel.kill()
        await asyncio.wait([all_ended], timeout=self._launch.grace + _STOP_MARGIN)
        for node in self._roster.everyone:
            if not node.said_end and node.channel is not None:
                node.channel.kill()

    async def _sweep(self) -> tuple[str, ...]:
        """Clean up after agents that died; return a sentence for each node that nobody could confirm."""
        sentences = await asyncio.gather(*(self._sweep_node(node) for node in tuple(self._unswept)))
        return tuple(sentence for sentence in sentences if sentence)

    async def _sweep_node(self, node: RunningNode) -> str | None:
        wrong = await sweep(node.member.agent_argv, self._client_environ, node.tag, _SWEEP_BOUND)
        self._unswept.remove(node)
        if not wrong:
            return None
        where = f"node {node.record.node_rank} ({node.record.host})"
        return f"{where}: it is not confirmed that all processes there are gone: {wrong}"

    # -- bringing up ----------------------------------------------------------------------------------------

    def _on_chosen(self) -> None:
        self._events.chosen()
        for node in self._roster.nodes:
            node.record.log = self._logs.path(node.record.node_rank, None)
        for node in self._roster.left_out:
            # The group's own end waits for the agent's.
            node.post(wire.Stop(self._launch.grace))
            if node.channel is not None:
                # A client that has brought no greeting may try for hours.
                patience = self._launch.grace + _STOP_MARGIN if node.hello is not None else 0.0
                asyncio.get_running_loop().call_later(patience, node.channel.kill)

    def _on_brought_up(self, bringing_up: asyncio.Task[None]) -> None:
        if bringing_up.cancelled():
            return
        if (error := bringing_up.exception()) is not None:
            self._cannot_start(error)
            return
        self._progress.started = True
        self._events.note("started")
        if self._go_environ is not None:
            self._post_go()

    def _cannot_start(self, error: BaseException) -> None:
        self._roster.lose(self._roster.nodes[0], f"the group cannot be started: {type(error).__name__}: {error}")

    # -- one node -------------------------------------------------------------------------------------------

    async def _serve(self, node: RunningNode) -> None:
        try:
            wrong = await self._serve_agent(node)
        except Exception as e:  # noqa: BLE001 - whatever it is, the other nodes must not wait for this one
            wrong = f"its agent cannot be served: {type(e).__name__}: {e}"
        if wrong:
            self._roster.lose(node, wrong)
        node.settled.set()

    async def _serve_agent(self, node: RunningNode) -> str:
        launch = self._launch
        node.record.log = self._logs.path(node.record.node_rank, None)
        node.channel = Channel(
            node.member.agent_argv,
            self._client_environ,
            launch.node_timeout,
            lambda frame: self._intake.read(node, frame),
            lambda text: self._intake.log(node, None, text),
        )
        patience = asyncio.get_running_loop().call_later(launch.join_timeout, self._give_up, node)
        node.post(
            wire.Prepare(
                master_addr=launch.contract.master_addr,
                app_dir=launch.cwd,
                marker=launch.marker,
                timeout=launch.join_timeout,
                node_timeout=launch.node_timeout,
            )
        )
        try:
            return await node.channel.run()
        finally:
            patience.cancel()

    def _give_up(self, node: RunningNode) -> None:
        if node.settled.is_set():
            return
        bound = f"within join_timeout, {self._launch.join_timeout:g} s"
        if node.hello is None:
            self._roster.lose(node, f"no word from the agent {bound}")
        else:
            # Its own answer would come at the same moment, or later: a name server may take its time.
            self._roster.lose(node, f"cannot resolve master address {self._launch.contract.master_addr!r} {bound}")
