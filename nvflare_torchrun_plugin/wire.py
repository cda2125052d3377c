"""What a supervisor and a node agent say to each other (standard library only).

One message is one line of JSON: an object whose ``kind`` names the class and whose other keys are its
fields. Orders go to the agent's stdin, frames come from its stdout. Both sides validate what arrives here,
once; a line that is no frame (a login shell's greeting, an ssh error) is told apart by :class:`WireError`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform() -> Callable[[type], type]:
        """Return what leaves the class as it is."""
        return lambda cls: cls


MAX_TEXT = 1 << 20
"""Longest text of one :class:`Line`, in bytes of UTF-8; longer output lines travel in pieces."""

MAX_MESSAGE = 8 << 20
"""Longest message in bytes: JSON writes a control character of a :class:`Line` with six."""


DEFAULT_NODE_TIMEOUT = 30.0
"""Seconds of silence on the way between supervisor and agent after which one takes the other for lost."""

BEATS = 4
"""Signs of life that each side gives within that time."""

MOMENTS = ("receive", "received", "send", "sent")
"""What a script's calls of the Client API tell: it waits for a model from now on, has it, sends, has sent."""


class WireError(ValueError):
    """A line that is not one of the messages expected."""


@dataclass_transform()
class Message:
    """Fields are the annotations of the class; equal is what has equal ones.

    Each agent of many on a small host has to make these classes before it can greet, and to import what makes
    better ones, ``typing`` or ``dataclasses``, takes longer than all else.
    """

    def __init__(self, *values: Any, **named: Any) -> None:
        fields = type(self).__annotations__
        given = {**dict(zip(fields, values, strict=False)), **named}
        needed = {name for name in fields if not hasattr(type(self), name)}
        if len(values) > len(fields) or not needed <= set(given) <= set(fields):
            # Not the values: they may be secret.
            raise TypeError(f"{type(self).__name__} has the fields {list(fields)}: {len(values)}, {list(named)}")
        vars(self).update({name: given.get(name, getattr(type(self), name, None)) for name in fields})

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Prepare(Message):
    """Order: look whether this node can take part, and answer with :class:`Ready`. Nothing is started yet.

    Attributes:
        master_addr: name or address of node rank 0, to be resolved; None for a group of one node.
        app_dir: where the job's app is on the client job's host.
        marker: name of a file in it that shows that it is the same directory.
        timeout: seconds in which the master's name must be known; a pod's may come late.
        node_timeout: seconds of silence after which each side takes the other for lost, and a stopped rank for
            one that does not go on.
    """

    master_addr: str | None
    app_dir: str
    marker: str
    timeout: float
    node_timeout: float


class Stage(Message):
    """Order: a piece of the job's app as a tar archive; the last, empty one asks for :class:`Staged`.

    Attributes:
        tag: as in :class:`Start`.
        data: bytes in base64.
    """

    tag: str
    data: str


class Ping(Message):
    """Order: the supervisor is there; a :class:`Beat` is the answer."""


class Start(Message):
    """Order: start the translator and watch it.

    Attributes:
        tag: letters, digits and dashes that name this attempt on this node, unique on its host; a
            :class:`Sweep` finds by it what an agent that died has left.
        argv: the translator's options and the words that torchrun runs, after the translator's own name.
        env: variables added to the agent's own for the ranks; secrets may be among the values.
        cwd: working directory of the ranks.
        module: whether ``target`` is a module's name (``-m``) rather than a script's path.
        target: the script or module that each rank runs.
        args: its arguments, with secrets resolved.
        bootstrap: text of the Client API bootstrap for nodes other than the CJ's, else None.
        grace: seconds between SIGTERM and SIGKILL when the group must end and no :class:`Stop` says so.
        holds: whether the ranks wait for :class:`Go` before they become the script; ``bootstrap`` comes with it.
        preload: what such ranks import before they wait, in this order: ``a.b``, or ``a:b`` for what
            ``from a import b`` needs.
    """

    tag: str
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    module: bool
    target: str
    args: tuple[str, ...]
    bootstrap: str | None
    grace: float
    holds: bool
    preload: tuple[str, ...]


