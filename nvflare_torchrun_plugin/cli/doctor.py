"""``nvflare-torchrun doctor``: tries a node group without a job."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from .asked import GroupAsked, takes_what_is_asked
from .output import JsonOption, complain, print_json, print_table, tell

if TYPE_CHECKING:
    from ..checks.findings import Check
    from ..description.group_description import NodeGroup

__all__ = ["EPILOG", "doctor"]

EPILOG = (
    "Example: nvflare-torchrun doctor --nodes gpu-0,gpu-1\n\n"
    "Example: nvflare-torchrun doctor --workspace /opt/nvflare/site-1\n\n"
    "Exit codes: 0 all is well; 1 something is not; 2 there is no such group; 130 it was stopped by Ctrl-C."
)
_MARKS = {"ok": ("\u2713", "green"), "failed": ("\u2717", "red"), "skipped": ("-", "dim")}


@takes_what_is_asked
def doctor(asked: GroupAsked, as_json: JsonOption = False) -> None:
    """Try a node group step by step, as a job would use it, up to a small all-reduce; leave nothing behind.

    A cross names the node and says what to do. Everything has a bound: the longest, an all-reduce whose ranks do
    not come together, ends within five minutes.
    """
    group = asked.group(os.environ)
    try:
        checks = asyncio.run(_examine(group, asked.workspace or Path.cwd()))
    except asyncio.CancelledError:
        complain("stopped")
        raise typer.Exit(130) from None
    if as_json:
        print_json({"source": group.source, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        _print(group, checks)
    raise typer.Exit(int(any(check.state != "ok" for check in checks)))


async def _examine(group: NodeGroup, directory: Path) -> list[Check]:
    from ..checks.checkup import Checkup

    working = asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # What has been started ends with the task that waits for it.
        if working is not None:
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
    return await Checkup(group, directory.absolute(), os.environ, _begin).run()


def _begin(name: str) -> None:
    if sys.stderr.isatty():
        tell(f"{name} ...\n")


def _print(group: NodeGroup, checks: Sequence[Check]) -> None:
    def mark(state: str) -> Text:
        sign, style = _MARKS[state]
        try:
            sign.encode(sys.stdout.encoding or "ascii")
        except UnicodeEncodeError:
            sign = state
        return Text(sign, style)

    rows = [(mark(check.state), check.name, check.detail) for check in checks]
    print_table(("", "check", "result"), rows, title=f"{group.nnodes} nodes from {group.source}")
