"""Takes in what the agents of a group say: into the nodes' records, the logs and the timeline."""

from __future__ import annotations

import asyncio

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.supervision.group_events import GroupEvents
from nvflare_torchrun_plugin.supervision.progress import Progress
from nvflare_torchrun_plugin.supervision.rank_0 import Rank0
from nvflare_torchrun_plugin.supervision.rank_logs import RankLogs
from nvflare_torchrun_plugin.supervision.roster import Roster, RunningNode
from nvflare_torchrun_plugin.verdict import RankRecord

_EXIT_BOUND = 2.0
"""Seconds that a rank may take to end after its uncaught exception before the group is ended all the same."""


class Intake:
    """The intake of one attempt.

    Args:
        launch: the attempt.
        roster: its nodes.
        rank_0: its rank 0, which owes a result once it has ended.
        progress: hears of signs of life.
        events: gets what happens, for the timeline.
        logs: get the lines.
    """

    def __init__(
        self,
        launch: Launch,
        roster: Roster,
        rank_0: Rank0,
        progress: Progress,
        events: GroupEvents,
        logs: RankLogs,
    ) -> None:
        self._launch = launch
        self._roster = roster
        self._rank_0 = rank_0
        self._progress = progress
        self._events = events
        self._logs = logs

    def log(self, node: RunningNode, rank: int | None, text: str) -> None:
        """Take a line of a rank, or of the node's torchrun, agent or client when ``rank`` is None."""
        if rank is None:
            node.record.last_lines.append(text)
        elif rank in node.record.ranks:
            node.record.ranks[rank].last_lines.append(text)
        # What torchrun says of a SIGTERM that it got from us would bury the verdict.
        told = rank is not None or self._roster.stopped_at is None
        self._logs.write(node.record.node_rank, rank, text, to_log=told)

    def read(self, node: RunningNode, frame: wire.Frame) -> None:
        """Take a frame of the node's agent."""
        record = node.record
        if isinstance(frame, wire.Hello):
            node.hello = frame
            node.time_of(frame.at, self._roster.now())
            self._events.note("agent", node, host=frame.host)
        elif isinstance(frame, wire.Ready):
            node.ready = frame
            self._events.note("ready", node)
            node.settled.set()
        elif isinstance(frame, wire.Line):
            if frame.rank is not None:
                self._progress.heard()
            self.log(node, frame.rank, frame.text)
        elif isinstance(frame, wire.RankUp):
            log = self._logs.path(record.node_rank, frame.rank)
            self._progress.heard()
            record.ranks[frame.rank] = RankRecord(frame.rank, frame.local_rank, frame.pid, log=log)
            self._events.note("rank", node, rank=frame.rank)
        elif isinstance(frame, wire.Warm):
            self._progress.warm(frame.rank, frame.of)
            self._events.note("warm", node, rank=frame.rank)
            for sentence in frame.failed:
                self.log(node, frame.rank, f"(not imported ahead: {sentence})")
        elif isinstance(frame, wire.Moment) and frame.what in wire.MOMENTS:
            self._events.note(frame.what, node, node.time_of(frame.at, self._roster.now()))
        elif isinstance(frame, wire.End):
            node.said_end = True
            when = node.time_of(frame.at, self._roster.now())
            self._events.note("end", node, code=frame.code)
            # It may say so only after its ranks have ended, and their peers with them, and we have ended the rest.
            if frame.stopped and (self._roster.stopped_at is None or when < self._roster.stopped_at):
                silence = f"{self._launch.node_timeout:g} s (node_timeout)"
                error = f"its agent got a signal to end there, or heard nothing for {silence}"
                self._roster.lose(node, error, when=when)
            if record.ended is None:
                record.ended, record.stopped = when, frame.stopped
            record.error = record.error or frame.error
            record.code, record.leftovers = frame.code, frame.leftovers
            if (frame.error or frame.code) and node not in self._roster.left_out:
                self._roster.failed.set()
        elif isinstance(frame, wire.Halt) and frame.rank in record.ranks and not self._rank_0.accepted.is_set():
            # Once the result is there nobody waits for the rank, and it may go on before another task comes.
            since = node.time_of(frame.at, self._roster.now())
            words = f"stopped (SIGSTOP) for {self._launch.node_timeout:g} s (node_timeout)"
            record.ranks[frame.rank].halted = since, words
            self._roster.failed.set()
        elif isinstance(frame, (wire.RankError, wire.RankEnd)) and frame.rank in record.ranks:
            self._on_rank(node, record.ranks[frame.rank], frame)

    def _on_rank(self, node: RunningNode, rank: RankRecord, frame: wire.RankError | wire.RankEnd) -> None:
        when = node.time_of(frame.at, self._roster.now())
        if rank.ended is None:
            rank.ended, rank.stopped = when, frame.stopped
        if isinstance(frame, wire.RankError):
            rank.traceback = frame.traceback
            asyncio.get_running_loop().call_later(_EXIT_BOUND, self._roster.failed.set)
            return
        self._events.note("rank_end", node, when, rank=rank.rank, code=frame.code)
        rank.code, rank.oom_kills = frame.code, frame.oom_kills
        if frame.code or (rank.rank == 0 and self._rank_0.forgiven):
            self._roster.failed.set()
        if frame.code == 0 and rank.rank == 0:
            self._rank_0.expect_result()
