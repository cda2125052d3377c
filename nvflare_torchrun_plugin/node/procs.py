"""Processes as /proc shows them: descendants, survivors of a run, exit codes (Linux, standard library only)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable

_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's (``prctl(2)``).

    A rank whose torchrun was killed stays below the agent in this way, and so can be found and ended.

    Raises:
        OSError: the kernel refuses.
    """
    # Nobody who starts nothing needs it: an agent must greet within milliseconds.
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(ancestor: int) -> list[int]:
    """Return the ids of all living processes below ``ancestor``, zombies left out."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None:
            children.setdefault(int(stat[1]), []).append(pid)
            if stat[0] == "Z":
                zombies.add(pid)
    found: list[int] = []
    pending = [ancestor]
    while pending:
        below = children.get(pending.pop(), [])
        pending += below
        found += below
    return [pid for pid in found if pid not in zombies]


def with_variable(name: str, part: str) -> list[int]:
    """Return the ids of this user's processes, this one left out, started with ``part`` in the variable."""
    start, wanted = f"{name}=".encode(), part.encode()
    found = []
    for pid in _pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = file.read().split(b"\0")
            if any(variable.startswith(start) and wanted in variable for variable in variables):
                found.append(pid)
    return found


def parent(pid: int) -> int | None:
    """Return the parent's id, or None when the process is gone."""
    stat = _stat(pid)
    return int(stat[1]) if stat is not None else None


def check_child(peer: socket.socket) -> None:
    """Let in, at a Unix socket, only what has been started in this very process.

    Raises:
        PermissionError: it is another user's process, or not our child.
    """
    import struct

    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid() or parent(pid) != os.getpid():
        raise PermissionError(f"process {pid} of user {uid} is not a child of this client job")


def runs(pid: int) -> bool:
    """Return whether the process is there and has not ended."""
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def is_stopped(pid: int) -> bool:
    """Return whether a signal (SIGSTOP) has stopped the process; a debugger that holds it is another state."""
    stat = _stat(pid)
    return stat is not None and stat[0] == "T"


def holds(pid: int, path: str) -> bool:
    """Return whether the process has the file or directory open.

    Raises:
        OSError: it is gone, or another user's.
    """
    directory = f"/proc/{pid}/fd"
    for fd in os.listdir(directory):  # noqa: PTH208 - pathlib is slower
        with contextlib.suppress(OSError):
            if os.path.samefile(f"{directory}/{fd}", path):  # noqa: PTH121 - pathlib is slower
                return True
    return False


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether ``pid`` descends from ``ancestor``."""
    above = parent(pid)
    while above is not None and above > 1 and above != ancestor:
        above = parent(above)
    return above == ancestor


def exit_code_of_zombie(pid: int) -> int | None:
    """Return the exit code (or minus the signal's number) of an ended process that nobody collected yet.

    None when it was collected already, or still runs. Field 52 of ``/proc/PID/stat`` (``proc(5)``) holds the
    wait status for those who may trace the process, as its user may.
    """
    stat = _stat(pid)
    if stat is None or stat[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(stat[49]))


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal each process; those that are gone, or became another user's (sudo), are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def signal_name(code: int) -> str:
    """Return ``SIGKILL`` for -9, ``exit code 3`` for 3."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - pathlib takes long to import


def _stat(pid: int) -> list[str] | None:
    """Return the fields from ``state`` (3) on; the name before them may hold blanks and parentheses."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        # Gone, or another user's where /proc is mounted with hidepid.
        return None
