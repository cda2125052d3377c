"""The supervisor's end of one agent: the client that connects, orders in, frames out, signs of life."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from nvflare_torchrun_plugin import transports, wire
from nvflare_torchrun_plugin.verdict import describe

CLOSING = 10.0
"""Seconds for the client to end once it has closed its output."""
KILL_BOUND = 2.0
"""Seconds for the client to be gone after SIGKILL, with all that holds its output open."""
_LAST_WORDS = 0.5
"""Seconds for what a client that has ended said on stderr; ssh's shared connection keeps that open for hours."""


class Channel:
    """One agent, from the start of the client that connects to it (ssh, srun, ...) to that client's end.

    Args:
        argv: the command, the agent's included.
        environ: the client's environment.
        node_timeout: seconds of silence after which an agent that has greeted is lost.
        on_frame: gets each frame.
        on_text: gets each line that is no frame: what a login shell, a client or a broken agent says.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        node_timeout: float,
        on_frame: Callable[[wire.Frame], None],
        on_text: Callable[[str], None],
    ) -> None:
        self._argv = argv
        self._environ = environ
        self._node_timeout = node_timeout
        self._on_frame = on_frame
        self._on_text = on_text
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: list[wire.Order] = []
        self._heard: float | None = None
        self._hearing = asyncio.Event()
        self._said_end = False
        self._lost = ""
        self._last_text = ""

    async def run(self) -> str:
        """Serve to the end of the client; return what is wrong, nothing when the agent has said its end."""
        frames, frames_end = os.pipe()
        errors, errors_end = os.pipe()
        try:
            # A session of its own: NVFlare's hard stop of the CJ's process group must not take the cleaner away.
            process = self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=frames_end,
                stderr=errors_end,
                env=self._environ,
                cwd="/",
                start_new_session=True,
            )
        except (OSError, ValueError) as e:
            os.close(frames)
            os.close(errors)
            return f"the agent cannot be started: {e}"
        finally:
            os.close(frames_end)
            os.close(errors_end)
        for order in self._waiting:
            self.post(order)
        reading = self._reading = asyncio.create_task(self._read_frames(frames))
        complaints = asyncio.create_task(self._read_errors(errors))
        beating = asyncio.create_task(self._keep_alive())
        try:
            await asyncio.wait([reading])
            # With its orders closed, nothing that others hold open keeps this from its end.
            self._close_orders()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSING)
            self.kill()
            await process.wait()
            await asyncio.wait([complaints], timeout=_LAST_WORDS)
        finally:
            # Whoever gives up on it must not kill it: an agent that gets no more orders ends everything first.
            self._close_orders()
            for task in (reading, complaints, beating):
                task.cancel()
        return self._lost or ("" if self._said_end else self._how_it_ended(process.returncode or 0))

    def post(self, order: wire.Order) -> None:
        """Send an order without waiting for it to arrive; an agent that is gone is noticed by its end."""
        if self._process is None:
            self._waiting.append(order)
        elif self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(wire.encode(order))

    async def answers(self, bound: float) -> bool:
        """Ask the agent for a sign of life, unless it has not even greeted yet; return False if it is silent.

        It is lost then. One that has ended is not: of its end others tell.
        """
        if self._heard is None or self._reading is None:
            return True
        self._hearing.clear()
        self.post(wire.Ping())
        hearing = asyncio.create_task(self._hearing.wait())
        done, _ = await asyncio.wait([hearing, self._reading], timeout=bound, return_when=asyncio.FIRST_COMPLETED)
        hearing.cancel()
        if not done:
            self._lose(f"no answer from it within {bound:g} s")
        return bool(done)

    async def drained(self) -> None:
        """Wait until what was posted is on its way."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                await self._process.stdin.drain()

    def kill(self) -> None:
        """End the client, if it is still there. The agent then ends everything on its node by itself."""
        if self._process is None or self._process.returncode is not None:
            return
        # It leads a session of its own, so nothing else is hit.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._reading is not None:
            # Something that is not ours may hold its output open, as ssh's master for shared connections does.
            asyncio.get_running_loop().call_later(KILL_BOUND, self._reading.cancel)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self.kill()

    def _close_orders(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def _read_frames(self, pipe: int) -> None:
        try:
            async for line in _lines(pipe):
                self._take(line)
        except ValueError:
            self._lose(f"the agent sent a line of more than {wire.MAX_MESSAGE} bytes")

    def _take(self, line: bytes) -> None:
        try:
            frame = wire.decode_frame(line)
        except wire.WireError:
            self._say(line)
            return
        self._heard = asyncio.get_running_loop().time()
        self._hearing.set()
        self._said_end = self._said_end or isinstance(frame, wire.End)
        if not isinstance(frame, wire.Beat):
            self._on_frame(frame)

    async def _read_errors(self, pipe: int) -> None:
        try:
            async for line in _lines(pipe):
                self._say(line)
        except ValueError:
            self._say(b"(a line of more than a few MiB on stderr, and all that follows, is left out)")

    def _say(self, line: bytes) -> None:
        text = line.decode(errors="backslashreplace").strip()
        if text:
            self._last_text = text
            self._on_text(text)

    async def _keep_alive(self) -> None:
        clock = asyncio.get_running_loop().time
        pause = self._node_timeout / wire.BEATS
        while True:
            before = clock()
            await asyncio.sleep(pause)
            # After a time in which this process itself did not run, what the agent said waits to be read.
            slept_well = clock() - before < 2 * pause
            if self._heard is None:
                continue
            if slept_well and clock() - self._heard > self._node_timeout:
                self._lose(f"no sign of life from it for {self._node_timeout:g} s (node_timeout)")
                return
            self.post(wire.Ping())

    def _how_it_ended(self, code: int) -> str:
        client = transports.client(self._argv)
        if self._heard is not None:
            return f"its agent (or {client}, which connects it) ended with {describe(code)}"
        words = f": {self._last_text}" if self._last_text else ""
        return f"no agent could be started there, {client} ended with {describe(code)}{words}"


async def _lines(pipe: int) -> AsyncIterator[bytes]:
    """Yield the lines that come out of a pipe, and close it.

    Raises:
        ValueError: a line is longer than any message.
    """
    reader = asyncio.StreamReader(wire.MAX_MESSAGE)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", buffering=0)
    )
    try:
        while line := await reader.readline():
            yield line
    finally:
        transport.close()


async def sweep(argv: Sequence[str], environ: Mapping[str, str], tag: str, timeout: float) -> str:
    """Have a new agent end what one that died has left of the start with this tag.

    Returns:
        Why it is not confirmed that all is gone; nothing when it is.
    """
    channel = Channel(argv, environ, timeout, lambda _frame: None, lambda _text: None)
    channel.post(wire.Sweep(tag))
    try:
        return await asyncio.wait_for(channel.run(), timeout)
    except asyncio.TimeoutError:
        channel.kill()
        return f"looking for what is left there took more than {timeout:g} s"
    except OSError as e:
        # No descriptor is free, for one.
        return f"no agent could be started for that: {e}"
