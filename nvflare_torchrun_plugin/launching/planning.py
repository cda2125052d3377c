"""From node group and program to a launch: names, port, contract and command lines of one attempt."""

from __future__ import annotations

import math
import shlex
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvflare_torchrun_plugin import node_agent, torchrun_node, transports
from nvflare_torchrun_plugin.contract import Contract, ContractError
from nvflare_torchrun_plugin.description.group_choice import DEFAULT_NPROC_PER_NODE
from nvflare_torchrun_plugin.description.group_description import Node, NodeGroup, is_this_host
from nvflare_torchrun_plugin.group_values import shown
from nvflare_torchrun_plugin.launching import master, ports
from nvflare_torchrun_plugin.launching.launch import Launch, Member
from nvflare_torchrun_plugin.launching.program import Program
from nvflare_torchrun_plugin.node import staging

_LEAD = 60.0
"""Seconds by which nodes give up on each other before NVFlare gives up on the launch, so that the missing
node gets named."""

_LONGEST = 1_000_000
"""Most seconds of any bound: one that an agent's poll cannot take ends the agent."""


class PlanError(ValueError):
    """An option is wrong, or this host cannot give what the attempt needs; one clear sentence."""


@dataclass(frozen=True)
class Options:
    """The executor's options for a launch, checked.

    Attributes:
        torchrun_args: further options of torchrun.
        join_timeout: seconds for the nodes to meet.
        node_timeout: seconds of silence after which a node is lost; a rank may be stopped (SIGSTOP) as long.
        hang_timeout: seconds without a line from any rank after which a group is failed; None: never.
        grace: seconds between SIGTERM and SIGKILL.
        log_ranks: global ranks whose lines go to the client's log; None means all.
    """

    torchrun_args: tuple[str, ...]
    join_timeout: int
    node_timeout: float
    hang_timeout: float | None
    grace: float
    log_ranks: frozenset[int] | None

    @classmethod
    def parse(
        cls,
        *,
        torchrun_args: object,
        join_timeout: object,
        launch_timeout: float | None,
        node_timeout: object,
        hang_timeout: object = None,
        grace: float | None,
        log_ranks: object,
    ) -> Options:
        """Return the options.

        Raises:
            PlanError: one is wrong; the message names the executor's argument and the value.
        """
        return cls(
            _torchrun_args(torchrun_args),
            _join_timeout(join_timeout, launch_timeout),
            _seconds("node_timeout", node_timeout),
            None if hang_timeout is None else _seconds("hang_timeout", hang_timeout),
            _grace(grace),
            _ranks(log_ranks),
        )


@dataclass(frozen=True)
class Plan:
    """What all attempts of a run have in common.

    Attributes:
        group: the node group.
        program: what the ranks run.
        target: the script's absolute path or the module's name.
        app_dir: the ranks' working directory.
        log_dir: gets one directory per attempt.
        options: the executor's options.
        owes_result: whether rank 0 must have had a result accepted before it ends.
        folder: name of the folder in ``app_dir`` that nodes get a copy of; ``.`` is all of it.
    """

    group: NodeGroup
    program: Program
    target: str
    app_dir: str
    log_dir: str
    options: Options
    owes_result: bool = True
    folder: str = staging.FOLDER


def launch(
    plan: Plan,
    number: int,
    without: Sequence[Node] = (),
    *,
    serves_job: bool = False,
    preload: tuple[str, ...] | None = None,
) -> tuple[Launch, ports.Reservation | None]:
    """Plan attempt ``number`` of the run, with a name and a port of its own.

    Args:
        plan: the run.
        number: counts the run's attempts, from 1.
        without: nodes that sit this attempt out.
        serves_job: whether it is there before the job's first task, and for all of them.
        preload: what the ranks import before they wait for their task; None: they do not wait.

    Returns:
        The launch, and the reservation of its port, to be released when the attempt is over.

    Raises:
        PlanError: no port is free, or there is no address that the other nodes could reach.
        ProgramError: a secret is not set on this site.
    """
    args, env = plan.program.resolved()
    name = f"{number}-{uuid.uuid4().hex[:16]}"
    group = plan.group
    nodes = [node for node in group.nodes if node not in without]
    spans_hosts = not all(is_this_host(node.host) for node in nodes[1:])
    first, reservation = _first_contract(group, nodes, name, spans_hosts)
    members = tuple(_member(group, node, node_rank) for node_rank, node in enumerate(nodes))
    return (
        Launch(
            name=name,
            members=members,
            least=min(group.least or len(group.nodes), len(members)),
            contract=first,
            spans_hosts=spans_hosts,
            torchrun_args=plan.options.torchrun_args,
            env={**group.env, **env},
            cwd=plan.app_dir,
            marker=f".nvfl-shared-{name}",
            stage=group.stage,
            forward_env=group.forward_env,
            module=plan.program.module is not None,
            target=plan.target,
            args=args,
            shown_args=plan.program.args,
            join_timeout=plan.options.join_timeout,
            node_timeout=plan.options.node_timeout,
            hang_timeout=plan.options.hang_timeout,
            serves_job=serves_job,
            grace=plan.options.grace,
            log_dir=str(Path(plan.log_dir, f"attempt-{number:04d}")),
            log_ranks=plan.options.log_ranks,
            preload=preload,
            owes_result=plan.owes_result,
            folder=plan.folder,
        ),
        reservation,
    )


