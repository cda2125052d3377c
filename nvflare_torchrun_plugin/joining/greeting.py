"""What a node that dials in and the client job say before the first order (standard library only).

Each says lines of JSON inside of TLS: the client job a nonce, the node who it is and its proof, and then the
client job one word after the other. From the word ``start`` on, the connection belongs to a node agent: orders one
way, frames the other, and :data:`END` when the agent has ended.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any

MAX_LINE = 4096
"""Longest line in bytes, and the most that somebody unknown can make this side keep."""
END = b"\x04"
"""What follows the last frame, and before a byte for the agent's exit code: no JSON holds it, and without it the
connection has broken."""
WORDS = ("nonce", "welcome", "refused", "start", "leave")
"""What the client job says: ``welcome``: wait for ``start``; ``refused``: with the reason, another try may do;
``leave``: with the reason, for good."""
_MAX_NAMES = 4


class GreetingError(ValueError):
    """A line that does not belong here."""


@dataclass(frozen=True)
class Greeting:
    """A node.

    Attributes:
        proof: that it knows the secret, see :func:`proof`.
        node_rank: its node rank, None when it knows only its names.
        names: its names, the one for people first.
        run_id: the run for which it was started, None when it was not told.
        instance: the same for all connections of one process, and for no other's.
        pid: that process.
    """

    proof: str
    node_rank: int | None
    names: tuple[str, ...]
    run_id: str | None
    instance: str
    pid: int

    def encode(self) -> bytes:
        """Return the line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> Greeting:
        """Return what the line says.

        Raises:
            GreetingError: it says something else.
        """
        given: dict[str, Any] = _object(line)
        names = given.get("names")
        if set(given) != set(cls.__dataclass_fields__):
            raise GreetingError("it is no greeting")
        if not (isinstance(names, list) and 1 <= len(names) <= _MAX_NAMES and all(map(_is_text, names))):
            raise GreetingError("its names are none")
        for field in ("proof", "instance"):
            if not _is_text(given[field]):
                raise GreetingError(f"its {field} is none")
        if given["run_id"] is not None and not _is_text(given["run_id"]):
            raise GreetingError("its run_id is none")
        for field, absent in (("node_rank", True), ("pid", False)):
            if not ((absent and given[field] is None) or _is_number(given[field])):
                raise GreetingError(f"its {field} is none")
        return cls(**{**given, "names": tuple(names)})


def proof(secret: bytes, nonce: str, fingerprint: str) -> str:
    """Return what shows that one knows the secret, for this nonce and the owner of this certificate alone."""
    return hmac.new(secret, f"nvfl-join {nonce} {fingerprint}".encode(), "sha256").hexdigest()


def end(code: int) -> bytes:
    """Return what follows the last frame of an agent with this exit code, or minus a signal's number."""
    return END + bytes([code if code >= 0 else 128 - code])


def word(kind: str, text: str = "") -> bytes:
    """Return a line of the client job's."""
    return json.dumps({kind: text}).encode() + b"\n"


def read_word(line: bytes) -> tuple[str, str]:
    """Return the kind and the text of a line of the client job's.

    Raises:
        GreetingError: it is none.
    """
    given = _object(line)
    if len(given) == 1:
        ((kind, text),) = given.items()
        if kind in WORDS and isinstance(text, str):
            return kind, text
    raise GreetingError("it does not speak as a client job does")


def _object(line: bytes) -> dict[str, object]:
    if len(line) > MAX_LINE or not line.endswith(b"\n"):
        raise GreetingError("it does not say a whole line")
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise GreetingError("it does not speak JSON") from None
    if not isinstance(given, dict):
        raise GreetingError("it says no JSON object")
    return given


def _is_text(value: object) -> bool:
    # It ends up in logs.
    return isinstance(value, str) and 0 < len(value) <= 256 and value.isprintable()


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
