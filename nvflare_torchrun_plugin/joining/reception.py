"""Where nodes dial in: who gets a seat, who is turned away, and who is sent home at the end (asyncio, in the CJ).

It lives in the supervisor's thread. Nodes connect by TLS and prove themselves; each keeps one idle connection
here. The transport ``join`` starts a bridge for each agent, which asks for its node's connection at a Unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import secrets
import socket
import ssl
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from nvflare_torchrun_plugin import transports
from nvflare_torchrun_plugin.description.group_description import JoinSettings, NodeGroup
from nvflare_torchrun_plugin.group_values import shown
from nvflare_torchrun_plugin.join_file import CLIENT_FILE, NAME, JoinFile
from nvflare_torchrun_plugin.joining import bridge, greeting, join_link
from nvflare_torchrun_plugin.joining.greeting import Greeting
from nvflare_torchrun_plugin.joining.seats import Idle, Seat
from nvflare_torchrun_plugin.launching import ports
from nvflare_torchrun_plugin.node import private_dir, procs

_GREETING_BOUND = 10.0
"""Seconds for somebody who connects to say who it is."""
_MAX_STRANGERS = 256
"""Most connections at a time of which it is not known whose they are; more are closed at once."""
_MAX_STRANGERS_OF_ONE = 64
"""Most of those from one address: one noisy host must not keep the nodes on others out."""
_TOLD = 20
"""Most of those that are turned away of whom the log tells."""
_CLOSE_BOUND = join_link.CLOSE_BOUND + 0.5
"""Seconds for everybody to leave."""


class ReceptionError(ValueError):
    """Nodes cannot be received; one clear sentence."""


class _TurnedAwayError(Exception):
    """Why a node does not get in."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


