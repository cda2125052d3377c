"""Cuts a byte stream into lines of text (standard library only)."""

from __future__ import annotations

import re

_BREAK = re.compile(rb"\r\n|\n|\r")


class LineCutter:
    """Collects bytes and gives back whole lines.

    Lines end at ``\\n``, ``\\r\\n`` or a lone ``\\r`` (each state of a progress bar is a line); empty ones are
    left out. A line longer than ``limit`` bytes comes in pieces that never split a UTF-8 character. Bytes that
    are not UTF-8 are shown as ``\\xNN``.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes."""
        *whole, self._rest = _BREAK.split(self._rest + data)
        pieces = [piece for line in whole for piece in self._pieces(line)]
        if len(self._rest) > self._limit:
            *more, self._rest = self._pieces(self._rest)
            pieces += more
        return [_text(piece) for piece in pieces if piece]

    def flush(self) -> list[str]:
        """Return what the stream ended with, its newline missing."""
        rest, self._rest = self._rest, b""
        return [_text(piece) for piece in self._pieces(rest) if piece]

    def _pieces(self, line: bytes) -> list[bytes]:
        pieces = []
        while len(line) > self._limit:
            cut = self._limit
            while cut > self._limit - 3 and line[cut] & 0xC0 == 0x80:
                cut -= 1
            pieces.append(line[:cut])
            line = line[cut:]
        return [*pieces, line]


def _text(line: bytes) -> str:
    return line.decode(errors="backslashreplace")
