"""A directory that only this user can enter, with Unix stream sockets in it (standard library only).

The kernel limits the path of a Unix socket to 107 bytes, and TMPDIR may be longer. So sockets are bound and
reached through an open descriptor of the directory (``/proc/self/fd/N/name``), which is always short.

What only :func:`create` and :func:`remove` need is imported there: each rank and relay starts with a
:func:`connect`, and would wait for it.
"""

from __future__ import annotations

import os
import socket

_NEW = 60.0
"""Seconds in which a directory that nobody holds may be one that is just being made."""


def create(prefix: str) -> str:
    """Create a directory with mode 0700 below TMPDIR and return its absolute path.

    The caller owns it and ends it with :func:`remove`.

    Raises:
        OSError: TMPDIR cannot be written.
    """
    import tempfile
    from pathlib import Path

    return str(Path(tempfile.mkdtemp(prefix=prefix)).absolute())


def hold(directory: str) -> int:
    """Mark the directory as in use until this process ends, however it does; return the descriptor that does it.

    Raises:
        OSError: the file system has no locks.
    """
    import fcntl

    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove_stale(prefix: str) -> None:
    """Remove this user's directories with the prefix whose makers, which held them, were killed."""
    import glob
    import tempfile
    import time

    for directory in glob.glob(f"{glob.escape(tempfile.gettempdir())}/{glob.escape(prefix)}*"):  # noqa: PTH207
        try:
            status = os.lstat(directory)
            # A new one is not held yet.
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > _NEW:
                os.close(hold(directory))
                remove(directory)
        except OSError:
            continue


def remove(directory: str) -> None:
    """Remove the directory and what is in it; one that is gone already is fine."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def listen(directory: str, name: str) -> socket.socket:
    """Return a listening socket named ``name`` in ``directory``.

    Asyncio serves it with ``start_server``: from Python 3.13 on, ``start_unix_server`` sees to the socket's file
    too, and looks for that under the path that was used here, which leads somewhere else by then.

    Raises:
        OSError: the directory is gone or the name is taken.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _Opened(directory) as short:
            server.bind(f"{short}/{name}")
        server.listen(socket.SOMAXCONN)
    except BaseException:
        server.close()
        raise
    return server


def connect(directory: str, name: str) -> socket.socket:
    """Return a socket connected to the one that :func:`listen` made.

    Raises:
        OSError: nobody listens there.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _Opened(directory) as short:
            client.connect(f"{short}/{name}")
    except BaseException:
        client.close()
        raise
    return client


class _Opened:
    """A directory held open, under a path that is short whatever its own is."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._fd = -1

    def __enter__(self) -> str:
        self._fd = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}"

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
