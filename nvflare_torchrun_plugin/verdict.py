"""What happened to a group: events in, blame out, as text and JSON (no processes, no clocks here)."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from nvflare_torchrun_plugin.node.procs import signal_name

Cause = Literal["script", "infrastructure", "configuration"]
"""Whose business a failure is: the user's program's, the machines', or the description's that no retry changes."""

_LAST_LINES = 20
_LONGEST = 200
"""Signs of an exception's text in the first line of a verdict; the traceback has all."""
# Signals from outside: the OOM killer, a scheduler, a person. All others a program gives itself.
_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"}
_USAGE = 2
"""Exit code of a translator or torchrun that did not understand its options."""
# What a rank says when the other end of its connection died first: gloo, NCCL, the TCP store, our Client API. It
# also says when an error that it raises is another rank's.
_PEER_LOST = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket.*(closed|timeout)|remote process exited"
    r"|NCCL.*(remote|abort|communicator)|DistNetworkError|DistBackendError|TCPStore|Gloo .*(fail|recv|send)"
    r"|LinkError: .*(has ended|raised what follows)",
    re.IGNORECASE,
)

# What a torchrun says that has waited in vain: the first one for the others, any other for the first.
_ALONE = re.compile(r"waiting for clients|client socket has timed out")


@dataclass
class RankRecord:
    """What is known of one rank; times are seconds since the attempt began.

    ``stopped``: it ended (or raised) after its agent had begun to end the ranks of the node. ``halted``: since
    when a signal has kept it from running, and that in words, once it has been too long.
    """

    rank: int
    local_rank: int
    pid: int
    ended: float | None = None
    code: int | None = None
    traceback: str | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    log: str | None = None
    stopped: bool = False
    oom_kills: int = 0
    halted: tuple[float, str] | None = None


