"""A group that is started ahead of its task: it waits, and the task can have it (asyncio)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import Mapping

from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node import bootstrap
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Verdict


class Ahead:
    """A group that is started ahead of its task, and waits for it.

    Attributes:
        launch: what was started.
        began: when, in seconds of the monotonic clock.
        decided: the verdict as in :class:`Group`, with a task or without.
        ended: the same, once hosts of which nothing was heard have been seen to.
        taken: whether a task has it.
        silent: host and reason of each node that gave no sign of life when the group was to be had.
    """

    def __init__(self, launch: Launch, environ: Mapping[str, str], logger: logging.Logger, copies: Copies) -> None:
        self.launch = launch
        self.began = time.monotonic()
        self.ended: concurrent.futures.Future[Verdict | None] = concurrent.futures.Future()
        self._environ = dict(environ)
        self._logger = logger
        self.taken = False
        self.silent: list[tuple[str, str]] = []
        self._loop = asyncio.get_running_loop()
        self._group = Group(launch, environ, logger, copies)
        self.decided = self._group.decided
        self._running = self._loop.create_task(self._run())
        # Of one that no task has, nobody else asks how it ended.
        self._running.add_done_callback(lambda task: task.cancelled() or task.exception())

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Host and reason of each node that the group does without, as far as it is known yet."""
        return self._group.left_out

    @property
    def unswept(self) -> frozenset[str]:
        """Hosts on which what the group has left is still seen to, once it is decided."""
        return self._group.unswept

    def unfit(self) -> str | None:
        """Return why no task can have the group, None when one can."""
        if self.decided.done():
            verdict = self.decided.result()
            return f"the group started ahead has ended: {_first_line(verdict)}"
        return None if self._group.well else "the group started ahead has failed, and ends"

    async def ask_nodes(self) -> str | None:
        """Ask the group's nodes whether they are still there; return why no task can have it, None if one can."""
        if (unfit := self.unfit()) is not None:
            return unfit
        self.silent += await self._group.ask_nodes()
        if not self.silent:
            return None
        nodes = "; ".join(f"{host}: {why}" for host, why in self.silent)
        return f"nodes of the group started ahead are silent: {nodes}"

    def take(self, environ: Mapping[str, str]) -> tuple[Group, asyncio.Task[Verdict]] | str:
        """Let the group have its task; return it and what waits for its end, or why it cannot be had.

        Args:
            environ: of the task's relay. What differs from that of the group's start may have been read by what
                the ranks have imported.
        """
        different = sorted(
            name
            for name in set(environ) | set(self._environ)
            if environ.get(name) != self._environ.get(name) and name != bootstrap.FILE_VARIABLE
        )
        unfit = self.unfit()
        if unfit is None and different:
            unfit = f"the task's environment differs from that of the group started ahead: {', '.join(different)}"
        if unfit is not None:
            return unfit
        self.taken = True
        self._logger.info(
            "task group %s: warm, %s, started %.0f s ago",
            self.launch.name,
            "all ranks were waiting" if self._group.waits else "not all ranks were waiting yet",
            time.monotonic() - self.began,
        )
        self._group.go(environ)
        return self._group, self._running

    def stop(self, reason: str) -> None:
        """End the group; any thread may call it."""
        self._loop.call_soon_threadsafe(self._group.stop, reason)

    async def _run(self) -> Verdict:
        verdict = None
        try:
            verdict = await self._group.run()
            if not self.taken and verdict.outcome == "failed":
                self._logger.warning("a group started ahead has failed, no task does: %s", _first_line(verdict))
            return verdict
        finally:
            self.ended.set_result(verdict)


def _first_line(verdict: Verdict | None) -> str:
    return verdict.text().partition("\n")[0] if verdict is not None else "it could not be run"
