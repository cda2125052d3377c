"""How far a group has come: told to the log, and bounded, so that one that joins or trains for ever shows."""

from __future__ import annotations

import asyncio
import logging

from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.supervision.rank_0 import Rank0
from nvflare_torchrun_plugin.supervision.roster import Roster, RunningNode

_LOOK = 0.5
"""Seconds between two looks at the progress of the group."""
_JOIN_MARGIN = 45.0
"""Seconds beyond the join timeout in which torchrun must have imported torch, and given up or started its ranks.
torch keeps the bound where node 0 listens; who waits for one that does not may take three times as long."""
_TELL_AGAIN = 300.0
"""Seconds after which the log is told once more that the group is still in the same phase."""


class Progress:
    """The progress of one attempt.

    Args:
        launch: the attempt.
        roster: its nodes.
        rank_0: its rank 0, which is suspected when all ranks hang.
        logger: gets each phase at INFO.

    Attributes:
        started: whether every node has its order to start.
        hangs: whether it has hung.
        trains: is set once every node has started its ranks and they do not wait for their task any more.
    """

    def __init__(self, launch: Launch, roster: Roster, rank_0: Rank0, logger: logging.Logger) -> None:
        self._launch = launch
        self._roster = roster
        self._rank_0 = rank_0
        self._logger = logger
        self.started = False
        self.hangs = False
        self.trains = asyncio.Event()
        self._last_sign = 0.0
        self._awaits_first = launch.serves_job
        self._holds = launch.preload is not None
        self._warm: dict[int, int] = {}

    @property
    def phase(self) -> str:
        """How far it has come."""
        if self._rank_0.accepted.is_set():
            return "finishing"
        if not self._roster.chosen:
            return "starting"
        if not all(node.record.ranks for node in self._roster.nodes):
            return "joining"
        if self._launch.preload is not None and not self._all_warm():
            return "importing"
        return "waiting" if self._holds else "training"

    @property
    def imports(self) -> bool:
        """Whether rank 0 has still to import what its task needs, and cannot have begun it."""
        return self._launch.preload is not None and 0 not in self._warm

    def heard(self) -> None:
        """A rank has given a sign of life."""
        self._last_sign = self._roster.now()

    def warm(self, rank: int, of: int) -> None:
        """The rank has imported what its task needs; ``of`` ranks are on its node."""
        self._warm[rank] = of

    def go(self, *, waited: bool) -> None:
        """The task has come; ``waited``: all ranks were waiting for it."""
        if waited:
            # All that is told and bounded in seconds is about the task.
            self._roster.start_clock()
            self._last_sign = 0.0
            self.trains.set()
        self._holds = False

    def resume(self) -> None:
        """A task begins on ranks that were there before."""
        self._awaits_first, self._last_sign = False, self._roster.now()

    async def watch(self) -> None:
        """Tell in which phase the group is, and find out when it hangs."""
        told, told_at = "", -_TELL_AGAIN
        limit = self._launch.hang_timeout
        while True:
            phase, now = self.phase, self._roster.now()
            if phase in ("training", "finishing"):
                self.trains.set()
            if phase != told or not told_at <= now < told_at + _TELL_AGAIN:
                # One that waits has no news.
                if phase != told or phase != "waiting":
                    self._logger.info("task group %s: %s, %.0f s after its start", self._launch.name, phase, now)
                told, told_at = phase, now
            silent = now - self._last_sign
            runs_on = self._roster.stopped_at is None
            if limit is not None and silent > limit and phase == "training" and not self._awaits_first and runs_on:
                self.hangs = True
                self._rank_0.suspect(f"no rank has printed anything for {silent:.0f} s (hang_timeout)")
            if phase == "joining" and now > self._launch.join_timeout + _JOIN_MARGIN and runs_on:
                self._miss_ranks()
            await asyncio.sleep(_LOOK)

    def _miss_ranks(self) -> None:
        absent = next(node for node in self._roster.nodes if not node.record.ranks)
        bound = f"within join_timeout, {self._launch.join_timeout:g} s"
        self._roster.lose(absent, f"its torchrun has started no rank {bound}")

    def _all_warm(self) -> bool:
        return self.started and all(self._warm_on(node) for node in self._roster.nodes)

    def _warm_on(self, node: RunningNode) -> bool:
        ranks = set(node.record.ranks)
        return ranks <= set(self._warm) and len(ranks) >= max(self._warm[rank] for rank in ranks)
