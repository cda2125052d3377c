"""What one attempt will start, decided in full before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nvflare_torchrun_plugin.contract import Contract
from nvflare_torchrun_plugin.node import staging


@dataclass(frozen=True)
class Member:
    """One node that may be part of the group, as the supervisor starts it.

    Attributes:
        host: its name, for people.
        agent_argv: what starts the node agent there, the transport's words included.
        nproc_per_node: its processes, or torchrun's word for a number.
    """

    host: str
    agent_argv: tuple[str, ...]
    nproc_per_node: int | str


@dataclass(frozen=True)
class Launch:
    """One attempt: its nodes, what they run, and its bounds.

    Attributes:
        name: unique on every host, letters, digits and dashes; ends up in names of temporary directories.
        members: the nodes that the supervisor starts, node rank 0 first.
        least: how many of them must be there; the group is made of those that are.
        contract: node rank 0's, if all of them are there.
        spans_hosts: whether they are several hosts.
        torchrun_args: further options of torchrun.
        env: variables for the ranks, with secrets resolved.
        cwd: working directory of the ranks: the directory of the job's app.
        marker: name of a file in it, by which a node tells that it sees the same directory.
        stage: whether nodes get a copy of the job's folder: ``auto`` (those that do not see it), ``always``,
            ``never``.
        forward_env: patterns of variables that go from the client job to the nodes.
        module: whether ``target`` is a module's name.
        target: script path or module name.
        args: its arguments, with secrets resolved.
        shown_args: the arguments as they may be seen in a process list.
        join_timeout: seconds for the agents to appear, and after that for the ranks of all nodes to meet.
        node_timeout: seconds of silence after which a node is lost; a rank may be stopped (SIGSTOP) as long.
        hang_timeout: seconds without a line from any rank after which the group is failed; None: never.
        serves_job: whether it is there before the job's first task, and waits for it and for all others.
        grace: seconds between SIGTERM and SIGKILL.
        log_dir: directory for the ranks' files and the verdict.
        log_ranks: global ranks whose lines go to the client's log; None means all.
        preload: what the ranks import before they wait for their task; None: they do not wait.
        owes_result: whether rank 0 must have had a result accepted before it ends.
        folder: name of the folder in ``cwd`` that nodes get a copy of; ``.`` is all of it.
    """

    name: str
    members: tuple[Member, ...]
    least: int
    contract: Contract
    spans_hosts: bool
    torchrun_args: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    marker: str
    stage: str
    forward_env: tuple[str, ...]
    module: bool
    target: str
    args: tuple[str, ...]
    shown_args: tuple[str, ...]
    join_timeout: float
    node_timeout: float
    hang_timeout: float | None
    serves_job: bool
    grace: float
    log_dir: str
    log_ranks: frozenset[int] | None
    preload: tuple[str, ...] | None = None
    owes_result: bool = True
    folder: str = staging.FOLDER
