"""The node agent's event loop: one thread, many sources, one output that never blocks (standard library only)."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable

CHUNK = 1 << 16
"""Bytes taken from a source in one go."""
_HIGH = 4 << 20
"""Bytes waiting to go out above which throttled sources rest."""


class Loop:
    """Watches descriptors and sends bytes to ``output``.

    A slow reader at the other end must stop neither the watch over processes nor an order to end them. So
    what cannot be written is kept, and above a few MiB the throttled sources (the ranks' output) rest, which
    in turn makes the ranks wait in their writes. Once nobody reads any more, output is dropped.
    """

    def __init__(self, output: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._output = output
        self._outbox = bytearray()
        self._broken = False
        self._readers: dict[int, Callable[[], None]] = {}
        self._throttled: set[int] = set()
        os.set_blocking(output, False)

    def watch(self, fd: int, reader: Callable[[], None], *, throttled: bool = False) -> None:
        """Call ``reader`` whenever the descriptor can be read."""
        self._readers[fd] = reader
        if throttled:
            self._throttled.add(fd)
        self._update(fd)

    def forget(self, fd: int) -> None:
        """Watch the descriptor no more; the caller closes it."""
        self._readers.pop(fd, None)
        self._throttled.discard(fd)
        self._update(fd)

    def wake_on_signals(self) -> None:
        """Let every handled signal end a :meth:`poll` at once (``signal.set_wakeup_fd``)."""
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                reading.recv(CHUNK)

        self.watch(reading.fileno(), drain)

    def send(self, data: bytes) -> None:
        """Send or keep the bytes."""
        if not self._broken:
            self._outbox += data
            self._flush()

    @property
    def idle(self) -> bool:
        """Whether all throttled sources have ended and everything has been sent."""
        return not self._throttled and not self._outbox

    @property
    def sent(self) -> bool:
        """Whether everything has been sent, or nobody reads any more."""
        return not self._outbox

    def poll(self, timeout: float | None) -> None:
        """Wait up to ``timeout`` seconds (None: until something happens) and serve what is there."""
        for key, events in self._selector.select(timeout):
            if events & selectors.EVENT_WRITE:
                self._flush()
            if events & selectors.EVENT_READ and key.fd in self._readers:
                self._readers[key.fd]()

    def _flush(self) -> None:
        was_high = len(self._outbox) > _HIGH
        try:
            while self._outbox:
                del self._outbox[: os.write(self._output, self._outbox[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._broken = True
            self._outbox.clear()
        self._update(self._output)
        if was_high != (len(self._outbox) > _HIGH) or self._broken:
            for fd in self._throttled:
                self._update(fd)

    def _update(self, fd: int) -> None:
        """Tell the selector what is wanted of the descriptor now."""
        rests = fd in self._throttled and len(self._outbox) > _HIGH
        wanted = selectors.EVENT_READ if fd in self._readers and not rests else 0
        if fd == self._output and self._outbox:
            wanted |= selectors.EVENT_WRITE
        watched = fd in self._selector.get_map()
        if watched and not wanted:
            self._selector.unregister(fd)
        elif watched:
            self._selector.modify(fd, wanted)
        elif wanted:
            self._selector.register(fd, wanted)
