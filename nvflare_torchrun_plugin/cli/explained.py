"""A plan in plain data: for each node what would be started there, by the functions that start it.

Ports and names of attempts are new each time; those here are examples.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..launching.launch import Launch
    from ..launching.planning import Plan

__all__ = ["REDACTED", "explain"]

REDACTED = "(not shown)"
_AGENT_DIR = "AGENT_DIR"
"""Stands for the agent's private directory, made when it starts."""
# Whatever else is set may be a secret; a description's `env` and most patterns of `forward_env` are made for them.
_SHOWN = ("NVFL_*", "NCCL_*", "GLOO_*", "UCX_*", "PYTHONPATH", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS")
_BY_NODE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")
"""What the node adds where it is not set: the interface that leads to node rank 0, cores over processes."""


def explain(plan: Plan, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what an attempt of the plan would do; nothing is started.

    Args:
        plan: what to run.
        environ: the environment of the client job, or of `nvflare-torchrun run`.

    Raises:
        PlanError, ProgramError: it cannot be planned.
    """
    from ..launching import planning

    launch, reservation = planning.launch(plan, 1)
    if reservation is not None:
        reservation.release()
    group, rendezvous = plan.group, launch.contract.nnodes > 1
    return {
        "node_group": {
            "source": group.source,
            "nodes": group.nnodes,
            "least": launch.least,
            "transport": group.transport if isinstance(group.transport, str) else list(group.transport),
        },
        "master_address": launch.contract.master_addr if rendezvous else None,
        "master_port_range": list(group.master_port_range) if rendezvous and group.contract is None else None,
        "directory": plan.app_dir,
        "target": plan.target,
        "log_dir": plan.log_dir,
        "nodes": [_node(plan, launch, node_rank, environ) for node_rank in range(len(launch.members))],
    }


def _node(plan: Plan, launch: Launch, node_rank: int, environ: Mapping[str, str]) -> dict[str, Any]:
    from .. import torchrun_node
    from ..description.group_description import is_this_host
    from ..launching import planning
    from ..node import node_facts
    from ..node_agent import translator_words
    from ..supervision import start_order

    member = launch.members[node_rank]
    here = node_rank == 0 or is_this_host(member.host)
    part = start_order.contract(launch, node_rank, len(launch.members))
    order = start_order.build(
        launch,
        environ,
        part,
        member.nproc_per_node,
        node_facts.hello() if here else None,
        tag=f"{launch.name}-{node_rank}",
        copy=None,
        elapsed=0.0,
    )
    words = translator_words(_AGENT_DIR, order)
    python = planning.python_of(plan.group, plan.group.nodes[node_rank])
    return {
        "node_rank": node_rank,
        "host": member.host,
        "transport": list(member.agent_argv),
        "contract": part.to_environ(),
        "translator": [python, "-m", torchrun_node.__name__, *words],
        # It is made with this interpreter in front.
        "torchrun": [python, *torchrun_node.build_torchrun_argv(words, order.env)[1:]],
        "staging": "none" if here else _staging(plan),
        "environment": _environment(order.env, environ if here else None),
    }


def _staging(plan: Plan) -> str:
    folder = str(Path(plan.app_dir, plan.folder))
    return {
        "never": f"none: {plan.app_dir} must be there",
        "always": f"a copy of {folder}",
        "auto": f"a copy of {folder}, unless the node sees it",
    }[plan.group.stage]


def _environment(added: Mapping[str, str], own: Mapping[str, str] | None) -> dict[str, Any]:
    """Return what the ranks find.

    Args:
        added: what the node is sent.
        own: the environment to which it is added; None where only the node knows it.
    """
    from ..node.inherited_environ import clean_environ

    kept = None
    hidden = None
    if own is not None:
        kept = sorted(set(clean_environ(own)) - set(added))
        hidden = sorted(set(own) - set(clean_environ(own)))
    return {
        "set": {
            name: value if any(fnmatch.fnmatchcase(name, pattern) for pattern in _SHOWN) else REDACTED
            for name, value in sorted(added.items())
        },
        "set_by_node": [name for name in _BY_NODE if name not in {**(own or {}), **added}],
        "kept": kept,
        "hidden": hidden,
    }
