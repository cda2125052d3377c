"""A node that dials in: ``python -m nvflare_torchrun_plugin.node_agent --join`` (standard library only).

For nodes on which the client job can start nothing. It keeps one idle connection to the client job. When that
takes the connection, a node agent is started whose stdin and stdout the connection is, and another idle one is
opened at once, so agents are started as often, and as many at a time, as by any other transport. It exits with 0
whatever its agents did: NVFlare's Slurm launcher takes anything else for a reason to end the allocation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import os
import random
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Mapping

from nvflare_torchrun_plugin.contract import MASTER_ADDR, NNODES, NODE_RANK, RUN_ID, parse_integer
from nvflare_torchrun_plugin.join_file import NAME, JoinFile
from nvflare_torchrun_plugin.joining import greeting, join_link
from nvflare_torchrun_plugin.joining.greeting import Greeting, GreetingError

DEFAULT_PATIENCE = 300.0
"""Seconds without a client job after which it is gone for good."""
_GREETING_BOUND = 15.0
"""Seconds for a connection to come about."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts: twice as long each time."""
_CLOSING = 10.0
"""Seconds for the client job to close a connection whose agent has ended."""
# A name, and beside it the variable that must be set for the name to have its meaning.
_RANKS = ((NODE_RANK, NNODES), ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"), ("JOB_COMPLETION_INDEX", "MASTER_ADDR"))
_ADDRESSES = (
    (MASTER_ADDR, NNODES),
    ("LWS_LEADER_ADDRESS", "LWS_LEADER_ADDRESS"),
    ("MASTER_ADDR", "JOB_COMPLETION_INDEX"),
)


class NotYetError(Exception):
    """No connection for now; another try may do."""


class LeaveError(Exception):
    """The client job needs this node no more."""


class Connection:
    """An idle connection, both sides having proved themselves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def word(self, bound: float | None = None) -> tuple[str, str]:
        """Return the client job's next word.

        Raises:
            NotYetError: there is none.
            LeaveError: it is that one.
        """
        try:
            line = await asyncio.wait_for(self.reader.readline(), bound)
        except asyncio.TimeoutError:  # to some Pythons an OSError
            raise NotYetError("it says nothing") from None
        except (OSError, ValueError) as e:
            raise NotYetError(f"the connection has broken: {e}") from None
        if not line:
            raise NotYetError("it has closed the connection")
        try:
            kind, text = greeting.read_word(line)
        except GreetingError as e:
            raise NotYetError(str(e)) from None
        if kind == "leave":
            raise LeaveError(text)
        if kind == "refused":
            raise NotYetError(f"it turns this node away: {text}")
        return kind, text


class Dialler:
    """One node's process.

    Args:
        file: path of the join file, which need not be there yet.
        address: of the client job's host; None: what the environment says, else the file.
        node_rank: this node's; None: what the environment says.
        patience: seconds without a client job after which to leave.
        stay: whether to wait for another client job where one says to leave.
        environ: the environment.

    Raises:
        ValueError: a variable is wrong; the message names it.
    """

    def __init__(
        self,
        file: str,
        address: str | None,
        node_rank: int | None,
        patience: float,
        stay: bool,
        environ: Mapping[str, str],
    ) -> None:
        self._file = file
        self._address = address or next((text for _, text in _found(environ, _ADDRESSES)), None)
        self._node_rank = _rank(environ) if node_rank is None else node_rank
        self._names = tuple(dict.fromkeys([socket.gethostname(), environ.get("SLURMD_NODENAME") or ""]))
        self._run_id = environ.get(RUN_ID) or None
        self._patience = patience
        self._stay = stay
        self._instance = secrets.token_hex(8)
        self._agents: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._last_contact = time.monotonic()
        self._in_contact = 0
        self._announced = False
        self._said: dict[int | None, str] = {}

    async def run(self) -> None:
        """Serve until there is nothing left to serve."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._end, f"got {number.name}")
        # Slurm sends what announces an end to every process of a step; it is for the ranks.
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        lines: dict[int, asyncio.Task[None]] = {}
        over = asyncio.create_task(self._over.wait())
        pause = _FIRST_PAUSE
        while not over.done():
            wanted = self._ports({*lines})
            for port in wanted - {*lines}:
                lines[port] = asyncio.create_task(self._serve(port))
            for port in {*lines} - wanted:
                lines.pop(port).cancel()
            if self._in_contact or self._agents:
                self._last_contact = time.monotonic()
            elif time.monotonic() - self._last_contact > self._patience and not self._stay:
                self._leave(f"no client job for {self._patience:g} s")
            await asyncio.wait({over}, timeout=pause)
            pause = min(2 * pause, _LONGEST_PAUSE / 5)
        for line in lines.values():
            line.cancel()
        if self._agents:
            # Their connections end them; one whose place another process has taken may have its task to finish.
            await asyncio.wait(self._agents)

    def _ports(self, known: set[int]) -> set[int]:
        """Return the ports to dial, the known ones while the file cannot be read."""
        try:
            first, last = JoinFile.read(self._file).ports
        except FileNotFoundError as e:
            self._say(f"waiting for the join file: {e}")
            if self._announced and not self._in_contact and not self._stay:
                # The client job has removed it: it has ended before this node was connected, or while it was not.
                self._leave("the join file is gone")
            return set()
        except (OSError, ValueError) as e:
            # For a moment only, it may be: no descriptor is free, a file server has begun anew.
            self._say(f"waiting for the join file: {e}")
            return known
        self._announced = True
        return {*range(first, last + 1)}

    def _leave(self, reason: str) -> None:
        if not self._over.is_set():
            self._say(f"leaving: {reason}")
            self._over.set()

    def _end(self, reason: str) -> None:
        """Leave, and end all agents."""
        self._leave(reason)
        for agent in self._agents:
            agent.cancel()

    def _say(self, text: str, port: int | None = None) -> None:
        """Say what is new, of a port or of all."""
        if text != self._said.get(port):
            self._said[port] = text
            # Past sys.stderr: where it cannot be written (a full disk), Python would end with another code than 0.
            with contextlib.suppress(OSError):
                os.write(2, f"nvfl join: {text}\n".encode(errors="backslashreplace"))

    # -- connections ----------------------------------------------------------------------------------------

    async def _serve(self, port: int) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                connection = await self._dial(port)
                pause = _FIRST_PAUSE
                await self._idle(connection)
                continue
            except LeaveError as e:
                if not self._stay:
                    self._leave(str(e))
                    return
                self._say(f"a client job ends: {e}", port)
                pause = _LONGEST_PAUSE
            except (NotYetError, OSError) as e:
                self._say(f"no connection to port {port}: {e}", port)
            # Nodes that were started together need not all come back in the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _idle(self, connection: Connection) -> None:
        self._in_contact += 1
        try:
            kind, _ = await connection.word()
            if kind != "start":
                raise NotYetError(f"it says {kind!r}")
        except BaseException:
            await join_link.part(connection.writer)
            raise
        finally:
            self._in_contact -= 1
            self._last_contact = time.monotonic()
        agent = asyncio.create_task(self._agent(connection))
        self._agents.add(agent)
        agent.add_done_callback(self._agents.discard)

    async def _dial(self, port: int) -> Connection:
        try:
            file = JoinFile.read(self._file)
            address = self._address or file.address
            if address is None:
                raise NotYetError(f"neither the environment nor {self._file} tells the client job's address")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            # The certificate itself is known; no authority, name or date says more.
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            opening = asyncio.open_connection(address.strip("[]"), port, ssl=context, limit=join_link.CHUNK)
            connection = Connection(*await asyncio.wait_for(opening, _GREETING_BOUND))
        except asyncio.TimeoutError:
            raise NotYetError("nobody answers") from None
        except (OSError, ValueError) as e:
            raise NotYetError(str(e)) from None
        try:
            await self._greet(connection, file, port)
        except BaseException:
            connection.writer.transport.abort()
            raise
        return connection

    async def _greet(self, connection: Connection, file: JoinFile, port: int) -> None:
        certificate = connection.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        found = hashlib.sha256(certificate).hexdigest()
        if not hmac.compare_digest(found, file.fingerprint):
            raise NotYetError("who listens there is not the client job of the join file: another certificate")
        join_link.look_after(connection.writer)
        kind, nonce = await connection.word(_GREETING_BOUND)
        if kind != "nonce":
            raise NotYetError(f"it says {kind!r}")
        own = Greeting(
            proof=greeting.proof(file.secret, nonce, file.fingerprint),
            node_rank=self._node_rank,
            names=tuple(name for name in self._names if name),
            run_id=self._run_id,
            instance=self._instance,
            pid=os.getpid(),
        )
        connection.writer.write(own.encode())
        kind, text = await connection.word(_GREETING_BOUND)
        if kind != "welcome":
            raise NotYetError(f"it says {kind!r}")
        self._say(text, port)

    # -- agents ---------------------------------------------------------------------------------------------

    async def _agent(self, connection: Connection) -> None:
        """Run an agent whose orders come by the connection, to its end."""
        join_link.leave_alone(connection.writer)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "nvflare_torchrun_plugin.node_agent"),
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,
            )
        except BaseException as e:
            await join_link.part(connection.writer)
            self._say(f"no agent can be started: {e!r}")
            raise
        assert process.stdin is not None  # noqa: S101
        assert process.stdout is not None  # noqa: S101
        orders = asyncio.create_task(_pass_orders(connection.reader, process.stdin))
        try:
            await join_link.pass_on(process.stdout, connection.writer)
            connection.writer.write(greeting.end(await process.wait()))
            # The other side closes it: were this one to, with something unread, the last frames could be lost.
            await asyncio.wait({orders}, timeout=_CLOSING)
        finally:
            # The end of its orders is what ends an agent, and all that it has started.
            orders.cancel()
            process.stdin.close()
            await join_link.part(connection.writer)
            while await process.stdout.read(join_link.CHUNK):
                pass
            await process.wait()


