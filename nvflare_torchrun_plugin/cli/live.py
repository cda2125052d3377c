"""What the ranks print, as they print it, and a line below that tells how far they are.

A thread writes it: a terminal that is stopped, or a reader that takes its time, must not stop the watch over the
nodes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import threading
from collections import deque
from collections.abc import Callable
from typing import TextIO

__all__ = ["Screen", "as_json", "as_text"]

_MOST = 10_000
"""Lines that wait for a slow reader; more are left out, and are in the ranks' files."""
_CLEAR = "\r\x1b[K"
_COLOURS = (36, 33, 35, 32, 34)

Form = Callable[[int, int | None, str], str]
"""Makes one line of output of node rank, rank and text."""


def as_text(*, coloured: bool) -> Form:
    """Return the form for people: ``node:rank | text``, ``node | text`` for torchrun's own lines."""

    def form(node_rank: int, rank: int | None, text: str) -> str:
        prefix = f"{node_rank} |" if rank is None else f"{node_rank}:{rank} |"
        if coloured:
            prefix = f"\x1b[{_COLOURS[node_rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        return f"{prefix} {text}\n"

    return form


def as_json(node_rank: int, rank: int | None, text: str) -> str:
    """Return the line as a JSON object on a line of its own."""
    return json.dumps({"node": node_rank, "rank": rank, "line": text}) + "\n"


class Screen:
    """Shows lines and progress until it is closed.

    Args:
        out: gets the lines.
        terminal: gets the progress; None where that is no terminal.
        form: how a line is written.
        broken: is called, in the writing thread, with the reason when no line can be written any more.
    """

    def __init__(self, out: TextIO, terminal: TextIO | None, form: Form, broken: Callable[[str], object]) -> None:
        self._out = out
        self._terminal = terminal
        self._form = form
        self._broken = broken
        self._news = threading.Condition()
        self._lines: deque[str] = deque()
        self._left_out = 0
        self._progress = ""
        self._shown = ""
        self._closing = False
        self._gone = False
        self._thread = threading.Thread(target=self._write, name="screen", daemon=True)
        self._thread.start()

    def show(self, node_rank: int, rank: int | None, text: str) -> None:
        """Show a line of a rank, or of a node's torchrun."""
        with self._news:
            if len(self._lines) < _MOST:
                self._lines.append(self._form(node_rank, rank, text))
            else:
                self._left_out += 1
            self._news.notify()

    def progress(self, text: str) -> None:
        """Change the line that tells how far it is."""
        if self._terminal is not None:
            with self._news:
                self._progress = text
                self._news.notify()

    def close(self) -> None:
        """Wait until everything has been shown, and take the line of the progress away."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join()

    def _write(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._lines or self._progress != self._shown or self._closing)
                text = "".join(self._lines)
                self._lines.clear()
                if self._left_out:
                    text += self._form(0, None, f"({self._left_out} lines are only in the ranks' files)")
                    self._left_out = 0
                progress, closing = "" if self._closing else self._progress, self._closing
            self._tell(_CLEAR if self._shown else "")
            if text and not self._gone:
                try:
                    self._out.write(text)
                    self._out.flush()
                except OSError as error:
                    self._gone = True
                    self._broken(_why_not_written(error))
            self._tell(_fitting(progress))
            self._shown = progress
            if closing:
                return

    def _tell(self, text: str) -> None:
        if text and self._terminal is not None:
            with contextlib.suppress(OSError):
                self._terminal.write(text)
                self._terminal.flush()


def _why_not_written(error: OSError) -> str:
    if error.errno == errno.EPIPE:
        return "nobody reads its output any more"
    return f"its output cannot be written: {error.strerror}"


def _fitting(text: str) -> str:
    """Return the text cut to the terminal's width: a longer one could not be taken away again."""
    return text[: shutil.get_terminal_size().columns - 1]
