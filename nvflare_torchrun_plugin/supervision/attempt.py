"""One attempt at a task: the group that its relay starts, or that was started ahead of it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Callable

from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.launching.node_locks import BusyError
from nvflare_torchrun_plugin.launching.planning import PlanError
from nvflare_torchrun_plugin.launching.program import ProgramError
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.supervision.group_ahead import Ahead
from nvflare_torchrun_plugin.supervision.relay_connection import RelayConnection
from nvflare_torchrun_plugin.verdict import Verdict

_CALL_BOUND = 10.0
"""Seconds for the supervisor's thread to take an order; it never does more than a moment's work at a time."""


class Attempt:
    """One launch, from the moment it is armed: NVFlare's backend starts the relay, the relay starts the group.

    Attributes:
        began: when its nodes may have begun to be looked for, in seconds of the monotonic clock.
        trains: is done once the ranks are at their task; never if they do not come so far.
        decided: the verdict, None when no group was started; a next attempt may begin.
        ended: is done once the hosts have been seen to on which the end of the group was not confirmed by then.

    Args:
        launch: what the relay starts; with ``ahead`` that one's.
        loop: the supervisor's.
        ahead: a group that is there already, None for none.
        cold: plans a launch in place of that one, should its group be unfit when the relay comes; may block.
    """

    def __init__(
        self,
        launch: Launch,
        loop: asyncio.AbstractEventLoop,
        ahead: Ahead | None = None,
        cold: Callable[[], Launch] | None = None,
    ) -> None:
        self.launch = launch
        self.trains: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.decided: concurrent.futures.Future[Verdict | None] = concurrent.futures.Future()
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.began = ahead.began if ahead is not None else time.monotonic()
        self._loop = loop
        self._ahead = ahead
        self._cold = cold
        self._group: Group | None = None
        self._running: asyncio.Task[Verdict] | None = None

    def accept(self) -> None:
        """Rank 0's result has been accepted: failures are warnings from now on."""
        self._call(lambda group: group.accept())

    def resume(self) -> None:
        """The next task begins on the same group (launch once)."""
        self._call(lambda group: group.resume())

    def stop(self, reason: str) -> None:
        """End the group, or never start it."""

        def withdraw() -> None:
            if self._group is not None:
                self._group.stop(reason)
            elif not self.decided.done():
                self.decided.set_result(None)
                self.ended.set_result(None)
                if self._ahead is not None:
                    self._ahead.stop(reason)

        self._loop.call_soon_threadsafe(withdraw)

    def wait(self, timeout: float) -> Verdict | None:
        """Return the verdict once it is decided, None when the group was never started.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds.
        """
        try:
            return self.decided.result(timeout)
        except concurrent.futures.TimeoutError as e:
            raise TimeoutError(f"the group {self.launch.name} has not ended within {timeout:g} s") from e

    @property
    def ends(self) -> bool:
        """Whether its group has ended, or is about to."""
        return self.decided.done() or (self._group is not None and not self._group.well)

    @property
    def accepted(self) -> bool:
        """Whether the result of its latest task has been accepted."""
        return self._group is not None and self._group.accepted

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Host and reason of each node that the group does without, as far as it is known yet."""
        return self._group.left_out if self._group is not None else ()

    @property
    def unswept(self) -> frozenset[str]:
        """Hosts on which what the group has left is still seen to, once it is decided."""
        return self._group.unswept if self._group is not None else frozenset()

    async def run(
        self,
        environ: dict[str, str],
        logger: logging.Logger,
        copies: Copies,
        connection: RelayConnection,
        given_up: Callable[[], GivenUp | None],
    ) -> None:
        """Run the group for the relay that came; the supervisor's business."""
        try:
            await self._run(environ, logger, copies, connection, given_up)
            if self._running is not None and (verdict := self.decided.result()) is not None:
                for sentence in (await self._running).leftovers[len(verdict.leftovers) :]:
                    logger.error("the group %s: LEFT OVER: %s", self.launch.name, sentence)
        finally:
            if not self.ended.done():
                self.ended.set_result(None)

    async def _run(
        self,
        environ: dict[str, str],
        logger: logging.Logger,
        copies: Copies,
        connection: RelayConnection,
        given_up: Callable[[], GivenUp | None],
    ) -> None:
        """Run the group until it is decided what the relay's exit code is."""
        verdict = None

        def end() -> None:
            why = given_up()
            if why is None or self._group is None or self._group.accepted:
                self.stop("NVFlare has ended its relay")
            else:
                self._group.give_up(why)

        connection.on_lost, connection.on_ended = self.stop, end
        telling: asyncio.Task[None] | None = None
        try:
            started = await self._start(environ, logger, copies)
            if started is None:
                return
            self._group, self._running = started
            connection.on_signal = self._group.signal
            telling = asyncio.create_task(self._tell_training(self._group))
            # Not to be cancelled with who waits for it.
            verdict = await asyncio.shield(asyncio.wrap_future(self._group.decided))
            if verdict is None:
                verdict = await self._running  # which raises why
            if verdict.failure is not None and self._group.accepted:
                logger.warning("after the task's result was accepted: %s", verdict.text())
        except (OSError, PlanError, ProgramError, BusyError) as e:
            logger.error("the group %s cannot be run: %s", self.launch.name, e)
        finally:
            if telling is not None:
                telling.cancel()
            if not self.decided.done():
                self.decided.set_result(verdict)
            failed = verdict is None or verdict.outcome == "failed"
            connection.dismiss(1 if failed and not (self._group and self._group.accepted) else 0)

    async def _tell_training(self, group: Group) -> None:
        await group.trains.wait()
        self.trains.set_result(None)

    async def _start(
        self, environ: dict[str, str], logger: logging.Logger, copies: Copies
    ) -> tuple[Group, asyncio.Task[Verdict]] | None:
        """Have a group for the task; return it and what waits for its end, None when none is wanted any more."""
        if self._ahead is not None:
            silent = await self._ahead.ask_nodes()
            if self.decided.done():
                return None
            taken = silent or self._ahead.take(environ)
            if not isinstance(taken, str):
                return taken
            logger.info("the task starts cold: %s", taken)
            self._ahead.stop("no task can have it")
            if self._cold is not None and not self.decided.done():
                self.launch = await asyncio.to_thread(self._cold)
            if self.decided.done():
                return None
        group = Group(self.launch, environ, logger, copies)
        return group, asyncio.create_task(group.run())

    def _call(self, what: Callable[[Group], None]) -> None:
        async def call() -> None:
            if self._group is not None:
                what(self._group)

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(_CALL_BOUND)
