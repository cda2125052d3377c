"""Notes when a task reaches the site's executor and when that has returned, what it holds, and the group's end."""

import ctypes
import gc
import json
import os
import tempfile
import threading
import time
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext

_POLL = 0.02
_BOUND = 600.0


class Clock(FLComponent):  # type: ignore[misc] # NVFlare has no types
    """Adds a line to a file just before the executor gets a task; to others beside it when it has returned, and
    when the processes that the ranks have noted there, as far as they are below this
    one, are gone."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            self._note("arrived", time.time())
        elif event_type == EventType.AFTER_TASK_EXECUTION:
            self._note("returned", time.time())
            pids = Path(self.file).with_name("pids")
            if pids.exists():
                threading.Thread(target=self._watch, args=(pids.rename(pids.with_name("leaving")),)).start()
            self._note("held", held())

    def _watch(self, pids: Path) -> None:
        group = {pid for line in pids.read_text().splitlines() for pid in below(json.loads(line))}
        deadline = time.monotonic() + _BOUND
        while any(Path(f"/proc/{pid}").exists() for pid in group) and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._note("gone", time.time())

    def _note(self, name: str, what: object) -> None:
        with Path(self.file).with_name(name).open("a") as file:
            file.write(f"{json.dumps(what)}\n")


def below(ancestry: list[int]) -> list[int]:
    """Return the part of a line of ancestors that is below this process."""
    own = Path("/proc/self").resolve().name
    return ancestry[: ancestry.index(int(own))] if int(own) in ancestry else ancestry


def held() -> dict[str, int]:
    """Return what this process holds: KiB of memory, descriptors, sockets among them, threads, processes below it
    and temporary files of theirs.

    What only waits for Python's collector or for the C library to give it back does not count: there may be as
    much of it after one task as after many.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]
    descriptors = list(map(_target, Path("/proc/self/fd").iterdir()))
    return {
        "memory": int(resident),
        "descriptors": len(descriptors),
        "sockets": sum(target.startswith("socket:") for target in descriptors),
        "threads": threading.active_count(),
        "processes": len(_descendants()),
        "files": sum(path.name.startswith("nvfl") for path in Path(tempfile.gettempdir()).iterdir()),
    }


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except FileNotFoundError:  # that of the folder itself
        return ""


def _descendants() -> set[str]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[stat.parent.name] = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it has just ended
            continue
    found, last = {str(os.getpid())}, 0
    while len(found) > last:
        last = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {str(os.getpid())}