def _first_contract(
    group: NodeGroup, nodes: Sequence[Node], name: str, spans_hosts: bool
) -> tuple[Contract, ports.Reservation | None]:
    if group.contract is not None:
        return group.contract, None
    if len(nodes) == 1:
        # torchrun --standalone picks a port by itself; the run id is there for people who look at processes.
        return Contract(run_id=name), None
    first, *others = nodes
    address = first.address or master.LOOPBACK
    try:
        if spans_hosts:
            address = master.address(first.address, first.host, [node.address or node.host for node in others])
        reservation = ports.reserve(group.master_port_range)
    except (OSError, master.MasterAddressError) as e:
        raise PlanError(str(e)) from None
    try:
        return Contract(len(nodes), 0, address, reservation.port, name), reservation
    except ContractError as e:
        reservation.release()
        raise PlanError(f"the address of node rank 0 cannot be used: {e}") from None


def python_of(group: NodeGroup, node: Node) -> str:
    """Return the path of the interpreter on the node."""
    return node.python or group.python or sys.executable


def _member(group: NodeGroup, node: Node, node_rank: int) -> Member:
    # Node rank 0 is the client job's own host, whose loopback its rank 0 needs.
    transport = group.transport if node_rank > 0 else transports.on_own_host(group.transport)
    return Member(
        host=node.host,
        agent_argv=tuple(transports.argv(transport, node.host, node_agent.command(python_of(group, node)))),
        nproc_per_node=node.nproc_per_node or DEFAULT_NPROC_PER_NODE,
    )


def _torchrun_args(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = shlex.split(value)
        except ValueError as e:
            raise PlanError(f"torchrun_args is {value!r}: cannot be split into words ({e})") from None
    if not isinstance(value, Sequence):
        raise PlanError(f"torchrun_args is {value!r}: must be a string or a list of strings")
    try:
        torchrun_node.check_options(value)
    except torchrun_node.UsageError as e:
        raise PlanError(f"torchrun_args is {value!r}: {e}") from None
    return tuple(value)


def _join_timeout(value: object, launch_timeout: float | None) -> int:
    if value is None:
        if launch_timeout is None:
            return torchrun_node.DEFAULT_JOIN_TIMEOUT
        return max(1, math.floor(min(max(launch_timeout - _LEAD, launch_timeout / 2), _LONGEST)))
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LONGEST:
        raise PlanError(f"join_timeout is {shown(value)}: must be a whole number of seconds, from 1 to {_LONGEST}")
    if launch_timeout is not None and value >= launch_timeout:
        raise PlanError(
            f"join_timeout is {value}, but launch_timeout is {launch_timeout:g}: it must be less, or the node"
            " that is missing is never named"
        )
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 1 <= value <= _LONGEST:
        return float(value)
    raise PlanError(f"{name} is {shown(value)}: must be a number of seconds, from 1 to {_LONGEST}")


def _grace(value: float | None) -> float:
    """NVFlare has checked that it is a number of at least 0, or None for a default."""
    if value is None:
        return node_agent.DEFAULT_GRACE
    if value > _LONGEST:
        raise PlanError(f"stop_grace_period is {shown(value)}: must be at most {_LONGEST} seconds")
    return value


def _ranks(value: object) -> frozenset[int] | None:
    if value == "all":
        return None
    ranks = value if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks):
        return frozenset(ranks)
    raise PlanError(f"log_ranks is {value!r}: must be 'all' or a list of global ranks such as [0]")
