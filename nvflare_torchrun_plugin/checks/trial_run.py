"""A run of a node group without a job: plans for it, and a small all-reduce over the real translator."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvflare_torchrun_plugin.checks import all_reduce, findings
from nvflare_torchrun_plugin.checks.findings import Check
from nvflare_torchrun_plugin.description.group_description import NodeGroup
from nvflare_torchrun_plugin.launching import planning, program
from nvflare_torchrun_plugin.supervision import standalone
from nvflare_torchrun_plugin.supervision.group import Group

GLOO, NCCL = "gloo", "nccl"

_JOIN_BOUND = 90
"""Seconds for the nodes' torchruns to meet."""
_RUN_BOUND = 240.0
"""Seconds for an all-reduce, all imports included, on a busy machine."""


def plan(group: NodeGroup, app_dir: Path, logs: Path, backend: str) -> planning.Plan:
    """Return the plan of an all-reduce over all nodes.

    Args:
        group: the nodes.
        app_dir: where the ranks work.
        logs: gets their files.
        backend: ``gloo`` or ``nccl``.

    Raises:
        PlanError: it cannot be planned.
    """
    options = planning.Options.parse(
        torchrun_args=None,
        join_timeout=_JOIN_BOUND,
        launch_timeout=None,
        node_timeout=30.0,
        grace=1.0,
        log_ranks="all",
    )
    return planning.Plan(
        dataclasses.replace(group, least=0, stage="auto"),
        program.parse(None, all_reduce.__name__, [backend], {}),
        all_reduce.__name__,
        str(app_dir),
        str(logs),
        options,
        owes_result=False,
        folder=".",
    )


def name_of(backend: str) -> str:
    """Return the name of the check."""
    return f"all-reduce ({backend})"


async def check(
    group: NodeGroup, names: Sequence[str], environ: Mapping[str, str], backend: str, processes: int | str
) -> Check:
    """Let all ranks add up their numbers.

    Args:
        group: the nodes.
        names: what people are told of them.
        environ: the environment of this process.
        backend: ``gloo`` or ``nccl``.
        processes: ranks on each node, or torchrun's word for a number.
    """
    right: set[int] = set()

    def show(_node_rank: int, rank: int | None, text: str) -> None:
        if rank is not None and text == all_reduce.RIGHT:
            right.add(rank)

    def begun(group: Group) -> None:
        limit = f"no end within {_RUN_BOUND:g} s"
        asyncio.get_running_loop().call_later(_RUN_BOUND, group.stop, limit)

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nvfl-checkup-") as folder:
        app_dir = Path(folder, "app")
        app_dir.mkdir()
        nodes = tuple(dataclasses.replace(node, nproc_per_node=processes) for node in group.nodes)
        made = plan(dataclasses.replace(group, nodes=nodes), app_dir, Path(folder, "logs"), backend)
        logger = logging.Logger("checkup", logging.CRITICAL)
        try:
            verdict = await standalone.run(made, environ, logger, show, begun)
        except (planning.PlanError, OSError) as error:
            return Check.of(name_of(backend), {names[0]: str(error)}, "")
    ranks = f"{len(right)} ranks on {len(names)} nodes, {time.monotonic() - began:.1f} s"
    return Check.of(name_of(backend), findings.blame(names, verdict), ranks)
