"""What happened when: one JSON object a line, written as it happens, so that it is there whatever ends the writer.

Two files of a run tell it. ``tasks.jsonl`` holds the job's tasks (written by the executor), ``events.jsonl``
beside each group's logs what became of the group and its nodes (written by the supervisor). Times are seconds
since 1970 on the client job's host: what nodes tell in their own clocks is told in that one. :mod:`.timeline`
reads both.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

GROUP_FILE = "events.jsonl"
TASKS_FILE = "tasks.jsonl"


class EventLog:
    """Appends events to a file; any thread may write.

    Args:
        path: the file; its folder is made when the first event comes.
        warn: gets a sentence, once, when it cannot be written. Nothing else comes of that.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path = path
        self._warn = warn
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        self._lost = False

    def write(self, event: str, ago: float = 0.0, **fields: object) -> None:
        """Write one event.

        Args:
            event: its name.
            ago: seconds since it happened.
            fields: what else is known of it, ready for JSON.
        """
        line = json.dumps({"event": event, "at": round(time.time() - ago, 3), **fields}) + "\n"
        with self._lock:
            if self._lost:
                return
            try:
                if self._file is None:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._file = open(self._path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
                self._file.write(line)
            except OSError as e:
                self._lost = True
                self._warn(f"cannot write {self._path}, the timeline ends here: {e}")

    def close(self) -> None:
        """Close the file; a later event opens it again."""
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            self._file = None
