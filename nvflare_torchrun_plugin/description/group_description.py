"""The node group: which nodes run one task together, as a job or a site describes it.

A job describes it as a plain dict in the FL context property ``node_group`` (see
:mod:`nvflare_torchrun_plugin.node_group`), a site in its ``local/node_group.yaml`` with the same keys (see
:mod:`nvflare_torchrun_plugin.description.site_file`). Which of them counts is decided in
:mod:`nvflare_torchrun_plugin.description.group_choice`. The command line reads descriptions, too: nothing here
needs NVFlare.
"""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nvflare_torchrun_plugin import schedulers, transports
from nvflare_torchrun_plugin.contract import NNODES, Contract, ContractError
from nvflare_torchrun_plugin.description.node_environ import DEFAULT_FORWARD
from nvflare_torchrun_plugin.group_values import (
    NodeGroupError,
    check_keys,
    host_name,
    integer_of,
    parse_env,
    parse_nproc_per_node,
    shown,
    text_of,
)
from nvflare_torchrun_plugin.node import node_facts

PROPERTY = "node_group"
"""Name of the FL context property (private, sticky)."""

AUTO = "auto"
DEFAULT_TRANSPORT = transports.LOCAL
DEFAULT_MASTER_PORT_RANGE = (29400, 30399)

MAX_NODES = 4096
"""Most nodes that a number may ask for: each costs this host a process, and a slip of the finger must not
cost it its memory."""

DEFAULT_BUSY_TIMEOUT = 3600.0
STAGES = ("auto", "always", "never")
ON_BUSY = ("wait", "fail", "share")

GROUP_KEYS = (
    "nodes",
    "transport",
    "master_port_range",
    "env",
    "forward_env",
    "python",
    "stage",
    "on_busy",
    "busy_timeout",
    "join",
)
JOIN_KEYS = ("file", "ports", "wait")
DEFAULT_JOIN_WAIT = 60.0
DEFAULT_JOIN_PORTS = (30400, 30499)
"""Beside those of NVFlare's launcher and of the rendezvous; one for each job at a time on a host."""
NODE_KEYS = ("host", "address", "nproc_per_node", "python")
GROUP_HINTS = {
    key: f"it belongs to a node, as in nodes: [{{host: localhost, {key}: ...}}]"
    for key in NODE_KEYS
    if key not in GROUP_KEYS
}
"""What to say of keys that are looked for in the wrong place."""


@dataclass(frozen=True)
class Node:
    """One node of a group."""

    host: str
    """Name by which the transport reaches the node."""

    address: str | None = None
    """Address at which the other nodes reach it; None: its host name."""

    nproc_per_node: int | str | None = None
    """Processes on it, at least 1, or torchrun's word for a number (``auto``, ``gpu``, ``cpu``, ...)."""

    python: str | None = None
    """Path of the Python interpreter there; None: the group's."""


@dataclass(frozen=True)
class JoinSettings:
    """How nodes dial in (transport ``join``)."""

    file: str | None = None
    """Path of the client's join file, made beforehand; None: one is made for each job, in the job's folder."""

    ports: tuple[int, int] = DEFAULT_JOIN_PORTS
    """First and last port on which the nodes may be waited for; those of the file go before it."""

    wait: float = DEFAULT_JOIN_WAIT
    """Seconds that a task waits for a node that is not there, since the run began or the node was last seen."""


@dataclass(frozen=True)
class NodeGroup:
    """The nodes that run one task together, in the order of their ranks."""

    nodes: tuple[Node, ...]
    """The nodes to start: all of them, or node rank 0 alone where ``contract`` is given."""

    least: int = 0
    """Fewest of the nodes that will do; 0: all of them."""

    transport: str | tuple[str, ...] = DEFAULT_TRANSPORT
    """How a command is started on a node: a name, or an argv template (see ``transports``)."""

    master_port_range: tuple[int, int] = DEFAULT_MASTER_PORT_RANGE
    """First and last port that a rendezvous may use on node rank 0."""

    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables for the processes on every node; kept as a copy that cannot be changed, and left
    out of ``repr`` because values may be secret."""

    forward_env: tuple[str, ...] = DEFAULT_FORWARD
    """Patterns of variables that go from the client job to every node."""

    python: str | None = None
    """Path of the Python interpreter on the nodes; None: the path of this one."""

    stage: str = STAGES[0]
    """Whether nodes get a copy of the job's ``custom`` folder: ``auto`` (those that do not see it), ``always``
    or ``never``."""

    on_busy: str = ON_BUSY[0]
    """What to do while another job of this site uses one of the nodes: ``wait``, ``fail`` or ``share``."""

    busy_timeout: float = DEFAULT_BUSY_TIMEOUT
    """Seconds to wait for a busy node."""

    source: str = ""
    """Where the group was found, in words for a person."""

    join: JoinSettings | None = None
    """Given when the nodes dial in."""

    contract: Contract | None = None
    """Given when NVFlare's own launcher has started the other nodes, which wait already."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    @property
    def nnodes(self) -> int:
        """Number of nodes in the group, those that somebody else starts included."""
        return self.contract.nnodes if self.contract else len(self.nodes)

    def to_property(self) -> dict[str, object]:
        """Return the group as a plain dict to publish in the FL context.

        Its keys are those that a group is described with, plus ``nnodes`` and ``source``. Of the environment
        variables it holds the names alone: many components can see the property.
        """
        published: dict[str, object] = {
            "nodes": [
                {key: value for key, value in dataclasses.asdict(node).items() if value is not None}
                for node in self.nodes
            ],
            "nnodes": self.nnodes,
            "transport": self.transport if isinstance(self.transport, str) else list(self.transport),
            "master_port_range": list(self.master_port_range),
            "env": sorted(self.env),
            "forward_env": list(self.forward_env),
            "stage": self.stage,
            "on_busy": self.on_busy,
            "busy_timeout": self.busy_timeout,
            "source": self.source,
        }
        if self.join is not None:
            published["join"] = {k: v for k, v in dataclasses.asdict(self.join).items() if v is not None}
        if self.python is not None:
            published["python"] = self.python
        return published


