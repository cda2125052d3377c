"""How every verb speaks: tables for people, JSON for machines, one line for what it refuses.

Results go to stdout and nothing else does; a terminal gets rich's tables, anything else plain text in which no
cell is cut, so that it can be searched.
"""

import contextlib
import errno
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "JsonOption",
    "RefusedError",
    "complain",
    "console",
    "give_output_up",
    "has_no_cursor",
    "is_plain",
    "print_json",
    "print_table",
    "printable",
    "tell",
]

# Wider than any table: what is not a terminal has no width, and rich would wrap at 80.
_UNLIMITED = 10_000

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class RefusedError(Exception):
    """What was asked for makes no sense. Its text says what, where and what to do; exit code 2."""


def console() -> Console:
    """Where results are printed: as wide as the terminal, or without a limit when stdout is none."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _UNLIMITED, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str | Text]], title: str | None = None) -> None:
    """Print one table: lines around it in a terminal, columns set apart by blanks otherwise."""
    out = console()
    table = Table(
        *columns,
        title=None if title is None else Text(printable(title)),
        title_justify="left",
        box=box.ROUNDED if out.is_terminal else None,
        pad_edge=out.is_terminal,
    )
    for row in rows:
        # Cells are values, never rich's markup: "[0-3]" in a host list is no style.
        table.add_row(*map(_cell, row))
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    # Cells are filled up with blanks, which a plain line must not end with.
    sys.stdout.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())


def print_json(value: object) -> None:
    """Print a value as indented JSON with its keys in the order given; ASCII, which every stdout can write."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def complain(sentence: str) -> None:
    """Say on stderr what is wrong."""
    tell(f"nvflare-torchrun: {printable(sentence)}\n")


def tell(text: str) -> None:
    """Write text to stderr; where that cannot be written, nobody is left to be told."""
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


def give_output_up(error: OSError) -> None:
    """Say that stdout cannot be written, unless its reader has just seen enough, and lead the rest to nowhere."""
    if error.errno != errno.EPIPE:
        complain(f"the output cannot be written: {error.strerror}")
    # What is left in its buffer would be complained of once more when Python ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_plain() -> bool:
    """Return whether a terminal is to get no colours: it has none, or its user wants none (no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or has_no_cursor()


def has_no_cursor() -> bool:
    """Return whether a terminal cannot take back what it has shown."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def _cell(cell: str | Text) -> Text:
    return Text(printable(cell.plain), cell.style) if isinstance(cell, Text) else Text(printable(cell))


def printable(text: str) -> str:
    """Return the text with what could rule a terminal, or cannot be encoded, written out; lines stay lines."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text
    )
