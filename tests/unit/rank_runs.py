"""Runs a script plainly and as a rank, at once or after a wait, and compares the two.

The agent is a stand-in (fake_agent); everything else is real: interpreters, pipes, sockets, children, signals.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_agent
import pytest
from fake_agent import Ended, RankEnded, run_plain, run_rank

# What scripts here import, and more: parents and children, and what Python has loaded at its start in part.
PRELOAD = (
    "json",
    "random",
    "xml.etree:ElementTree",
    "importlib.metadata",
    "concurrent.futures:ThreadPoolExecutor",
    "multiprocessing.pool",
    "no.such:module",
    "logging.handlers",
)


@pytest.fixture(params=[pytest.param(None, id="cold"), pytest.param(PRELOAD, id="warm", marks=pytest.mark.slow)])
def cold_and_warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test for a rank that becomes its script at once, and for one that has imported and waited before."""
    monkeypatch.setattr(fake_agent.start, "preload", request.param)


def both(words: list[str], cwd: Path, **given: Any) -> tuple[Ended, RankEnded]:
    """Run the same words plainly and as a rank; nothing may have gone to the pipe that torchrun inherited."""
    plain = run_plain(words, cwd, given.get("environ"), given.get("options", ()))
    rank = run_rank(words, cwd, **given)
    assert rank.torchrun_output == b""
    return plain, rank


def same(words: list[str], cwd: Path, **given: Any) -> RankEnded:
    """Compare what a script prints and how it ends; return how the rank ended."""
    plain, rank = both(words, cwd, **given)
    # Line by line: so a failure shows the line that differs.
    assert [*rank.output.splitlines(keepends=True), rank.code] == [
        *plain.output.splitlines(keepends=True),
        plain.code,
    ]
    return rank


def write(cwd: Path, files: Mapping[str, str | bytes]) -> None:
    for name, text in files.items():
        path = cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
