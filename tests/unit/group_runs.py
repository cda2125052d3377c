"""A group whose agents are stand-ins, run to its verdict."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from standins import BOUND, HELLO, READY, end, logger, says

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Failure, Verdict

WAITS = f"read prepare; {says(HELLO, READY)}; read next; read stop; {says(end(0, stopped=True))}"
LARGE = ("x" * 100_000,) * 10
"""Arguments that fit neither a pipe nor what asyncio keeps for one before a writer has to wait."""


def run(what: Launch, environ: dict[str, str] | None = None, stop_when: Path | None = None) -> Verdict:
    """Run the group; tell it to end once the file is there."""

    async def serve() -> Verdict:
        made, _ = logger("group")
        running = Group(what, {"PATH": os.environ["PATH"], **(environ or {})}, made, Copies())
        verdict = asyncio.create_task(running.run())
        while stop_when is not None and not stop_when.exists():
            assert not verdict.done()
            await asyncio.sleep(0.01)
        if stop_when is not None:
            running.stop("the test asked for it")
        return await asyncio.wait_for(verdict, BOUND)

    return asyncio.run(serve())


def failure(verdict: Verdict) -> Failure:
    assert verdict.failure is not None
    return verdict.failure


UP = wire.encode(wire.RankUp(0, 0, 1)).decode().strip()
ENDS = f"read stop; {says(end(0, stopped=True))}"
TRAINS = (
    f"read prepare; {says(HELLO, READY)}; read start; while [ ! -e $1/up ]; do sleep 0.02; done; {says(UP)};"
    f" {ENDS}"
)


def run_with(what: Launch, steps: Callable[[Group, list[str]], Awaitable[None]]) -> Verdict:
    """Run the group; the steps get it and the lines of its log while it lasts."""

    async def serve() -> Verdict:
        made, lines = logger("group")
        running = Group(what, {"PATH": os.environ["PATH"]}, made, Copies())
        verdict = asyncio.create_task(running.run())
        await asyncio.wait_for(steps(running, lines), BOUND)
        return await asyncio.wait_for(verdict, BOUND)

    return asyncio.run(serve())


async def said(lines: list[str], phase: str) -> None:
    while not any(line.startswith(f"task group standin: {phase}, ") for line in lines):
        await asyncio.sleep(0.01)
