"""A cluster of SkyPilot."""

from __future__ import annotations

from collections.abc import Mapping

from nvflare_torchrun_plugin.group_values import MAX_PROCESSES, shown
from nvflare_torchrun_plugin.schedulers import checks
from nvflare_torchrun_plugin.schedulers.found import Found, Host


def find(environ: Mapping[str, str]) -> Found:
    """SkyPilot: IP addresses, one to a line, in the order of SKYPILOT_NODE_RANK (SkyPilot documentation,
    "Environment Variables and Secrets"). SKYPILOT_NUM_GPUS_PER_NODE is 0 where the task wants none."""
    checks.index_zero(environ, "SKYPILOT_NODE_RANK", "rank 0")
    value = checks.required(environ, "SKYPILOT_NODE_IPS")
    names = checks.distinct(value.split(), f"SKYPILOT_NODE_IPS {shown(value)}")
    counted = f"SKYPILOT_NODE_IPS {shown(value)} has {len(names)} addresses"
    checks.agree(environ, "SKYPILOT_NUM_NODES", len(names), counted)
    gpus = checks.optional(environ, "SKYPILOT_NUM_GPUS_PER_NODE", 0, MAX_PROCESSES) or None
    return Found(
        f"SkyPilot cluster (SKYPILOT_NODE_IPS={checks.bare(' '.join(names))})",
        tuple(Host(name, processes=gpus) for name in names),
        "ssh",
    )
