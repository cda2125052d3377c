"""The supervisor: a thread in the CJ that meets the relays and runs one group for each.

It outlives the tasks of a job: what must be known from one attempt to the next belongs here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node import private_dir, procs
from nvflare_torchrun_plugin.supervision.attempt import Attempt
from nvflare_torchrun_plugin.supervision.copies import CLOSE_BOUND, Copies
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervision.group_ahead import Ahead
from nvflare_torchrun_plugin.supervision.relay_connection import RelayConnection

_T = TypeVar("_T")
_DIRECTORY = "nvfl-supervisor-"
_CALL_BOUND = 10.0
"""Seconds for the supervisor's thread to take an order; it never does more than a moment's work at a time."""
_GREETING_BOUND = 10.0
"""Seconds for a relay to say all that it has to say."""
_LATE_RESULT_BOUND = 10.0
"""Seconds for a rank 0 whose result was accepted to finish serving it once the run has ended."""
_MAX_ENVIRON = 16 << 20
"""Bytes of the relay's first message; the kernel allows an environment of a few MiB."""


class Service(Protocol):
    """Something that groups need while they live, in the supervisor's thread."""

    async def open(self, directory: str) -> None:
        """Begin; the directory is the supervisor's private one."""

    async def close(self, reason: str) -> None:
        """End; no group is there any more."""


class Supervisor:
    """Starts a group whenever a relay of this CJ connects.

    Args:
        logger: gets the ranks' lines at INFO, warnings and errors.
        given_up: asked when NVFlare, in this very process, has ended a relay: why it has given up on rank 0; None
            when it was told to end the task.

    Raises:
        OSError: TMPDIR cannot be written, or cannot hold a socket.
    """

    def __init__(self, logger: logging.Logger, given_up: Callable[[], GivenUp | None] = lambda: None) -> None:
        self._logger = logger
        self._given_up = given_up
        # A client job that is killed between two tasks has no relay that would tidy up after it.
        private_dir.remove_stale(_DIRECTORY)
        self._directory = private_dir.create(_DIRECTORY)
        self._held: int | None = None
        with contextlib.suppress(OSError):  # a file system without locks
            self._held = private_dir.hold(self._directory)
        try:
            listening = private_dir.listen(self._directory, relay.SOCKET)
        except OSError:
            private_dir.remove(self._directory)
            if self._held is not None:
                os.close(self._held)
            raise
        self._copies = Copies()
        self._loop = asyncio.new_event_loop()
        self._armed: Attempt | None = None
        self._attempts: set[Attempt] = set()
        self._aheads: set[Ahead] = set()
        self._services: list[Service] = []
        self._thread = threading.Thread(
            target=self._serve, args=(listening,), name="torchrun_supervisor", daemon=True
        )
        self._listening = threading.Event()
        self._thread.start()
        if not self._listening.wait(_CALL_BOUND):
            raise RuntimeError(f"the supervisor's thread did not begin within {_CALL_BOUND:g} s")

    @property
    def directory(self) -> str:
        """The private directory in which relays find the supervisor's socket."""
        return self._directory

    def attend(self, service: Service) -> None:
        """Begin a service, which ends after the last group.

        Raises:
            Exception: what it raises as it begins.
        """
        self._do(service.open(self._directory))
        self._services.append(service)

    def arm(self, launch: Launch) -> Attempt:
        """Let the next relay start this launch."""
        attempt = Attempt(launch, self._loop)

        async def arm() -> None:
            self._armed = attempt

        self._do(arm())
        return attempt

    def arm_ahead(self, ahead: Ahead, cold: Callable[[], Launch]) -> Attempt:
        """Let the next relay have this group, or start what ``cold`` plans should the group be unfit by then."""
        attempt = Attempt(ahead.launch, self._loop, ahead, cold)

        async def arm() -> None:
            self._armed = attempt

        self._do(arm())
        return attempt

    def start_ahead(self, launch: Launch, environ: Mapping[str, str]) -> Ahead:
        """Start a group that waits for its task.

        Args:
            launch: the group's, with something to import ahead.
            environ: what NVFlare's backend will give the task's relay, apart from the bootstrap.

        Raises:
            OSError: it has no place for its files.
        """

        async def start() -> Ahead:
            return Ahead(launch, environ, self._logger, self._copies)

        ahead = self._do(start())
        self._aheads.add(ahead)
        ahead.ended.add_done_callback(lambda _: self._aheads.discard(ahead))
        return ahead

    def close(self, reason: str, timeout: float) -> None:
        """End every group, wait up to ``timeout`` seconds for that, and leave nothing behind."""
        # Those that wait have nothing to finish.
        waiting = [ahead for ahead in tuple(self._aheads) if not ahead.taken]
        for ahead in waiting:
            ahead.stop(reason)
        # The armed one first: a relay that comes just now makes it one of the others.
        armed = self._armed
        attempts = {*self._attempts, *([armed] if armed is not None else [])}
        deadline = time.monotonic() + _LATE_RESULT_BOUND
        for attempt in attempts:
            if attempt.accepted:
                with contextlib.suppress(TimeoutError):
                    attempt.wait(max(0.0, deadline - time.monotonic()))
        for attempt in attempts:
            attempt.stop(reason)
        every: list[Attempt | Ahead] = [*attempts, *waiting]
        ends: dict[concurrent.futures.Future[Any], str] = {one.ended: one.launch.name for one in every}
        for late in concurrent.futures.wait(ends, timeout).not_done:
            self._logger.error("the group %s has not ended within %g s", ends[late], timeout)
        try:
            self._do(self._copies.close(), CLOSE_BOUND)
            for service in self._services:
                self._do(service.close(reason))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_BOUND)
            private_dir.remove(self._directory)
            if self._held is not None:
                os.close(self._held)
                self._held = None

    def ask(self, work: Coroutine[Any, Any, _T], bound: float) -> _T:
        """Return what the coroutine of a service returns, within so many seconds."""
        return self._do(work, bound)

    def _do(self, work: Coroutine[Any, Any, _T], bound: float = _CALL_BOUND) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(bound)

    def _serve(self, listening: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._welcome, sock=listening, limit=_MAX_ENVIRON)
        )
        self._listening.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CALL_BOUND))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = RelayConnection(reader, writer)
        try:
            environ = await self._admit(connection, writer.get_extra_info("socket"))
            if environ is None:
                connection.dismiss(1)
            else:
                await self._run(environ, connection)
        finally:
            connection.close()

    async def _admit(self, connection: RelayConnection, peer: socket.socket) -> dict[str, str] | None:
        """Return the environment of a relay of ours, None for whatever else connects."""
        try:
            procs.check_child(peer)
            return await asyncio.wait_for(connection.environ(), _GREETING_BOUND)
        except asyncio.TimeoutError:
            reason = f"no message within {_GREETING_BOUND:g} s"
        except (OSError, ValueError) as e:
            reason = str(e)
        self._logger.error("refused a connection to the supervisor's socket: %s", reason)
        return None

    async def _run(self, environ: dict[str, str], connection: RelayConnection) -> None:
        attempt, self._armed = self._armed, None
        if attempt is None or attempt.decided.done():
            self._logger.error("a relay came, but no task is waiting for one")
            connection.dismiss(1)
            return
        self._attempts.add(attempt)
        watching = asyncio.create_task(connection.watch())
        try:
            await attempt.run(environ, self._logger, self._copies, connection, self._given_up)
        finally:
            watching.cancel()
            self._attempts.discard(attempt)