async def _pass_orders(reader: asyncio.StreamReader, agent: asyncio.StreamWriter) -> None:
    await join_link.pass_on(reader, agent)
    agent.close()


def _found(environ: Mapping[str, str], variables: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    return [(name, environ[name]) for name, beside in variables if environ.get(name) and beside in environ]


def _rank(environ: Mapping[str, str]) -> int | None:
    for name, text in _found(environ, _RANKS):
        try:
            return parse_integer(text)
        except ValueError:
            raise ValueError(f"{name} is {text!r}: must be this node's rank") from None
    return None


def main(argv: list[str]) -> int:
    """Serve; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m nvflare_torchrun_plugin.node_agent --join",
        description="Connects this node to the client job, which then starts its ranks here.",
    )
    parser.add_argument("--file", default=NAME, help="the join file (default %(default)s, in the job's folder)")
    parser.add_argument(
        "--address", help="of the client job's host (default: what the scheduler or the file says)"
    )
    parser.add_argument("--node-rank", type=int, help="of this node (default: what the scheduler says)")
    parser.add_argument(
        "--patience",
        type=float,
        default=DEFAULT_PATIENCE,
        help="seconds without a client job after which to leave (default %(default)g)",
    )
    parser.add_argument("--stay", action="store_true", help="serve one client job after another, until SIGTERM")
    given = parser.parse_args(argv)
    if not given.patience > 0:
        parser.error(f"--patience is {given.patience:g}: must be more than 0 seconds")
    if given.node_rank is not None and given.node_rank < 1:
        parser.error(f"--node-rank is {given.node_rank}: must be at least 1, for 0 is the client job's own")

    async def serve() -> None:
        await Dialler(given.file, given.address, given.node_rank, given.patience, given.stay, os.environ).run()

    try:
        asyncio.run(serve())
    except ValueError as e:
        parser.error(str(e))
    return 0