def parse(given: object, source: str, environ: Mapping[str, str] | None) -> NodeGroup:
    """Read a description of a node group.

    Args:
        given: a mapping with the keys ``GROUP_KEYS``, of which ``nodes`` must be there.
        source: where it was found, in words for a person; messages begin with it.
        environ: the environment of the client job, in which ``auto`` looks for a scheduler's allocation; None
            when this is not the site's host: then ``auto``, and whether the hosts suit the site, stay open.

    Raises:
        NodeGroupError: it is not such a mapping, or a value is wrong.
    """
    keys = check_keys(given, GROUP_KEYS, source, GROUP_HINTS)
    if keys.get("nodes") is None:
        raise NodeGroupError(
            f"{source}: key 'nodes' is missing: give a number of nodes on this host, a list of hosts, or 'auto'"
        )
    transport = _transport(keys.get("transport"), source)
    nodes = _nodes(keys["nodes"], source, joined=transport == transports.JOIN)
    if nodes is None and environ is not None and transport == transports.JOIN and NNODES in environ:
        nodes, source = _contract_nodes(environ, source)
    if nodes is None and environ is not None:
        try:
            allocation = schedulers.discover(environ, is_this_host)
        except NodeGroupError as e:
            raise NodeGroupError(f"{source}: nodes is 'auto': {e}") from None
        nodes = tuple(Node(host.name, host.address, host.processes) for host in allocation.hosts)
        transport, source = transport or allocation.transport, f"{source}, nodes 'auto': {allocation.source}"
    group = NodeGroup(
        nodes=nodes or (),
        transport=transport or DEFAULT_TRANSPORT,
        master_port_range=_ports(
            keys.get("master_port_range"), f"{source}: master_port_range", DEFAULT_MASTER_PORT_RANGE
        ),
        env=parse_env(keys.get("env"), f"{source}: env"),
        forward_env=_patterns(keys.get("forward_env"), source),
        python=text_of(keys.get("python"), f"{source}: python", "the path of a Python interpreter"),
        stage=_one_of(STAGES, keys.get("stage"), f"{source}: stage"),
        on_busy=_one_of(ON_BUSY, keys.get("on_busy"), f"{source}: on_busy"),
        busy_timeout=_seconds(keys.get("busy_timeout"), f"{source}: busy_timeout", DEFAULT_BUSY_TIMEOUT),
        join=_join(keys.get("join"), transport, source),
        source=source,
    )
    if group.join is not None and any((group.python, *(node.python for node in group.nodes))):
        raise NodeGroupError(
            f"{source}: python is given, but with transport 'join' a node runs the interpreter with which it was"
            " started: remove it"
        )
    if environ is None:
        return group
    if group.transport == transports.LOCAL:
        for node in group.nodes:
            if not is_this_host(node.host):
                raise NodeGroupError(
                    f"{source}: nodes has host {shown(node.host)}, but transport 'local' starts every node on"
                    f" this host, {shown(socket.gethostname())}: name this host (or 'localhost') for each"
                    " node, or give a number of nodes; other hosts need transport 'ssh' or another"
                )
    elif not is_this_host(group.nodes[0].host):
        raise NodeGroupError(
            f"{source}: nodes has host {shown(group.nodes[0].host)} first, but node rank 0 must be the client's"
            f" own host, {shown(socket.gethostname())}: list it first"
        )
    return group


