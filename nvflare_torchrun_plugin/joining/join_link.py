"""A connection between a node that has dialled in and the client job: how it is kept, and how it ends.

Both sides use it (standard library only).
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable

from nvflare_torchrun_plugin.joining import greeting

CHUNK = 1 << 16
"""Bytes passed on in one go."""
CLOSE_BOUND = 2.0
"""Seconds for what was said last to arrive, and for the other side to close as well."""
# Seconds of silence before probes begin and between two probes, and how many: a host may go without a word.
_PROBES = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
# Milliseconds that what was sent may go without an answer.
_UNANSWERED = 20_000


def look_after(writer: asyncio.StreamWriter) -> None:
    """Let the kernel see whether the other host is there: without traffic, nothing else shows that it is gone.

    Raises:
        OSError: the connection has ended.
    """
    kept = _socket_of(writer)
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_PROBES, (socket.TCP_USER_TIMEOUT, _UNANSWERED)):
        kept.setsockopt(socket.IPPROTO_TCP, option, value)


def leave_alone(writer: asyncio.StreamWriter) -> None:
    """Let it do so no more: both sides look after each other, and their ``node_timeout`` may be longer."""
    with contextlib.suppress(OSError):
        kept = _socket_of(writer)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
        kept.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def has_ended(writer: asyncio.StreamWriter) -> bool:
    """Return whether the kernel knows that the other side has closed the connection, or that it is gone."""
    try:
        asked = select.poll()
        asked.register(_socket_of(writer).fileno(), select.POLLRDHUP)
        return bool(asked.poll(0))
    except OSError:
        return True


def _socket_of(writer: asyncio.StreamWriter) -> socket.socket:
    """Raise OSError where there is none any more: TLS forgets it at the end of the connection, others close it."""
    found: socket.socket | None = None if writer.is_closing() else writer.get_extra_info("socket")
    if found is None or found.fileno() < 0:
        raise ConnectionResetError("the connection has ended")
    return found


def say(writer: asyncio.StreamWriter, kind: str, text: str) -> None:
    """Say a word of the client job's; one that does not arrive shows in the end of the connection."""
    writer.write(greeting.word(kind, text))


async def part(writer: asyncio.StreamWriter) -> None:
    """Close the connection within :data:`CLOSE_BOUND`, whether or not the other side does.

    TLS waits for the other side's word that it has heard of the end, which may never come, and Python before 3.11
    waits without a bound.
    """
    writer.close()
    try:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), CLOSE_BOUND)
    finally:
        writer.transport.abort()


async def pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Callable[[], None] = lambda: None
) -> None:
    """Pass on all that there is to read, to the end of either; call ``heard`` whenever there is something."""
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            heard()
            writer.write(data)
            await writer.drain()
