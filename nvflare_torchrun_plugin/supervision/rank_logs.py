"""Where the ranks' lines go: the client's log, and one file per rank."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

Show = Callable[[int, int | None, str], None]
"""Takes a line to be seen at once: node rank, rank (None: torchrun's own), text."""


class RankLogs:
    """Writes the output of one attempt.

    Args:
        directory: made when missing; gets ``rank-N.log`` for each rank, ``node-N.log`` for torchrun's own
            lines and those of the transport.
        logger: gets every line at INFO, after ``node N rank R | ``.
        shown: global ranks whose lines reach the logger; None means all.
        show: gets the lines in place of the logger.
    """

    def __init__(
        self,
        directory: str,
        logger: logging.Logger,
        shown: frozenset[int] | None,
        show: Show | None = None,
    ) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._logger = logger
        self._shown = shown
        self._show = show or self._to_logger
        self._files: dict[str, TextIO] = {}
        self._lost: set[str] = set()

    def path(self, node_rank: int, rank: int | None) -> str:
        """Return the path of a rank's file, or of its node's when ``rank`` is None."""
        return str(self._directory / (f"node-{node_rank}.log" if rank is None else f"rank-{rank}.log"))

    def write(self, node_rank: int, rank: int | None, text: str, *, to_log: bool = True) -> None:
        """Write one line to its file, and to the log if ``to_log``."""
        self._write_file(self.path(node_rank, rank), text)
        if to_log and (rank is None or self._shown is None or rank in self._shown):
            self._show(node_rank, rank, text)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()

    def _to_logger(self, node_rank: int, rank: int | None, text: str) -> None:
        if rank is None:
            self._logger.info("node %d | %s", node_rank, text)
        else:
            self._logger.info("node %d rank %d | %s", node_rank, rank, text)

    def _write_file(self, path: str, text: str) -> None:
        """Write the line out at once: whoever kills this process wants to read how far the ranks came."""
        if path in self._lost:
            return
        try:
            file = self._files.get(path)
            if file is None:
                file = open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
                self._files[path] = file
            file.write(text + "\n")
        except OSError as e:
            # A full disk, or too many files, must end no rank.
            self._lost.add(path)
            self._logger.warning("cannot write %s, its lines from here on are only here: %s", path, e)
