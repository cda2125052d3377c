"""Nodes that another job of the same site uses: a lock per node in the site's workspace.

NVFlare runs jobs side by side and arbitrates what this host has, not what other hosts have.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

FOLDER = "node_locks"
"""Folder in the site's workspace that holds the locks."""
_POLL = 0.2
"""Seconds between two looks at a busy node."""


class BusyError(RuntimeError):
    """A node is in use by another job; the message says which node, by whom, and what to do."""


class NodeLocks:
    """The locks of one job, held while any of its attempts lasts.

    A task's attempt may begin while the one before still serves its result; both are the same job's. The
    kernel drops a lock (``flock(2)``) with its holder, so none is ever stale; the text in the file only says
    whose it is.

    Args:
        directory: where the lock files are, made when missing.
        owner: what others are told who wait for this job.
        tell: gets one sentence for each busy node that is waited for.
    """

    def __init__(self, directory: str, owner: str, tell: Callable[[str], None]) -> None:
        self._directory = directory
        self._owner = owner
        self._tell = tell
        self._held: list[TextIO] = []
        self._users = 0
        self._counting = threading.Lock()

    def acquire(self, hosts: Sequence[str], timeout: float, cancelled: Callable[[], bool]) -> None:
        """Lock every host, in an order that is the same for everybody; each call needs a :meth:`release`.

        Args:
            hosts: the job's nodes, the same at every call.
            timeout: seconds to wait for all of them together.
            cancelled: whether to stop waiting.

        Raises:
            BusyError: one is still busy after that time, or waiting was cancelled, or the directory cannot be
                written; none is held then.
        """
        with self._counting:
            if self._users == 0:
                try:
                    self._lock_all(hosts, time.monotonic() + timeout, cancelled)
                except BaseException:
                    self._unlock_all()
                    raise
            self._users += 1

    def release(self) -> None:
        """Let others have the nodes, if no other attempt of the job is there."""
        with self._counting:
            self._users -= 1
            if self._users == 0:
                self._unlock_all()

    def _lock_all(self, hosts: Sequence[str], deadline: float, cancelled: Callable[[], bool]) -> None:
        try:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
            for host in sorted(set(hosts)):
                self._lock(Path(self._directory, _file_name(host)), host, deadline, cancelled)
        except OSError as e:
            raise BusyError(f"cannot lock the nodes in {self._directory}: {e}") from None

    def _unlock_all(self) -> None:
        for file in self._held:
            with contextlib.suppress(OSError):
                file.truncate(0)
            file.close()
        self._held.clear()

    def _lock(self, path: Path, host: str, deadline: float, cancelled: Callable[[], bool]) -> None:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+", encoding="utf-8")
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            whose = f"node {host} is in use by {_owner_in(file)}"
            if cancelled() or time.monotonic() >= deadline:
                file.close()
                raise BusyError(
                    f"{whose}: wait for its end, or set on_busy and busy_timeout of the node group otherwise"
                )
            if not told:
                self._tell(f"{whose}: waiting up to {deadline - time.monotonic():.0f} s (on_busy)")
                told = True
            time.sleep(_POLL)
        file.seek(0)
        file.truncate(0)
        json.dump({"owner": self._owner, "pid": os.getpid()}, file)
        file.flush()
        self._held.append(file)


def _owner_in(file: TextIO) -> str:
    file.seek(0)
    try:
        said = json.loads(file.read(4096))
        return f"{said['owner']} (process {said['pid']})"
    except (ValueError, KeyError, TypeError):
        # Its holder is just writing it.
        return "another job"


def _file_name(host: str) -> str:
    # A host's name may hold what a file's cannot; the digest keeps two such names apart.
    readable = "".join(c if c.isalnum() or c in "-." else "_" for c in host)[:100]
    return f"{readable}-{hashlib.sha256(host.encode()).hexdigest()[:8]}.lock"