class Reception:
    """Receives the nodes of one run.

    Attributes:
        returned: gets the name of a node that has come, for the first time or by a new process.

    Args:
        group: the run's, whose nodes but for the first dial in.
        settings: how.
        run_id: the run for which a launcher has started the nodes; None: it has not said.
        app_dir: the job's folder, which gets the join file unless there is one already.
        patience: most seconds that an agent is waited for.
        logger: gets who comes, and who is turned away.
    """

    def __init__(
        self,
        group: NodeGroup,
        settings: JoinSettings,
        run_id: str | None,
        app_dir: str,
        patience: float,
        logger: logging.Logger,
    ) -> None:
        self.returned: Callable[[str], None] = lambda _: None
        self._group = group
        self._settings = settings
        self._run_id = run_id
        self._path = Path(app_dir, NAME)
        self._wait = min(settings.wait, patience)
        self._logger = logger
        self._seats: list[Seat] = []
        self._listening: socket.socket | None = None
        self._port: ports.Reservation | None = None
        self._desk: asyncio.AbstractServer | None = None
        self._directory = ""
        self._over: asyncio.Future[str] | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: Counter[str] = Counter()
        self._turned_away = 0
        self._file: JoinFile | None = None

    async def open(self, directory: str) -> None:
        """Listen, and let the nodes know.

        Args:
            directory: private, for the bridges' socket.

        Raises:
            ReceptionError: the file, the ports or the directory will not do.
        """
        self._directory = directory
        self._over = asyncio.get_running_loop().create_future()
        try:
            given = None if self._settings.file is None else JoinFile.read(self._settings.file)
            if given is not None and given.identity is None:
                raise ReceptionError(f"join file {self._settings.file} has no identity: give the {CLIENT_FILE}")
            span = self._settings.ports if given is None else given.ports
            try:
                self._port = ports.reserve(span)
            except OSError:
                raise ReceptionError(f"no port from {span[0]} to {span[1]} is free, for nodes to join") from None
            port = self._port.port
            address = self._group.nodes[0].address or socket.gethostname()
            self._file = given or JoinFile.make((port, port), address)
            context = _context(self._file.identity or "")
            self._listening = _listen(port)
            listening = private_dir.listen(directory, bridge.SOCKET)
            self._desk = await asyncio.start_server(self._serve_bridge, sock=listening, limit=greeting.MAX_LINE)
            if given is None:
                self._file.write(str(self._path))
        except (OSError, ValueError) as e:
            await self.close("it could not begin")
            raise ReceptionError(f"nodes cannot join: {e}") from None
        now = asyncio.get_running_loop().time()
        self._seats = [Seat(rank, node.host, now) for rank, node in enumerate(self._group.nodes)]
        self._accepting = self._start(self._accept(self._listening, context))
        self._logger.info("waiting for %d nodes to join, on port %d", len(self._seats) - 1, port)

    async def meet(self, seconds: float) -> NodeGroup:
        """Wait for the nodes, no longer than that; return the group with the names of those that have come.

        A name that several nodes have, as containers may, is none.
        """
        others = self._seats[1:]
        waiting = [asyncio.ensure_future(seat.came.wait()) for seat in others]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        for waiter in waiting:
            waiter.cancel()
        taken = [self._seats[0].name, *(seat.host for seat in others)]
        for seat in others:
            if seat.host is not None and taken.count(seat.host) == 1:
                seat.name = seat.host
        words = transports.template(transports.JOIN)
        return dataclasses.replace(
            self._group,
            nodes=tuple(
                dataclasses.replace(node, host=seat.name)
                for node, seat in zip(self._group.nodes, self._seats, strict=True)
            ),
            transport=tuple(word.replace(transports.DESK, self._directory) for word in words),
        )

    async def close(self, reason: str) -> None:
        """Send all nodes away, and leave nothing."""
        if self._settings.file is None and self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        if self._accepting is not None:
            self._accepting.cancel()
        for closing in (self._desk, self._listening):
            if closing is not None:
                closing.close()
        if self._over is not None:
            # Whoever serves a connection says the last word there.
            self._over.set_result(reason)
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_CLOSE_BOUND)
            for task in pending:
                task.cancel()
            if pending:
                await asyncio.wait(pending, timeout=_CLOSE_BOUND)
        if self._port is not None:
            self._port.release()
        if self._turned_away > _TOLD:
            self._logger.warning("%d connections were turned away in all", self._turned_away)

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._logger.error("nodes that join are not served as they should be: %r", error)

    # -- nodes ----------------------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, peer = await loop.sock_accept(listening)
            except OSError as e:
                # No descriptor is free, for one.
                self._note("somebody", str(e))
                await asyncio.sleep(1.0)
                continue
            for number, most, whose in (
                (self._strangers[peer[0]], _MAX_STRANGERS_OF_ONE, " from there"),
                (self._strangers.total(), _MAX_STRANGERS, ""),
            ):
                if number >= most:
                    accepted.close()
                    self._note(peer[0], f"{most} others{whose} have not said who they are")
                    break
            else:
                self._strangers[peer[0]] += 1
                self._start(self._receive(accepted, peer[0], context))

    async def _receive(self, accepted: socket.socket, peer: str, context: ssl.SSLContext) -> None:
        try:
            idle, seat = await asyncio.wait_for(self._admit(accepted, context), _GREETING_BOUND)
        except asyncio.TimeoutError:
            self._note(peer, f"it has not said who it is within {_GREETING_BOUND:g} s")
            return
        except (OSError, ValueError, _TurnedAwayError) as e:
            self._note(peer, str(e) or "it has closed the connection")
            return
        finally:
            self._strangers -= Counter([peer])
        await self._keep(idle, seat)

    async def _admit(self, accepted: socket.socket, context: ssl.SSLContext) -> tuple[Idle, Seat]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(greeting.MAX_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=context)
        except BaseException:
            accepted.close()
            raise
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        try:
            join_link.look_after(writer)
            nonce = secrets.token_hex(32)
            join_link.say(writer, "nonce", nonce)
            try:
                node = Greeting.decode(await self._line(reader))
                seat = self._seat_of(node, nonce)
            except _TurnedAwayError as e:
                join_link.say(writer, "leave" if e.for_good else "refused", str(e))
                await join_link.part(writer)
                raise
            join_link.say(writer, "welcome", f"joined the client job on {socket.gethostname()} as {seat.name}")
        except _TurnedAwayError:
            raise
        except BaseException:
            writer.transport.abort()
            raise
        return Idle(reader, writer, node), seat

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        """Return what somebody says, unless the run ends before."""
        reading = asyncio.ensure_future(reader.readline())
        try:
            if (over := await self._over_before(reading)) is not None:
                raise _TurnedAwayError(over, for_good=True)
            return await reading
        finally:
            reading.cancel()

    def _seat_of(self, node: Greeting, nonce: str) -> Seat:
        file = self._file
        assert file is not None  # noqa: S101
        if not hmac.compare_digest(
            node.proof.encode(), greeting.proof(file.secret, nonce, file.fingerprint).encode()
        ):
            raise _TurnedAwayError("its secret is not the one of this client job")
        who = f"{node.names[0]} (process {node.pid})"
        if None not in (node.run_id, self._run_id) and node.run_id != self._run_id:
            raise _TurnedAwayError(
                f"{who} belongs to the job {node.run_id}, this is the client job of {self._run_id}"
            )
        if node.node_rank is not None:
            if 1 <= node.node_rank < len(self._seats):
                return self._seats[node.node_rank]
            raise _TurnedAwayError(
                f"{who} has node rank {node.node_rank}, but the job's group has the node ranks 1 to"
                f" {len(self._seats) - 1} for others",
                for_good=True,
            )
        named = [seat for seat in self._seats[1:] if any(_same(seat.name, name) for name in node.names)]
        if len(named) == 1:
            return named[0]
        raise _TurnedAwayError(
            f"{who} does not say its node rank, and is {'several' if named else 'none'} of the job's nodes"
        )

    async def _keep(self, idle: Idle, seat: Seat) -> None:
        """Keep the connection of a node until it is taken, replaced or gone, or the run ends."""
        before, node = seat.idle, idle.node
        if before is not None and before.node.instance != node.instance:
            # Whoever came later has been started later: the other one is on its way out, or was started twice.
            reason = f"another process has come as {seat.name}: {node.names[0]}, process {node.pid}"
            self._start(before.leave("leave", reason))
        elif before is not None:
            self._start(before.leave("refused", "it has come again"))
        if seat.instance != node.instance:
            again = "" if seat.instance is None else " again"
            self.returned(seat.name)
            self._logger.info("%s has joined%s: host %s, process %d", seat.name, again, node.names[0], node.pid)
        seat.put(idle)
        over = await self._over_before(idle.watching)
        if seat.idle is not idle:
            return
        seat.put(None)
        if over is not None:
            await idle.leave("leave", over)
        else:
            # Its end, or a word out of turn.
            await join_link.part(idle.writer)
            self._logger.warning("%s is not there any more", seat.name)

    async def _over_before(self, event: asyncio.Future[Any]) -> str | None:
        """Wait for the event or the end of the run; return the reason of that, None while it goes on."""
        assert self._over is not None  # noqa: S101
        either: set[asyncio.Future[Any]] = {event, self._over}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return self._over.result() if self._over.done() else None

    def _note(self, peer: str, reason: str) -> None:
        if self._over is not None and self._over.done():
            return
        self._turned_away += 1
        if self._turned_away <= _TOLD:
            self._logger.warning("turned away a connection from %s: %s", peer, _line(reason))
        if self._turned_away == _TOLD:
            self._logger.warning("more that are turned away will be counted, but not told of")

    # -- bridges --------------------------------------------------------------------------------------------

    async def _serve_bridge(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            procs.check_child(writer.get_extra_info("socket"))
            name = (await reader.readline()).decode(errors="replace").strip()
            seat = next((seat for seat in self._seats if seat.name == name), None)
            if seat is None:
                taken: Idle | str = f"no node of the name {shown(name)} is to join"
            else:
                taken = await seat.take(self._wait, reader)
            if isinstance(taken, str):
                writer.write(taken.encode() + b"\n")
                return
            writer.write(bridge.TAKEN)
            await taken.serve(reader, writer)
        except PermissionError as e:
            self._logger.error("refused a connection to the socket for nodes that have joined: %s", e)
        except (OSError, ValueError):
            pass
        finally:
            writer.close()


def _context(identity: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nobody resumes a session, and what is sent unasked would be lying there when a connection is closed.
    context.num_tickets = 0
    # Python reads it from a file only; this one is gone before anybody else could look for it.
    with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
        file.write(identity)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _listen(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    listening = socket.create_server(
        ("", port),
        family=socket.AF_INET6 if both else socket.AF_INET,
        backlog=socket.SOMAXCONN,
        dualstack_ipv6=both,
    )
    listening.setblocking(False)
    return listening


def _same(name: str, other: str) -> bool:
    """Return whether two names may be one host's: one of them may have a domain."""
    name, other = name.lower(), other.lower()
    short = name.partition(".")[0] == other.partition(".")[0] and not ("." in name and "." in other)
    return name == other or short


def _line(text: str) -> str:
    """Return the text for a log, which somebody unknown may have written."""
    return "".join(character if character.isprintable() else "?" for character in text)[:300]
