"""``nvflare-torchrun run``: torchrun over a node group, from the shell and without NVFlare."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .asked import GroupAsked, ProgramAsked, takes_what_is_asked
from .live import Screen, as_json, as_text
from .output import JsonOption, RefusedError, complain, give_output_up, has_no_cursor, is_plain, tell

if TYPE_CHECKING:
    from ..launching.planning import Plan
    from ..supervision.group import Group
    from ..verdict import Verdict

__all__ = ["EPILOG", "run"]

EPILOG = (
    "Example: nvflare-torchrun run --nodes gpu-0,gpu-1 --nproc-per-node 8 train.py --lr 0.1\n\n"
    "Exit codes: 0 every rank ended with 0; 1 the group failed; 2 it makes no sense, nothing was started;"
    " 130 it was stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP."
)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
_TICK = 0.5
"""Seconds between two looks at the progress."""


@takes_what_is_asked
def run(asked: GroupAsked, program: ProgramAsked, as_json_lines: JsonOption = False) -> None:
    """Run a script under torchrun on all nodes of a group, and show what its ranks print.

    Each line begins with node:rank. The first rank that fails ends the group on all nodes; Ctrl-C does, too. The
    nodes need this package, and the script under the same path (or --copy).
    """
    directory = Path.cwd()
    logs = program.log_dir(directory)
    plan = program.plan(asked.group(os.environ), directory, logs)
    try:
        if logs.exists() and any(logs.iterdir()):
            raise RefusedError(f"{logs} is not empty: --run-dir names a new folder, or one that is")
    except OSError as error:
        raise RefusedError(f"{logs} cannot be used: {error.strerror}; --run-dir names a new folder") from None
    with _locked(asked.workspace, plan):
        verdict, received = _Running(plan, as_json_lines).run()
    code = 128 + received if received else int(verdict.outcome != "ok")
    raise typer.Exit(_tell(verdict, logs, code, as_json_lines))


class _Running:
    """One run: what it shows, and the signals that end it."""

    def __init__(self, plan: Plan, json_lines: bool) -> None:
        self._plan = plan
        self._json_lines = json_lines
        self._received = 0
        self._handled: list[signal.Signals] = []

    def run(self) -> tuple[Verdict, int]:
        """Run the group; return its verdict and the signal that has ended it, 0 for none.

        Raises:
            RefusedError: it cannot be planned.
        """
        from ..launching.planning import PlanError
        from ..launching.program import ProgramError

        try:
            return asyncio.run(self._serve()), self._received
        except (PlanError, ProgramError, OSError) as error:
            raise RefusedError(str(error)) from None

    async def _serve(self) -> Verdict:
        from ..supervision import standalone

        loop = asyncio.get_running_loop()
        groups: list[Group] = []

        def stop(reason: str) -> None:
            for group in groups:
                group.stop(reason)

        has_line = sys.stderr.isatty() and not has_no_cursor()
        screen = Screen(
            sys.stdout,
            sys.stderr if has_line else None,
            as_json if self._json_lines else as_text(coloured=sys.stdout.isatty() and not is_plain()),
            lambda why: loop.call_soon_threadsafe(stop, why),
        )
        self._handle_signals(stop, groups)
        watching = loop.create_task(_watch(screen, groups))
        try:
            return await standalone.run(self._plan, os.environ, _logger(has_line), screen.show, groups.append)
        finally:
            watching.cancel()
            # Nothing is left to be ended, and what is shown last may wait for its reader.
            self._give_signals_back()
            screen.close()

    def _handle_signals(self, stop: Callable[[str], None], groups: list[Group]) -> None:
        loop = asyncio.get_running_loop()

        def end(number: signal.Signals) -> None:
            self._received = number
            stop(f"got {number.name}")
            # A second one ends this process at once, and the nodes then end everything by themselves.
            self._give_signals_back()

        def announce(number: signal.Signals) -> None:
            for group in groups:
                group.signal(number)

        # nohup, and a shell's background, ignore some; so it stays.
        self._handled = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        for number in self._handled:
            loop.add_signal_handler(number, end, number)
        for number in _NOTICES:
            loop.add_signal_handler(number, announce, number)

    def _give_signals_back(self) -> None:
        for number in self._handled:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)


async def _watch(screen: Screen, groups: list[Group]) -> None:
    began = time.monotonic()
    while True:
        for group in groups:
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            ranks = f", ranks: {group.ranks}" if group.ranks else ""
            screen.progress(f"{group.phase} {minutes}:{seconds:02}{ranks}  (Ctrl-C ends it on all nodes)")
        await asyncio.sleep(_TICK)


@contextmanager
def _locked(workspace: Path | None, plan: Plan) -> Iterator[None]:
    """Keep the site's jobs away from its nodes, and wait for those that are there, as its node group says."""
    from ..description.group_description import is_this_host
    from ..launching import node_locks

    group = plan.group
    if workspace is None or group.on_busy == "share" or all(is_this_host(node.host) for node in group.nodes[1:]):
        yield
        return
    locks = node_locks.NodeLocks(
        str(workspace.absolute() / node_locks.FOLDER), "nvflare-torchrun run", lambda text: complain(text)
    )
    timeout = group.busy_timeout if group.on_busy == "wait" else 0.0
    try:
        locks.acquire([node.host for node in group.nodes], timeout, lambda: False)
    except node_locks.BusyError as error:
        complain(str(error))
        raise typer.Exit(1) from None
    try:
        yield
    finally:
        locks.release()


def _logger(has_line: bool) -> logging.Logger:
    """Return what the group writes to: stderr, with the command's name in front.

    Args:
        has_line: whether a line shows how far it is; else it is told as it goes on.
    """
    logger = logging.Logger("nvflare-torchrun", logging.WARNING if has_line else logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("nvflare-torchrun: %(message)s"))
    logger.addHandler(handler)
    return logger


def _tell(verdict: Verdict, logs: Path, code: int, json_lines: bool) -> int:
    """Say how it has ended; return the exit code, which a verdict that cannot be written makes 1."""
    tell(f"{verdict.text()}\nlogs and verdict: {logs}\n")
    last = {"verdict": verdict.as_dict(), "exit_code": code, "run_dir": str(logs)}
    try:
        sys.stdout.write(json.dumps(last) + "\n" if json_lines else "")
        sys.stdout.flush()
    except OSError as error:
        give_output_up(error)
        return code or 1
    return code
