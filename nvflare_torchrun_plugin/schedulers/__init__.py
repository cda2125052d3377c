"""From a scheduler's environment to hosts, for ``nodes: auto``: one table of schedulers, the first match wins.

A row matches when one of its variables is set, and then it decides: what is set but does not add up is an error
that shows it, and never a reason to look further, or to go on with fewer nodes than were allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nvflare_torchrun_plugin.group_values import NodeGroupError, shown
from nvflare_torchrun_plugin.schedulers import batch, hostfile, kubernetes, skypilot, slurm
from nvflare_torchrun_plugin.schedulers.found import INSIDE, MAX_HOSTS, Found, Host
from nvflare_torchrun_plugin.schedulers.host_lists import MAX_FILE_SIZE

__all__ = ["MAX_FILE_SIZE", "MAX_HOSTS", "Allocation", "Host", "discover"]


@dataclass(frozen=True)
class Allocation:
    """What a scheduler has given to the job that this process is in."""

    scheduler: str
    """Name of the scheduler."""

    source: str
    """Where the hosts were found, in words for a person."""

    hosts: tuple[Host, ...]
    """This host first, the others in the scheduler's order, each once."""

    transport: tuple[str, ...] | str
    """How a command is started on a host: a transport's name, or an argv template."""


@dataclass(frozen=True)
class _Row:
    scheduler: str
    variables: tuple[str, ...]
    find: Callable[[Mapping[str, str]], Found]


def discover(environ: Mapping[str, str], this_host: Callable[[str], bool]) -> Allocation:
    """Return the allocation that the environment describes.

    Args:
        environ: the environment of the client job.
        this_host: whether a name is one of this host's. It is not asked where the scheduler tells the rank.

    Raises:
        NodeGroupError: there is none, a variable or a file is wrong, or this host may not lead the group.
    """
    for row in _TABLE:
        if any(name in environ for name in row.variables):
            try:
                found = row.find(environ)
                hosts = found.hosts if found.elsewhere is None else _this_first(found, this_host)
            except NodeGroupError as error:
                raise NodeGroupError(f"{row.scheduler}: {error}") from None
            return Allocation(row.scheduler, found.source, hosts, found.transport)
    names = ", ".join(name for row in _TABLE for name in row.variables)
    raise NodeGroupError(
        f"no scheduler's allocation is around this process: none of {names} is set: {INSIDE} of a scheduler,"
        " or name the nodes"
    )


def _this_first(found: Found, this_host: Callable[[str], bool]) -> tuple[Host, ...]:
    here = [host for host in found.hosts if host.name == found.here]
    here = here or [host for host in found.hosts if this_host(host.name)]
    if here:
        return (here[0], *(host for host in found.hosts if host is not here[0]))
    names = ", ".join(host.name for host in found.hosts)
    raise NodeGroupError(
        f"this host is not among the hosts {shown(names)} of the {found.source}: {found.elsewhere}"
    )


# A job's own variables come first, a hostfile last: its variable may be a standing setting of the machine.
_TABLE = (
    _Row("Slurm", ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"), slurm.find),
    _Row("PBS", ("PBS_NODEFILE",), batch.pbs),
    _Row("LSF", ("LSB_DJOB_HOSTFILE", "LSB_HOSTS"), batch.lsf),
    _Row("Grid Engine", ("PE_HOSTFILE",), batch.grid_engine),
    _Row("SkyPilot", ("SKYPILOT_NODE_IPS",), skypilot.find),
    _Row("Kubernetes", ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"), kubernetes.leader_worker_set),
    _Row("Kubernetes", ("JOB_COMPLETION_INDEX",), kubernetes.indexed_job),
    _Row("hostfile", hostfile.VARIABLES, hostfile.find),
)
