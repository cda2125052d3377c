"""What an agent is told to start, put together from the launch and from what its node has answered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.contract import Contract
from nvflare_torchrun_plugin.description import node_environ
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node import bootstrap
from nvflare_torchrun_plugin.supervision import agreement

_LEAST_MEETING = 60
"""Seconds that torchrun's own rendezvous gets, unless join_timeout is shorter, however late the agents came."""


def contract(launch: Launch, node_rank: int, nnodes: int) -> Contract:
    """Return a node's part of the contract in a group of ``nnodes`` of the launch's members."""
    first = launch.contract
    if nnodes == len(launch.members):
        # Or more, where somebody else has started the others.
        return dataclasses.replace(first, node_rank=node_rank)
    if nnodes == 1:
        return Contract(run_id=first.run_id)
    return dataclasses.replace(first, nnodes=nnodes, node_rank=node_rank)


def build(
    launch: Launch,
    environ: Mapping[str, str],
    part: Contract,
    nproc_per_node: int | str,
    hello: wire.Hello | None,
    *,
    tag: str,
    copy: str | None,
    elapsed: float,
) -> wire.Start:
    """Return the order for one node.

    Args:
        launch: the attempt.
        environ: the environment that NVFlare gave the relay.
        part: the node's contract.
        nproc_per_node: its processes, or torchrun's word for a number.
        hello: what its agent found.
        tag: the agent's name.
        copy: where the copy of the job's folder is on the node; None when it sees the folder itself.
        elapsed: seconds since the attempt began.

    Raises:
        OSError, ValueError: the Client API bootstrap cannot be read.
    """
    env = node_environ.forwarded(environ, launch.forward_env)
    task, text = _bootstrap(environ, part.node_rank)
    env.update(task)
    if launch.hang_timeout is not None:
        # On SIGABRT each rank then prints the stacks of its threads.
        env["PYTHONFAULTHANDLER"] = "1"
    cwd, target = launch.cwd, launch.target
    if copy is not None:
        cwd, target = copy, node_environ.in_copy(target, launch.cwd, copy, launch.folder)
        path = env.get("PYTHONPATH", "")
        env["PYTHONPATH"] = node_environ.path_in_copy(path, launch.cwd, copy, launch.folder)
    meeting = math.ceil(min(launch.join_timeout, max(launch.join_timeout - elapsed, _LEAST_MEETING)))
    return wire.Start(
        tag=tag,
        argv=(
            f"--nproc-per-node={agreement.processes(nproc_per_node, hello)}",
            f"--join-timeout={meeting}",
            *launch.torchrun_args,
            "-m",
            "nvflare_torchrun_plugin.rank",
            *(("-m",) if launch.module else ()),
            target,
            *launch.shown_args,
        ),
        env={**env, **launch.env, **part.to_environ()},
        cwd=cwd,
        module=launch.module,
        target=target,
        args=launch.args,
        bootstrap=text,
        grace=launch.grace,
        holds=launch.preload is not None,
        preload=launch.preload or (),
    )


def go(environ: Mapping[str, str], node_rank: int) -> wire.Go:
    """Return the order by which ranks that wait take up their task.

    Args:
        environ: the environment that NVFlare gave the task's relay.
        node_rank: the node's.

    Raises:
        OSError, ValueError: the Client API bootstrap cannot be read.
    """
    return wire.Go(*_bootstrap(environ, node_rank))


def _bootstrap(environ: Mapping[str, str], node_rank: int) -> tuple[dict[str, str], str | None]:
    """Return the variable that names the bootstrap on node 0, and the text for the others."""
    file = environ.get(bootstrap.FILE_VARIABLE)
    if file is None:
        return {}, None
    if node_rank == 0:
        return {bootstrap.FILE_VARIABLE: file}, None
    return {}, bootstrap.without_secret(Path(file).read_text(encoding="utf-8"))
