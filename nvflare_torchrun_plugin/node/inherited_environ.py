"""Which inherited variables torchrun and its ranks must not see (standard library only)."""

from __future__ import annotations

from collections.abc import Mapping

# What torchrun (or a launcher like it) tells its ranks. When the translator itself runs below one, the values
# would be handed on wherever torchrun sets none of its own, and a script that reads them has the wrong rank.
_RANK_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
_RANK_PREFIXES = (
    "ROLE_",  # torchrun: rank and size among the ranks of one role
    "GROUP_",  # torchrun: rank and number of nodes
    "TORCHELASTIC_",  # torchrun: its run id, restart counts, error file, agent store of the other job
    "PET_",  # torchrun: default of any option; PET_STANDALONE=1 even beats options that are given
)
# How a scheduler laid out *its* tasks: one for each node or for the client job, not one for each rank. MPI
# and training frameworks take them for the rank's own. The job's id and its hosts stay, so that a rank's logs
# and checkpoints can name the job.
_LAYOUT_NAMES = frozenset(
    {
        "SLURM_NTASKS",  # number of tasks; frameworks compare it to their own number of ranks
        "SLURM_NPROCS",  # older name of the same
        "SLURM_NTASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
        "SLURM_PROCID",  # global rank of the task
        "SLURM_LOCALID",  # local rank of the task
        "SLURM_NODEID",  # node rank in the allocation, which may be larger than the node group
        "SLURM_GTIDS",  # global ranks of all tasks on this node
        "SLURM_TASK_PID",  # process id of the task, not of the rank
        "MPI_LOCALRANKID",  # Intel MPI and MVAPICH: rank and size on the node
        "MPI_LOCALNRANKS",
    }
)
_LAYOUT_PREFIXES = (
    "SLURM_STEP_",  # the step that started this process: its tasks, nodes and ports
    "OMPI_",  # Open MPI: a script that loads MPI would try to join the outer mpirun
    "PMI_",  # process management interfaces, through which MPI finds its rank
    "PMIX_",
    "PALS_",  # HPE Cray's launcher
    "FLUX_TASK_",  # Flux: task ids in the job
)


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the inherited variables that mislead torchrun or its ranks."""
    return {name: value for name, value in environ.items() if not _misleads(name)}


def _misleads(name: str) -> bool:
    return (
        name in _RANK_NAMES
        or name in _LAYOUT_NAMES
        or name.startswith(_RANK_PREFIXES)
        or name.startswith(_LAYOUT_PREFIXES)
    )