class Go(Message):
    """Order: let the ranks that wait become the script, each as soon as it has imported what it was to.

    Attributes:
        env: variables added to the ranks' environment.
        bootstrap: text of the Client API bootstrap for nodes other than the CJ's, else None.
    """

    env: dict[str, str]
    bootstrap: str | None


class Signal(Message):
    """Order: send the signal to the ranks."""

    number: int


class Stop(Message):
    """Order: end everything here.

    Attributes:
        grace: seconds between SIGTERM and SIGKILL.
        stacks: whether the ranks are to print their stacks first (by SIGABRT, for which Python's fault handler
            must be on).
    """

    grace: float
    stacks: bool = False


class Sweep(Message):
    """Order: end what an agent that is gone left of the :class:`Start` with this tag, then leave."""

    tag: str


class Hello(Message):
    """Frame, the first one: the agent is there, and what it finds on its node.

    Attributes:
        version: this package's.
        torch: torch's version, None when it is not installed; nothing is imported to learn it.
        nvflare: NVFlare's, in the same way.
        python: the interpreter's.
        host: the node's own name.
        pid: the agent's process.
        cores: cores that processes on the node may use, by affinity and cgroup.
        gpus: NVIDIA GPUs in sight; None when there may be accelerators that only torch can count.
        at: the node's monotonic clock, in seconds, to compare the two clocks by.
    """

    version: str
    torch: str | None
    nvflare: str | None
    python: str
    host: str
    pid: int
    cores: int
    gpus: int | None
    at: float


class Ready(Message):
    """Frame: the answer to :class:`Prepare`.

    Attributes:
        shares: whether this node sees the job's app directory, marker and all.
        address: what the master's name means on this node, None for a group of one node.
        interface: name of the network interface that leads to node rank 0, None when it is not known.
        error: why this node cannot take part, else None.
    """

    shares: bool
    address: str | None
    interface: str | None
    error: str | None


class Staged(Message):
    """Frame: the copy of the job's app is there until the agent ends.

    Attributes:
        directory: its absolute path on the node.
    """

    directory: str


class Beat(Message):
    """Frame: the agent is there."""


class RankUp(Message):
    """Frame: a rank's process has reported to the agent."""

    rank: int
    local_rank: int
    pid: int


class Warm(Message):
    """Frame: a rank has imported what it was to, and waits for :class:`Go`.

    Attributes:
        rank: the global rank.
        of: how many ranks its node has.
        failed: a sentence for each module that could not be imported; the script will meet it again.
    """

    rank: int
    of: int
    failed: tuple[str, ...]


class Line(Message):
    """Frame: one line of output; ``rank`` is None for torchrun's own."""

    rank: int | None
    text: str


class Moment(Message):
    """Frame: how far the task is, as the node's first rank tells it.

    Attributes:
        rank: the global rank.
        what: one of :data:`MOMENTS`.
        at: when, in seconds of the node's monotonic clock.
    """

    rank: int
    what: str
    at: float


class RankError(Message):
    """Frame: a rank ends with this uncaught exception.

    Attributes:
        rank: the global rank.
        traceback: the text that Python prints.
        at: when, in seconds of the node's monotonic clock.
        stopped: whether the agent had begun to end the ranks before.
    """

    rank: int
    traceback: str
    at: float
    stopped: bool


class Halt(Message):
    """Frame: a rank has been stopped (SIGSTOP) for longer than the node may be silent; told again while it is.

    Attributes:
        rank: the global rank.
        at: since when, in seconds of the node's monotonic clock.
    """

    rank: int
    at: float


