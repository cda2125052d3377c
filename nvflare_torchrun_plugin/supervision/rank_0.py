"""Rank 0, which owes the task its result: whether that was accepted, and what is held against the rank besides."""

from __future__ import annotations

import asyncio

from nvflare_torchrun_plugin.supervision.roster import Roster
from nvflare_torchrun_plugin.verdict import Cause, Failure

_RESULT_BOUND = 2.0
"""Seconds that rank 0 may be gone, with exit code 0, before the news of an accepted result must be here."""


class Rank0:
    """The rank of one attempt that may talk to the client job.

    Args:
        roster: the nodes of the attempt.
        owes_result: whether the task expects one.

    Attributes:
        accepted: is set once the result of the task has been accepted.
        forgiven: whether something has failed after that, which the task does not mind.
    """

    def __init__(self, roster: Roster, *, owes_result: bool) -> None:
        self._roster = roster
        self._owes_result = owes_result
        self.accepted = asyncio.Event()
        self.forgiven = False
        self._suspected: str | None = None
        self._suspected_at = 0.0
        self._suspected_cause: Cause = "script"

    @property
    def ended(self) -> bool:
        """Whether it is gone, however that came."""
        return any(
            0 in node.record.ranks and node.record.ranks[0].ended is not None for node in self._roster.nodes
        )

    @property
    def left(self) -> bool:
        """Whether it ended well, and by itself."""
        rank_0 = self._roster.nodes[0].record.ranks.get(0)
        return rank_0 is not None and rank_0.ended is not None and not rank_0.stopped and rank_0.code == 0

    @property
    def suspected(self) -> bool:
        """Whether it is blamed for something of which no exit code tells."""
        return self._suspected is not None

    def forgive(self) -> None:
        """Let what has failed after the result was accepted end nothing."""
        self._roster.failed.clear()
        self.forgiven = True

    def resume(self) -> None:
        """The next task begins: it owes another result, and what was forgiven counts."""
        self.accepted.clear()
        if self.forgiven:
            self._roster.failed.set()
        for node in self._roster.nodes:
            rank_0 = node.record.ranks.get(0)
            if rank_0 is not None and rank_0.code == 0:
                self.miss_result()

    def expect_result(self) -> None:
        """It has ended with exit code 0: the news of an accepted result must be here soon."""
        asyncio.get_running_loop().call_later(_RESULT_BOUND, self.miss_result)

    def miss_result(self) -> None:
        """It is gone: suspect it if a result is still owed."""
        if self._owes_result and not self.accepted.is_set():
            self.suspect(
                "rank 0 ended with exit code 0, but no result was accepted; does the script call flare.init(), "
                "flare.receive() and flare.send() on it"
            )

    def suspect(self, what: str, cause: Cause = "script") -> None:
        """Blame it for what no exit code tells, and end the group."""
        self._suspected, self._suspected_cause = what, cause
        self._suspected_at = self._roster.now()
        self._roster.failed.set()

    def failure(self) -> Failure | None:
        """Return the failure that shows in no exit code, with its last lines; None when it is not suspected."""
        if self._suspected is None:
            return None
        node = self._roster.nodes[0]
        rank = node.record.ranks.get(0)
        return Failure(
            node.record.node_rank,
            node.record.host,
            0,
            rank.local_rank if rank is not None else 0,
            self._suspected,
            rank.ended if rank is not None and rank.ended is not None and not rank.stopped else self._suspected_at,
            None,
            tuple(rank.last_lines) if rank is not None else (),
            rank.log if rank is not None else None,
            self._suspected_cause,
        )