@dataclass
class NodeRecord:
    """What is known of one node; times are seconds since the attempt began.

    ``stopped``: its torchrun ended because the agent was told so.
    """

    node_rank: int
    host: str
    ranks: dict[int, RankRecord] = field(default_factory=dict)
    ended: float | None = None
    code: int | None = None
    error: str | None = None
    leftovers: tuple[int, ...] = ()
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    log: str | None = None
    stopped: bool = False
    cause: Cause = "infrastructure"


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong.

    Attributes:
        node_rank, host: the node it happened on.
        rank, local_rank: the rank, or None when it was the node's torchrun, agent or connection.
        what: the exit code, the signal's name, or what else happened.
        seconds: when, counted from the start of the attempt.
        traceback: the rank's uncaught exception, if there was one.
        last_lines: the last lines that the rank (or the node's torchrun) printed.
        log: path of the file with all its lines.
        cause: ``script``, ``infrastructure`` or ``configuration``.
    """

    node_rank: int
    host: str
    rank: int | None
    local_rank: int | None
    what: str
    seconds: float
    traceback: str | None
    last_lines: tuple[str, ...]
    log: str | None
    cause: Cause = "script"

    @property
    def exception(self) -> str | None:
        """The line of the traceback that says what was raised, shortened; None where none says so."""
        lines = (self.traceback or "").splitlines()
        # A message may have lines of its own, and Python indents what belongs to a frame.
        frame = max((at for at, line in enumerate(lines) if line.startswith('  File "')), default=len(lines))
        raised = next((line for line in lines[frame:] if not line.startswith(" ")), "").strip()
        return (raised if len(raised) <= _LONGEST else f"{raised[:_LONGEST]}...") or None


@dataclass(frozen=True)
class Verdict:
    """How one attempt ended.

    Attributes:
        outcome: ``ok`` (every rank and torchrun ended with 0), ``failed``, or ``stopped`` (we ended it, and
            nothing had failed before).
        reason: why it was stopped; None otherwise.
        failure: what failed first; None unless ``failed``.
        victims: ranks that were ended because of the failure.
        leftovers: what could not be ended or confirmed gone, one sentence each.
        seconds: duration of the attempt.
        ranks_ran: whether any rank was ever there; of ranks that import ahead, whether rank 0 has done so.
        left_out: host and reason of each node that the group did without.
    """

    outcome: str
    reason: str | None
    failure: Failure | None
    victims: tuple[int, ...]
    leftovers: tuple[str, ...]
    seconds: float
    ranks_ran: bool = False
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def cause(self) -> Cause:
        """Whose business it is that there is no result; the script's when nothing has failed."""
        return self.failure.cause if self.failure is not None else "script"

    def as_dict(self) -> dict[str, object]:
        """Return the verdict as plain data for JSON."""
        return dataclasses.asdict(self)

    def text(self) -> str:
        """Return the verdict as a block that a person can read."""
        lines = []
        if self.failure is None:
            reason = f": {self.reason}" if self.reason else ""
            lines.append(f"group {self.outcome} after {self.seconds:.1f} s{reason}")
        else:
            lines += _failure_lines(self.failure)
            if self.victims:
                lines.append(f"  stopped because of it: rank {', '.join(map(str, self.victims))}")
        lines += [f"  LEFT OVER: {sentence}" for sentence in self.leftovers]
        return "\n".join(lines)


def _failure_lines(failure: Failure) -> list[str]:
    where = f"node {failure.node_rank} ({failure.host})"
    if failure.rank is not None:
        where += f" rank {failure.rank} (local rank {failure.local_rank})"
    # A group that waits for its task may have failed then.
    when = f"{abs(failure.seconds):.1f} s {'after' if failure.seconds >= 0 else 'before'} the start"
    raised = f": {failure.exception}" if failure.exception else ""
    lines = [f"group failed: {where}: {failure.what}, {when}{raised}"]
    if failure.traceback:
        lines += ["  traceback:", *_indented(failure.traceback.splitlines())]
    if failure.last_lines:
        lines += ["  last lines:", *_indented(list(failure.last_lines))]
    if failure.log:
        lines.append(f"  all its lines: {failure.log}")
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def describe(code: int, oom_kills: int = 0) -> str:
    """Return an exit code as words; a SIGKILL with its usual reason.

    Args:
        code: the exit code, or minus the signal's number.
        oom_kills: processes of the node's cgroup that the kernel has killed for lack of memory meanwhile.
    """
    words = signal_name(code)
    if words != "SIGKILL":
        return words
    if oom_kills:
        return f"{words} (out of memory: the kernel has killed {oom_kills} of the node's processes for it)"
    return f"{words} (killed from outside; memory is the usual reason)"


def waited_in_vain(node: NodeRecord) -> bool:
    """Return whether the node's torchrun has ended because another node's did not come."""
    return bool(node.code) and not node.ranks and any(_ALONE.search(line) for line in node.last_lines)


def reach(
    nodes: list[NodeRecord],
    *,
    stopped_at: float | None,
    reason: str | None,
    suspect: Failure | None,
    seconds: float,
    too_few: str | None = None,
    left_out: tuple[tuple[str, str], ...] = (),
    imports: bool = False,
) -> Verdict:
    """Reach the verdict of an attempt that is over.

    Args:
        nodes: all that was seen.
        stopped_at: when we began to end the group; what failed later is our own doing.
        reason: why we did; None when we did not, or did because of a failure.
        suspect: a failure that shows in no exit code (a rank 0 that ended without a result), else None.
        seconds: duration of the attempt.
        too_few: what to say when not enough nodes could take part; None when they could.
        left_out: host and reason of each node that the group did without.
        imports: whether rank 0 was still importing ahead what its task needs.
    """
    leftovers = tuple(
        f"node {node.node_rank} ({node.host}): cannot end process {', '.join(map(str, node.leftovers))}"
        for node in nodes
        if node.leftovers
    )
    failures = sorted(_failures(nodes, stopped_at), key=lambda pair: (pair[0], pair[1].seconds))
    first = failures[0][1] if failures else suspect
    if failures and failures[0][0]:
        first = _absence(nodes, failures[0][1], stopped_at) or first
    if first is not None and too_few is not None:
        first = dataclasses.replace(first, what=too_few)
    ranks_ran = not imports and any(node.ranks for node in nodes)
    if first is None:
        outcome = "stopped" if reason else "ok"
        return Verdict(outcome, reason, None, (), leftovers, seconds, ranks_ran, left_out)
    victims = tuple(
        sorted(
            record.rank
            for node in nodes
            for record in node.ranks.values()
            if record.rank != first.rank and record.code != 0
        )
    )
    return Verdict("failed", None, first, victims, leftovers, seconds, ranks_ran, left_out)


def _absence(nodes: list[NodeRecord], echo: Failure, stopped_at: float | None) -> Failure | None:
    """Return the failure of the nodes that others have waited for in vain, if there are any."""
    if not any(waited_in_vain(node) for node in nodes):
        return None
    absent = [
        node
        for node in nodes
        if not node.ranks
        and (node.stopped or node.ended is None or (stopped_at is not None and node.ended > stopped_at))
    ]
    if not absent:
        return None
    first, *others = absent
    return Failure(
        first.node_rank,
        first.host,
        None,
        None,
        "its torchrun has not joined the others within join_timeout"
        + "".join(f", nor has that of node {node.node_rank} ({node.host})" for node in others),
        echo.seconds,
        None,
        tuple(first.last_lines),
        first.log,
        "infrastructure",
    )


def _cause(record: RankRecord) -> Cause:
    outside = record.traceback is None and record.code is not None and signal_name(record.code) in _FROM_OUTSIDE
    return "infrastructure" if outside else "script"


def _failures(nodes: list[NodeRecord], stopped_at: float | None) -> list[tuple[bool, Failure]]:
    """Return each failure that was not our doing, with whether it looks like the echo of another one."""
    found = []
    cause: Cause
    for node in nodes:
        own = []
        for record in node.ranks.values():
            if record.halted is not None:
                # What has become of it since then is our doing.
                since, what = record.halted
                echo, cause = False, "infrastructure"
            elif record.ended is None or not (record.code or record.traceback):
                continue  # it runs, or has ended well
            elif record.stopped or (stopped_at is not None and record.ended > stopped_at):
                continue  # our doing
            else:
                # A rank that torchrun ended after its sibling, or that lost its peer, points at somebody else.
                # One with a traceback had failed already: a signal after it has only cut its exit short.
                raised = record.traceback is not None and (record.code is None or record.code <= 0)
                what = "uncaught exception" if raised else describe(record.code or 0, record.oom_kills)
                echo = bool(_PEER_LOST.search(record.traceback)) if record.traceback else record.code == -15
                since, cause = record.ended, _cause(record)
            failure = Failure(
                node.node_rank,
                node.host,
                record.rank,
                record.local_rank,
                what,
                since,
                record.traceback,
                tuple(record.last_lines),
                record.log,
                cause,
            )
            own.append((echo, failure))
        if not own and (node.error or node.code):
            ended = node.ended if node.ended is not None else 0.0
            if not node.stopped and (stopped_at is None or ended <= stopped_at):
                what = node.error or f"torchrun ended with {describe(node.code or 0)}"
                cause = "configuration" if node.code == _USAGE and not node.error else node.cause
                failure = Failure(
                    node.node_rank,
                    node.host,
                    None,
                    None,
                    what,
                    ended,
                    None,
                    tuple(node.last_lines),
                    node.log,
                    cause,
                )
                own.append((bool(node.last_lines and _PEER_LOST.search("\n".join(node.last_lines))), failure))
        found += own
    return found
