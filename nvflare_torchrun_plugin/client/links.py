"""What the ranks say to each other outside of any collective: a star of sockets per node, and one of the nodes.

Rank 0 is joined to the first rank of each other node (TCP), and the first rank of each node to the node's
others (Unix sockets, which also carry descriptors). Waiting on a socket has no timeout that a long wait for
the next task could meet, uses no processor, lets signal handlers run, and ends at once when the peer has.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from nvflare_torchrun_plugin.client.world import World

MEET_BOUND = 300.0
"""Seconds for the ranks to meet; each comes when its script calls ``init()``."""
_GREETING_BOUND = 10.0
"""Seconds for whoever connects to say who it is."""
_LENGTH = struct.Struct("!Q")
_CREDENTIALS = struct.Struct("3i")
_NUMBER = struct.Struct("!I")
_TOKEN_BYTES = 32
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 6))
"""A node that is gone without a word is noticed after three minutes, and firewalls forget no idle connection."""


class Store(Protocol):
    """What is used of torch's key-value store."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...


class LinkError(RuntimeError):
    """A rank cannot be reached, or has left."""


class _Link:
    """A connection to one other rank."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        connection.settimeout(None)
        self._socket = connection
        self._peer = peer

    def send(self, message: Any, descriptor: int | None = None) -> None:
        data = pickle.dumps(message)
        data = _LENGTH.pack(len(data)) + data
        with self._errors():
            if descriptor is None:
                self._socket.sendall(data)
            else:
                sent = socket.send_fds(self._socket, [data], [descriptor])
                self._socket.sendall(data[sent:])

    def receive(self) -> tuple[Any, int | None]:
        """Return the next message, and the descriptor that came with it."""
        with self._errors():
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
            head += self._read(_LENGTH.size - len(head)) if head else b""
            if not head:
                raise EOFError
            (length,) = _LENGTH.unpack(head)
            # What arrives was pickled by a rank of this very group, which runs the same script.
            return pickle.loads(self._read(length)), descriptors[0] if descriptors else None  # noqa: S301

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return bytes(data)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError) as e:
            raise LinkError(f"{self._peer} has ended") from e


class Links:
    """This rank's connections.

    Args:
        up: to the rank that it listens to; None on rank 0.
        nodes: to the first rank of each other node; empty except on rank 0.
        neighbours: to the other ranks of this node; empty except on the node's first.
    """

    def __init__(self, up: _Link | None, nodes: list[_Link], neighbours: list[_Link]) -> None:
        self._up = up
        self._neighbours = neighbours
        self._down = [*nodes, *neighbours]
        # A process that the script forks must not keep the connections open after this one has ended.
        os.register_at_fork(after_in_child=partial(_close, weakref.ref(self)))

    def gather(self, said: Any) -> list[Any] | None:
        """Bring what each rank says to rank 0; there it is returned, in no order.

        For a rank that has left there is a :class:`LinkError`.
        """
        words = [said]
        for link in self._down:
            try:
                words += link.receive()[0]
            except LinkError as e:
                words.append(e)
        if self._up is None:
            return words
        self._up.send(words)
        return None

    def tell(self, message: Any = None) -> Any:
        """Bring rank 0's message to every rank and return it; what others give does not count.

        Raises:
            LinkError: the rank that this one listens to has left.
        """
        if self._up is not None:
            message, _ = self._up.receive()
        for link in self._down:
            # Whoever has left shows in the next gather(), and the others must still hear it.
            with suppress(LinkError):
                link.send(message)
        return message

    def share(self, descriptor: int | None) -> int:
        """Bring a descriptor of the node's first rank to the node's others; return this rank's own.

        Raises:
            LinkError: the node's first rank has left.
        """
        if descriptor is None and self._up is not None:
            _, descriptor = self._up.receive()
        if descriptor is None:
            raise LinkError("the node's first rank has sent no descriptor; is the limit of open files reached?")
        for link in self._neighbours:
            with suppress(LinkError):
                link.send(None, descriptor)
        return descriptor

    def close(self) -> None:
        """Close the connections; ranks that wait for this one are told."""
        for link in (*self._down, *([self._up] if self._up is not None else [])):
            link.close()


def _close(links: weakref.ref[Links]) -> None:
    if (alive := links()) is not None:
        alive.close()


def connect(world: World, store: Store, master_addr: str) -> Links:
    """Let the ranks meet.

    Args:
        world: this rank.
        store: what all ranks see; its ``get`` waits until there is something.
        master_addr: where the other nodes reach rank 0's.

    Raises:
        LinkError: a rank did not come in time, or cannot be reached.
        OSError: a socket cannot be made.
    """
    deadline = time.monotonic() + MEET_BOUND
    up: _Link | None = None
    nodes: list[_Link] = []
    neighbours: list[_Link] = []
    with ExitStack() as at_end:
        others, token = None, b""
        if world.rank == 0 and world.nnodes > 1:
            token = secrets.token_bytes(_TOKEN_BYTES)
            others = at_end.enter_context(_server())
            store.set("nodes", f"{others.getsockname()[1]} {token.hex()}")
        listening = None
        if world.leads_node and world.local_size > 1:
            # A name outside of any file system: none is left behind, whatever becomes of the ranks.
            name = f"nvflare-ranks-{secrets.token_hex(16)}"
            listening = at_end.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(f"\0{name}")
            listening.listen(world.local_size)
            store.set(f"node-{world.node_rank}", name)
        if not world.leads_node:
            up = _to_leader(_published(store, f"node-{world.node_rank}"), world)
        elif world.rank != 0:
            up = _to_rank_0(_published(store, "nodes"), world, master_addr)
        if others is not None:
            nodes = _accept(others, world.nnodes - 1, token, "the first rank of node", deadline)
        if listening is not None:
            neighbours = _accept(listening, world.local_size - 1, b"", "local rank", deadline)
    return Links(up, nodes, neighbours)


def _published(store: Store, key: str) -> str:
    try:
        return store.get(key).decode()
    except RuntimeError as e:  # torch's DistStoreError is one
        raise LinkError(f"the other ranks have not called init(): {e}") from e


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _to_rank_0(published: str, world: World, master_addr: str) -> _Link:
    port, token = published.split()
    try:
        connection = socket.create_connection((master_addr.strip("[]"), int(port)), MEET_BOUND)
        _keep_alive(connection)
        connection.sendall(bytes.fromhex(token) + _NUMBER.pack(world.node_rank))
    except OSError as e:
        raise LinkError(f"rank 0 cannot be reached at {master_addr}, port {port}: {e}") from e
    return _Link(connection, "rank 0")


def _to_leader(name: str, world: World) -> _Link:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        if not _is_own(connection):
            raise PermissionError("it belongs to another user")
        connection.sendall(_NUMBER.pack(world.local_rank))
    except OSError as e:
        connection.close()
        raise LinkError(f"the first rank of this node cannot be reached: {e}") from e
    return _Link(connection, f"the first rank of node {world.node_rank}")


def _accept(listening: socket.socket, count: int, token: bytes, what: str, deadline: float) -> list[_Link]:
    links: dict[int, _Link] = {}
    while len(links) < count:
        listening.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            connection, _ = listening.accept()
        except OSError as e:
            raise LinkError(f"{len(links)} of {count} have called init() within {MEET_BOUND:g} s: {what}s") from e
        number = _greeting(connection, token)
        if number is None or number in links:
            connection.close()  # not one of ours
            continue
        if token:
            _keep_alive(connection)
        links[number] = _Link(connection, f"{what} {number}")
    return list(links.values())


def _greeting(connection: socket.socket, token: bytes) -> int | None:
    if not token and not _is_own(connection):
        return None
    wanted = len(token) + _NUMBER.size
    connection.settimeout(_GREETING_BOUND)
    try:
        said = connection.recv(wanted, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(said) != wanted or not hmac.compare_digest(said[: len(token)], token):
        return None
    number: int = _NUMBER.unpack(said[len(token) :])[0]
    return number


def _is_own(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end of the Unix socket."""
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(uid == os.getuid())


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
