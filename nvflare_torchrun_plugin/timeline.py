"""Where the time of a run went, per task and node: what ``supervision/events.py`` has written, as phases of time.

A task that was tried again has one entry per attempt. Nothing here needs the run to be over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvflare_torchrun_plugin.supervision.events import GROUP_FILE, TASKS_FILE

PHASES = ("waiting", "launching", "joining", "importing", "receiving", "training", "sending", "cleaning up")
"""In the order in which a node goes through them.

waiting: for nodes that are busy, for NVFlare's client job, or for the task once all has been imported ahead;
launching: until every node has its agent and the job's files; joining: until torchrun has started the node's
ranks; importing: the script, until it asks for the model; receiving, training, sending: between its calls of the
Client API (all of it is training where a script uses NVFlare's own, which tells nothing); cleaning up: until all
is gone.
"""

_BEGINS = {"receive": "receiving", "received": "training", "send": "sending"}
_Event = Mapping[str, Any]
_LATEST = 2.0**33
"""In the year 2242. What is not before it is no time."""


@dataclass(frozen=True)
class Segment:
    """A stretch of one node's time; ``ahead``: before the task had come; ``failed``: it ended in the failure."""

    phase: str
    begin: float
    end: float
    ahead: bool = False
    failed: bool = False

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


@dataclass(frozen=True)
class NodeTime:
    """One node's part in an attempt; ``node_rank`` is None for one that the group did without."""

    node_rank: int | None
    host: str
    ranks: int
    segments: tuple[Segment, ...]
    failure: str | None

    def seconds(self, phase: str) -> float:
        """Return the seconds that the task has spent in the phase on this node; what came ahead cost it none."""
        return sum(part.seconds for part in self.segments if part.phase == phase and not part.ahead)


@dataclass(frozen=True)
class TaskTime:
    """One attempt of a task.

    Attributes:
        site, task, round, number: whose it is; ``number`` counts its attempts from 1. Without NVFlare there is no
            site and no round, and ``task`` is the name of the run's folder.
        start: ``cold``, ``warm`` (a group started ahead) or ``kept`` (one that had served a task before).
        begin, end: seconds since 1970; ``end`` is that of the last node.
        code: NVFlare's return code, None for a task that has none yet.
        nodes: in the order of their ranks, those left out last.
    """

    site: str
    task: str
    round: int | None
    number: int
    group: str | None
    start: str
    begin: float
    end: float
    code: str | None
    nodes: tuple[NodeTime, ...]

    @property
    def outcome(self) -> str:
        """In a word or two, for people."""
        if self.code is None:
            return "not over"
        return "ok" if self.code == "OK" else self.code.replace("_", " ").lower()


class _Group:
    """What one ``events.jsonl`` tells."""

    def __init__(self, events: Sequence[_Event]) -> None:
        self.events = events
        first = self.one("group") or events[0]
        self.name = str(first.get("name", ""))
        self.hosts: list[str] = [str(host) for host in first.get("hosts", [])]
        self.ahead = bool(first.get("ahead"))
        self.began: float = first["at"]
        self.last: float = max(event["at"] for event in events)
        self.failure = self.one("failure")
        self.verdict = self.one("verdict")
        chosen = self.one("chosen")
        places: list[int] = chosen["places"] if chosen else list(range(len(self.hosts)))
        self.ranks_of_places = {place: node_rank for node_rank, place in enumerate(places)}

    def one(self, name: str, place: int | None = None) -> _Event | None:
        return next(self.all(name, place), None)

    def all(self, name: str, place: int | None = None) -> Iterator[_Event]:
        return (event for event in self.events if event["event"] == name and event.get("place") == place)


def read(folder: Path) -> list[TaskTime]:
    """Return what the files below the folder tell, in the order in which the tasks came.

    Args:
        folder: a run's, or one above it: several sites' runs are told apart by the site's name.

    Raises:
        OSError: the folder cannot be read.
        ValueError: a line is none of this package's.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    try:
        return _read(folder)
    except (AttributeError, LookupError, TypeError, ValueError) as e:
        raise ValueError(f"a line in a {TASKS_FILE} or {GROUP_FILE} is none of this package's ({e!r})") from None


def _read(folder: Path) -> list[TaskTime]:
    groups: dict[Path, list[_Group]] = {}
    for path in sorted(folder.rglob(GROUP_FILE)):
        events = _events(path)
        group_list = groups.setdefault(path.parent.parent, [])
        if events:
            group_list.append(_Group(events))
    # Of a run in which no group was ever started there are only the tasks.
    for path in folder.rglob(TASKS_FILE):
        groups.setdefault(path.parent, [])
    found = [
        task
        for run, of_run in groups.items()
        for task in _tasks(_events(run / TASKS_FILE), of_run, run.resolve().name)
    ]
    return sorted(found, key=lambda task: (task.begin, task.site, task.number))


def _events(path: Path) -> list[_Event]:
    """Return the file's events; a line that is not whole, as a kill leaves one, is passed over."""
    events: list[_Event] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        at = event.get("at") if isinstance(event, dict) else None
        if isinstance(at, (int, float)) and 0 <= at < _LATEST and "event" in event:
            events.append(event)
    return events


@dataclass
class _Try:
    task: _Event
    number: int
    begin: float
    group: str | None = None
    reply: _Event | None = None


def _tries(events: Sequence[_Event]) -> list[_Try]:
    tries: list[_Try] = []
    for event in events:
        if event["event"] == "task":
            tries.append(_Try(event, 1, event["at"]))
        elif not tries:
            continue
        elif event["event"] == "attempt":
            last = tries[-1]
            if last.reply is not None:
                tries.append(_Try(last.task, last.number + 1, last.reply["at"]))
            tries[-1].group = event["group"]
        elif event["event"] == "reply":
            # A group started ahead that turned out unfit has been replaced meanwhile.
            tries[-1].group, tries[-1].reply = event["group"], event
    return tries


def _tasks(events: Sequence[_Event], groups: Sequence[_Group], run: str) -> Iterator[TaskTime]:
    by_name = {group.name: group for group in groups}
    tries = _tries(events)
    for index, one in enumerate(tries):
        group = by_name.get(one.group) if one.group is not None else None
        before = [other for other in tries[:index] if other.group == one.group and one.group is not None]
        is_last = not any(other.group == one.group for other in tries[index + 1 :])
        since = before[-1].reply["at"] if before and before[-1].reply else None
        yield _task(one, group, since, kept=bool(before), is_last=is_last)
    # Groups without any file of tasks: torchrun from the shell, or a run directory of which a part was copied.
    if not events:
        for group in groups:
            verdict = group.verdict
            code = None if verdict is None else "OK" if verdict["outcome"] == "ok" else str(verdict["outcome"])
            one = _Try({"task": run}, 1, group.began, group.name)
            if verdict is not None:
                one.reply = {"at": _over(group), "code": code}
            yield _task(one, group, None, kept=False, is_last=True)


def _over(group: _Group) -> float:
    """Return when the group's ranks had done, or had to end."""
    ends = [
        event["at"] for name in ("failure", "stop", "rank_end") for event in group.events if event["event"] == name
    ]
    return min(ends) if group.failure else max(ends, default=group.last)


def _task(one: _Try, group: _Group | None, since: float | None, *, kept: bool, is_last: bool) -> TaskTime:
    reply = one.reply
    end = reply["at"] if reply else max(one.begin, group.last if group else one.begin)
    nodes: tuple[NodeTime, ...] = ()
    if group is not None:
        nodes = tuple(
            sorted(
                (_node(one, group, place, since, kept=kept, is_last=is_last) for place in range(len(group.hosts))),
                key=lambda node: (node.node_rank is None, node.node_rank),
            )
        )
        end = max([end, *(node.segments[-1].end for node in nodes if node.segments)])
    start = "kept" if kept else "warm" if group is not None and group.one("go") else "cold"
    return TaskTime(
        site=str(one.task.get("site", "")),
        task=str(one.task.get("task", "")),
        round=one.task.get("round"),
        number=one.number,
        group=one.group,
        start=start,
        begin=one.begin,
        end=end,
        code=None if reply is None or reply["code"] is None else str(reply["code"]),
        nodes=nodes,
    )


def _node(one: _Try, group: _Group, place: int, since: float | None, *, kept: bool, is_last: bool) -> NodeTime:
    node_rank = group.ranks_of_places.get(place)
    replied = one.reply["at"] if one.reply else None
    # A rank that was kept from running had failed long before anybody could tell.
    stopped = [event["at"] for event in (*group.all("stop"), *group.all("failure"))][:1]
    # With the reply all is done but the end of the processes, or nothing is, and they are being ended.
    over = min([*stopped, *([replied] if replied is not None else [])], default=None)
    gone = group.one("end", place) or group.verdict
    end = gone["at"] if gone else group.last
    if not is_last and replied is not None:
        end, over = replied, None
    marks = list(_marks(one, group, place, since, kept=kept))
    if over is not None:
        marks = [mark for mark in marks if mark[0] < over] + [(over, "cleaning up")]
    failure = group.failure if is_last else None
    ours = failure is not None and failure["node_rank"] == node_rank and failure["host"] == group.hosts[place]
    segments: list[Segment] = []
    for (begin, phase), (until, _) in zip(marks, [*marks[1:], (end, "")], strict=True):
        failed = ours and failure is not None and until == over and phase != "cleaning up"
        # What came ahead is told apart from what the task has waited for.
        for left, right, ahead in (
            (begin, min(until, one.begin), True),
            (max(begin, one.begin), until, False),
        ):
            if left < right:
                segments.append(Segment(phase, left, right, ahead and not kept, failed))
    return NodeTime(
        node_rank,
        group.hosts[place],
        len({event["rank"] for event in group.all("rank", place)}),
        tuple(part for part in segments if not (kept and part.begin < one.begin)),
        _sentence(failure) if ours and failure is not None else None,
    )


def _marks(
    one: _Try, group: _Group, place: int, since: float | None, *, kept: bool
) -> Iterator[tuple[float, str]]:
    """Yield when which phase begins on the node, in the order of time."""
    moments = _moments(group, place, since, one.reply["at"] if one.reply else None)
    if kept:
        # Its ranks have waited for this task all the while.
        yield one.begin, "receiving"
        yield from ((at, phase) for at, phase in moments if phase != "receiving")
        return
    marks = [(one.begin, "waiting")] if one.begin < group.began else []
    marks.append((group.began, "launching"))
    if started := group.one("started"):
        marks.append((started["at"], "joining"))
    if ranks := [event["at"] for event in group.all("rank", place)]:
        marks.append((max(ranks), "importing" if moments or group.ahead else "training"))
    warm = [event["at"] for event in group.all("warm", place)]
    go = group.one("go")
    if warm and len(warm) == len(ranks) and (go is None or max(warm) < go["at"]):
        marks.append((max(warm), "waiting"))
    if go is not None and ranks:
        marks.append((max(go["at"], *ranks), "importing" if moments else "training"))
    marks += moments
    latest = 0.0
    for at, phase in marks:
        latest = max(latest, at)
        yield latest, phase


def _moments(group: _Group, place: int, since: float | None, until: float | None) -> list[tuple[float, str]]:
    """Return when the node's first rank began to receive, to train and to send, as far as it has told."""
    found: dict[str, float] = {}
    for event in group.events:
        phase = _BEGINS.get(event["event"])
        if phase is None or event.get("place") != place:
            continue
        if (since is None or event["at"] > since) and (until is None or event["at"] <= until):
            # A script asks twice, is_running() and receive(); and after it has sent, for the next task.
            found.setdefault(phase, event["at"])
    return sorted((at, phase) for phase, at in found.items())


def _sentence(failure: _Event) -> str:
    rank = failure.get("rank")
    return str(failure["what"]) if rank is None else f"rank {rank}: {failure['what']}"