class RankEnd(Message):
    """Frame: a rank's process has ended.

    Attributes:
        rank: the global rank.
        code: its exit code, or minus the signal's number; None when torchrun collected the process before
            the agent could look (a second frame follows as soon as torchrun has told the code).
        at: when, in seconds of the node's monotonic clock.
        stopped: whether the agent had begun to end the ranks before.
        oom_kills: processes of the node's cgroup that the kernel has killed for lack of memory since the start.
    """

    rank: int
    code: int | None
    at: float
    stopped: bool
    oom_kills: int


class End(Message):
    """Frame, the last one: torchrun has ended and everything it started is gone.

    Attributes:
        code: torchrun's exit code, or minus the signal's number; None when it was never started.
        leftovers: ids of processes that even SIGKILL did not end in time.
        error: why nothing was started, else None.
        at: when torchrun ended (or what else made an end), in seconds of the node's monotonic clock.
        stopped: whether the agent was told to end it before.
    """

    code: int | None
    leftovers: tuple[int, ...]
    error: str | None
    at: float
    stopped: bool


Order = Prepare | Stage | Ping | Start | Go | Signal | Stop | Sweep
Frame = Hello | Ready | Staged | Beat | RankUp | Warm | Line | Moment | RankError | Halt | RankEnd | End

_ORDERS: dict[str, type[Any]] = {
    "prepare": Prepare,
    "stage": Stage,
    "ping": Ping,
    "start": Start,
    "go": Go,
    "signal": Signal,
    "stop": Stop,
    "sweep": Sweep,
}
_FRAMES: dict[str, type[Any]] = {
    "hello": Hello,
    "ready": Ready,
    "staged": Staged,
    "beat": Beat,
    "rank_up": RankUp,
    "warm": Warm,
    "line": Line,
    "moment": Moment,
    "rank_error": RankError,
    "halt": Halt,
    "rank_end": RankEnd,
    "end": End,
}
_KINDS = {cls: kind for kind, cls in (_ORDERS | _FRAMES).items()}


def encode(message: Order | Frame) -> bytes:
    """Return the message as one line, its newline included."""
    return json.dumps({"kind": _KINDS[type(message)], **vars(message)}).encode() + b"\n"


def decode_order(line: bytes) -> Order:
    """Return the order in ``line``.

    Raises:
        WireError: it is none.
    """
    order: Order = _decode(line, _ORDERS)
    return order


def decode_frame(line: bytes) -> Frame:
    """Return the frame in ``line``.

    Raises:
        WireError: it is none.
    """
    frame: Frame = _decode(line, _FRAMES)
    return frame


def _decode(line: bytes, kinds: dict[str, type[Any]]) -> Any:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise WireError("not a line of JSON") from e
    if not isinstance(data, dict):
        raise WireError(f"expected a JSON object, got {type(data).__name__}")
    kind = data.pop("kind", None)
    cls = kinds.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise WireError(f"kind is {kind!r}, expected one of {', '.join(kinds)}")
    values = {}
    for name, wanted in _TYPES[cls].items():
        if name not in data:
            raise WireError(f"{kind}: {name} is missing")
        value = data.pop(name)
        if not _CHECKS[wanted](value):
            raise WireError(f"{kind}: {name} must be {wanted}, got {type(value).__name__}")
        values[name] = tuple(value) if isinstance(value, list) else value
    if data:
        raise WireError(f"{kind}: unknown key {sorted(data)[0]!r}")
    return cls(**values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_duration(value: Any) -> bool:
    # Clocks are floats: an integer beyond their range would fail only when it is added to one.
    return bool(0 <= value <= sys.float_info.max)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


_CHECKS: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": lambda value: (_is_int(value) or isinstance(value, float)) and _is_duration(value),
    "bool": lambda value: isinstance(value, bool),
    "str": _is_text,
    "str | None": lambda value: value is None or _is_text(value),
    "tuple[str, ...]": _list_of(_is_text),
    "tuple[int, ...]": _list_of(_is_int),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
}

# Strings, for this file imports annotations from __future__.
_TYPES = {cls: cls.__annotations__ for cls in _KINDS}
