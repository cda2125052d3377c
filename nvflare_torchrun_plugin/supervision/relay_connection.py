"""The supervisor's end of the connection to a relay (the other end: ``relay.py``)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable

_ANNOUNCING = (signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends some time before it ends a job."""


class RelayConnection:
    """A relay on the other end of its socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_ended: Callable[[], None] = lambda: None
        self.on_signal: Callable[[signal.Signals], None] = lambda number: None

    async def environ(self) -> dict[str, str]:
        """Return the relay's environment, its first message.

        Raises:
            ValueError: it is none.
            OSError: the connection is broken.
        """
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise ValueError("its message is not complete")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("its message is not JSON") from None
        environ: object = message.get("environ") if isinstance(message, dict) else None
        if not isinstance(environ, dict) or not all(isinstance(value, str) for value in environ.values()):
            raise ValueError("its message holds no environment")
        return environ

    async def watch(self) -> None:
        """Tell of the signals that the relay gets, until one of them asks it to end, or of its end."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                number = signal.Signals(message["signal"])
                if number in _ANNOUNCING:
                    self.on_signal(number)
                elif message["sender"] == os.getpid():
                    self.on_ended()
                    return
                else:
                    self.on_lost(f"its relay got {number.name}, from outside")
                    return
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        self.on_lost("its relay is gone")

    def dismiss(self, code: int) -> None:
        """Give the relay its exit code.

        No relay is left without: it would take us for dead, and remove our directory.
        """
        self._writer.write(json.dumps({"exit": code}).encode() + b"\n")

    def close(self) -> None:
        """Close the connection, once all has been sent."""
        self._writer.close()
