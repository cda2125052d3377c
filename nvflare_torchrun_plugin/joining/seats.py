"""Who of a group's nodes is there: each has a seat, and in it its idle connection (asyncio, in the CJ)."""

from __future__ import annotations

import asyncio
import contextlib

from nvflare_torchrun_plugin.joining import join_link
from nvflare_torchrun_plugin.joining.greeting import Greeting


class Idle:
    """A node's idle connection.

    Attributes:
        node: whose it is.
        watching: done at the end of the connection, or at a word out of turn.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, node: Greeting) -> None:
        self.reader = reader
        self.writer = writer
        self.node = node
        self.watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        with contextlib.suppress(OSError):
            await self.reader.read(1)

    async def leave(self, kind: str, reason: str) -> None:
        """Say the last word."""
        self.watching.cancel()
        join_link.say(self.writer, kind, reason)
        await join_link.part(self.writer)

    async def release(self) -> bool:
        """Leave the reader to somebody else; return whether the node is still there."""
        self.watching.cancel()
        await asyncio.wait({self.watching})
        # The loop may take some rounds to take note of an end that the kernel knows of already.
        ended = self.reader.at_eof() or join_link.has_ended(self.writer)
        return self.watching.cancelled() and not ended

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let the node start its agent, and connect that with a bridge until either ends."""
        join_link.say(self.writer, "start", "")
        try:
            ways = [
                asyncio.create_task(join_link.pass_on(reader, self.writer)),
                asyncio.create_task(
                    join_link.pass_on(self.reader, writer, lambda: join_link.leave_alone(self.writer))
                ),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
        finally:
            await join_link.part(self.writer)


class Seat:
    """What is known of one node.

    Attributes:
        node_rank: its node rank.
        name: its name, for people and for whoever asks for its connection.
        idle: the connection, None while there is none.
        came: set while there is one.
        instance: which process came last, None when none has come yet.
        host: where that runs.

    Args:
        node_rank: as above.
        name: as above.
        opened: the loop's time from which the node is waited for.
    """

    def __init__(self, node_rank: int, name: str, opened: float) -> None:
        self.node_rank = node_rank
        self.name = name
        self.idle: Idle | None = None
        self.came = asyncio.Event()
        self.instance: str | None = None
        self.host: str | None = None
        self._since = opened

    def put(self, idle: Idle | None) -> None:
        """Take note of the idle connection, or that there is none any more."""
        self.idle = idle
        self._since = asyncio.get_running_loop().time()
        if idle is None:
            self.came.clear()
        else:
            self.instance, self.host = idle.node.instance, idle.node.names[0]
            self.came.set()

    async def take(self, wait: float, asking: asyncio.StreamReader) -> Idle | str:
        """Return the connection, which is nobody else's then, or why there is none.

        Args:
            wait: seconds that a node which is not there has to come, from when it was last seen.
            asking: of whoever asks, and says nothing before it is served: what there is to read is its end.
        """
        loop = asyncio.get_running_loop()
        deadline = wait + (self._since if self.idle is None else loop.time())
        gone = asyncio.ensure_future(asking.read(1))
        try:
            while True:
                if (idle := self.idle) is not None:
                    self.put(None)
                    if await idle.release():
                        return idle
                    # It was on its way out. The next one may be on its way in.
                    idle.writer.transport.abort()
                coming = asyncio.ensure_future(self.came.wait())
                left = max(deadline - loop.time(), 0.0)
                await asyncio.wait({gone, coming}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                coming.cancel()
                if gone.done():
                    return "nobody waits for it any more"
                if self.idle is None and loop.time() >= deadline:
                    return self._absent(loop.time())
        finally:
            gone.cancel()
            await asyncio.wait({gone})

    def _absent(self, now: float) -> str:
        ago = f"{now - self._since:.0f} s"
        if self.host is None:
            return (
                f"node rank {self.node_rank} is absent: nobody has joined as that since {ago} ago; does 'python -m"
                " nvflare_torchrun_plugin.node_agent --join' run there, and what does it print"
            )
        return f"node rank {self.node_rank} is absent: last seen {ago} ago, on host {self.host}"
