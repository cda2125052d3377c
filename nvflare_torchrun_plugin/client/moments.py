"""Tells the node's agent how far a task is on this node: it receives, has received, sends, has sent.

The agent's connection is the one that the rank got its orders by. It is found by the name of its other end: a
variable with its number would be one more thing that a script and its children see.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time

_AGENT = re.compile(r"/proc/self/fd/\d+/ranks")
"""How :mod:`nvflare_torchrun_plugin.node.private_dir` binds what the agent listens on (``SOCKET_NAME``)."""


class Moments:
    """This process's way to tell; without an agent, nothing is told."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._fd = _connection_to_agent()

    def tell(self, moment: str) -> None:
        """Tell it, with the time (``time.monotonic()``), if that takes none; what does not get through is lost.

        An agent that is kept waiting for a core hears of it only after what came next.
        """
        if self._fd is None or os.getpid() != self._process:
            return
        message = json.dumps({"moment": moment, "at": time.monotonic()}).encode() + b"\n"
        with contextlib.suppress(OSError):
            if not _leads_to_agent(self._fd):
                return
            connection = socket.socket(fileno=self._fd)
            try:
                connection.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            finally:
                connection.detach()


def _connection_to_agent() -> int | None:
    numbers: list[int] = []
    with contextlib.suppress(OSError):
        numbers = sorted(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are wanted
    return next((number for number in numbers if _leads_to_agent(number)), None)


def _leads_to_agent(fd: int) -> bool:
    try:
        connection = socket.socket(fileno=fd)
    except OSError:  # closed, or no socket
        return False
    try:
        if connection.family != socket.AF_UNIX:
            return False
        name = connection.getpeername()
        return isinstance(name, str) and _AGENT.fullmatch(name) is not None
    except OSError:
        return False
    finally:
        connection.detach()