def is_this_host(host: str) -> bool:
    """Return whether the name is one of this host's: a loopback name, an address of it, or its own name."""
    name, own = host.lower(), socket.gethostname().lower()
    if name in ("localhost", own) or name in node_facts.interfaces():
        return True
    # A scheduler may say gpu-0 where the host calls itself gpu-0.cluster, or the other way round.
    if name.partition(".")[0] == own.partition(".")[0] and not ("." in name and "." in own):
        return True
    # The full name last: it may cost a question to the name server.
    return name == socket.getfqdn().lower()


def _nodes(value: object, source: str, *, joined: bool) -> tuple[Node, ...] | None:
    """Return the nodes described, None for ``auto``.

    Args:
        joined: whether they dial in: then those of a number are not all this host.
    """
    if value == AUTO:
        return None
    number = integer_of(value)
    if number is not None and 1 <= number <= MAX_NODES:
        if joined:
            return _unnamed(number, None)
        return (Node(host=socket.gethostname()),) * number
    if not isinstance(value, list | tuple) or not value:
        raise NodeGroupError(
            f"{source}: nodes is {shown(value)}: must be a number from 1 to {MAX_NODES}, 'auto', or a list with a"
            " host (a name, or a mapping with host) for each node"
        )
    return tuple(_node(entry, f"{source}: nodes[{index}]") for index, entry in enumerate(value))


def _unnamed(number: int, address: str | None) -> tuple[Node, ...]:
    """Return nodes of which nothing is known but their number; this host is the first."""
    others = (Node(host=f"node-rank-{rank}") for rank in range(1, number))
    return (Node(host=socket.gethostname(), address=address), *others)


def _contract_nodes(environ: Mapping[str, str], source: str) -> tuple[tuple[Node, ...], str]:
    """Return the nodes that a launcher has started beside the client job, and where they were found."""
    try:
        contract = Contract.from_environ(environ)
    except ContractError as e:
        raise NodeGroupError(f"{source}: nodes is 'auto': {e}") from None
    found = f"{source}, nodes 'auto': environment of the client job ({NNODES}={contract.nnodes})"
    return _unnamed(contract.nnodes, contract.master_addr), found


def _join(value: object, transport: object, source: str) -> JoinSettings | None:
    where = f"{source}: join"
    if transport != transports.JOIN:
        if value is None:
            return None
        raise NodeGroupError(f"{where} is given, but transport is {shown(transport)}: set transport to 'join'")
    keys = check_keys({} if value is None else value, JOIN_KEYS, where)
    return JoinSettings(
        file=text_of(keys.get("file"), f"{where} file", "the path of a join file"),
        ports=_ports(keys.get("ports"), f"{where} ports", DEFAULT_JOIN_PORTS),
        wait=_seconds(keys.get("wait"), f"{where} wait", DEFAULT_JOIN_WAIT),
    )


def _node(entry: object, where: str) -> Node:
    keys = check_keys({"host": entry} if isinstance(entry, str) else entry, NODE_KEYS, where)
    host = host_name(keys.get("host"), f"{where} host")
    if host is None:
        raise NodeGroupError(f"{where}: key 'host' is missing: give the name of the node")
    return Node(
        host=host,
        address=host_name(keys.get("address"), f"{where} address"),
        nproc_per_node=parse_nproc_per_node(keys.get("nproc_per_node"), f"{where} nproc_per_node"),
        python=text_of(keys.get("python"), f"{where} python", "the path of a Python interpreter"),
    )


def _transport(value: object, source: str) -> str | tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, str):
        value = tuple(value) if isinstance(value, list | tuple) else ()
    try:
        transports.template(value)
    except ValueError as e:
        raise NodeGroupError(f"{source}: transport is {shown(value)}: {e}") from None
    return value


def _patterns(value: object, source: str) -> tuple[str, ...]:
    if value is None:
        return DEFAULT_FORWARD
    if isinstance(value, list | tuple) and all(isinstance(entry, str) and entry for entry in value):
        return tuple(value)
    raise NodeGroupError(
        f"{source}: forward_env is {shown(value)}: must be a list of names or patterns such as 'NCCL_*'"
    )


def _one_of(choices: tuple[str, ...], value: object, where: str) -> str:
    if value is None:
        return choices[0]
    if isinstance(value, str) and value in choices:
        return value
    raise NodeGroupError(f"{where} is {shown(value)}: must be one of {', '.join(choices)}")


def _seconds(value: object, where: str, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= threading.TIMEOUT_MAX:
        return float(value)
    raise NodeGroupError(f"{where} is {shown(value)}: must be a number of seconds")


def _ports(value: object, where: str, default: tuple[int, int]) -> tuple[int, int]:
    if value is None:
        return default
    ports = [integer_of(port) for port in value] if isinstance(value, list | tuple) else []
    match ports:
        case [int(first), int(last)] if 1 <= first <= last <= 65535:
            return first, last
    raise NodeGroupError(
        f"{where} is {shown(value)}: must be a list of the first and the last port, from 1 to 65535"
    )
