"""Writes what happens to one group and its nodes, for the timeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.supervision.events import GROUP_FILE, EventLog
from nvflare_torchrun_plugin.supervision.roster import Roster, RunningNode
from nvflare_torchrun_plugin.verdict import Verdict


class GroupEvents:
    """The events of one attempt.

    Args:
        launch: the attempt.
        roster: its nodes, which events name by their place among all members, whatever their ranks become.
        warn: gets a sentence, once, when they cannot be written.
    """

    def __init__(self, launch: Launch, roster: Roster, warn: Callable[[str], None]) -> None:
        self._launch = launch
        self._roster = roster
        self._log = EventLog(Path(launch.log_dir, GROUP_FILE), warn)
        self._places = {node.tag: place for place, node in enumerate(roster.nodes)}

    def note(
        self, event: str, node: RunningNode | None = None, when: float | None = None, **fields: object
    ) -> None:
        """Write the event, of a node or of the group; ``when`` is in seconds of the attempt, None: now."""
        ago = max(0.0, self._roster.now() - when) if when is not None else 0.0
        place = {} if node is None else {"place": self._places[node.tag]}
        self._log.write(event, ago, **place, **fields)

    def begin(self) -> None:
        """Write what the group is."""
        self.note(
            "group",
            name=self._launch.name,
            hosts=[node.record.host for node in self._roster.nodes],
            ahead=self._launch.preload is not None,
            serves_job=self._launch.serves_job,
        )

    def chosen(self) -> None:
        """Write which nodes make the group."""
        self.note("chosen", places=[self._places[node.tag] for node in self._roster.nodes])

    def end(self, result: Verdict) -> None:
        """Write how it has ended; no more is written."""
        if (first := result.failure) is not None:
            self.note(
                "failure",
                when=first.seconds,
                node_rank=first.node_rank,
                host=first.host,
                rank=first.rank,
                what=first.what,
            )
        self.note("verdict", outcome=result.outcome, reason=result.reason)
        self._log.close()
