"""How a command is started on a node: a transport is an argv template, known by name or written out by the site.

``{host}`` stands for the node. ``{command}`` stands for the agent's command as one word quoted for a shell,
because ssh hands its words to a shell on the other side; where it is absent, the command's words are appended.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

HOST = "{host}"
COMMAND = "{command}"
DESK = "{desk}"
"""In the template of ``join``: the private directory with the socket at which a node's connection is asked for."""
LOCAL = "local"
JOIN = "join"

# By task or in total: a step asks for the same again, which is too few or too many GPUs for one task on one node.
_GPU_OPTIONS = ("GPUS", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "NTASKS_PER_GPU", "NTASKS_PER_TRES", "TRES_PER_TASK")
# What else srun reads as its own options, as sbatch, salloc or a step around us set it for the tasks of the job.
# It would narrow the step (EXACT, GRES), break it (EXCLUSIVE, RESV_PORTS) or change the frames (LABELIO).
_STEP_OPTIONS = (
    *("GPUS_PER_NODE", "GPU_BIND", "GRES", "STEP_GRES", "TRES_BIND", "CPUS_PER_GPU", "EXACT", "EXCLUSIVE"),
    *("NTASKS_PER_CORE", "THREADS_PER_CORE", "HINT", "DISTRIBUTION", "DIST_PLANESIZE", "RESV_PORTS"),
    *("MEM_PER_CPU", "MEM_PER_GPU", "MEM_BIND", "LABELIO", "STDINMODE", "STDOUTMODE", "STDERRMODE"),
)
# No option of srun says "as if that were not set". SLURM_GPUS_ON_NODE is the number on the client job's own node.
_SRUN = (
    f'gpus=; [ -z "{"".join(f"$SLURM_{name}" for name in _GPU_OPTIONS)}" ]'
    " || gpus=${SLURM_GPUS_ON_NODE:+--gpus=$SLURM_GPUS_ON_NODE};"
    f" unset SRUN_CPUS_PER_TASK {' '.join(f'SLURM_{name}' for name in (*_GPU_OPTIONS, *_STEP_OPTIONS))};"
    ' exec srun $gpus "$@"'
)

_TEMPLATES: dict[str, tuple[str, ...]] = {
    # Every node is this host.
    LOCAL: (),
    # The user's own client and configuration. No question may be asked, and no terminal may change the bytes.
    "ssh": ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-T", HOST, COMMAND),
    # One step per node beside all others, with everything that the allocation has there: all cores and GPUs of its
    # node are a step's by default. Its environment is the client job's, whatever sbatch --export said; no MPI.
    "srun": (
        *("sh", "-c", _SRUN, "srun"),
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        "--mem=0",
        "--mpi=none",
        "--export=ALL",
        "--nodelist=" + HOST,
    ),
    # The node has connected by itself, and starts its agent itself. The shell is there for the name.
    JOIN: (
        "sh",
        "-c",
        'exec "$@"',
        JOIN,
        sys.executable,
        "-m",
        "nvflare_torchrun_plugin.joining.bridge",
        DESK,
        HOST,
    ),
}
# The client job may itself be in a step that has less than the allocation has on its host: cores, GPUs, memory.
_ALSO_ON_OWN_HOST = frozenset({"srun"})


def names() -> tuple[str, ...]:
    """Return the known transport names."""
    return tuple(_TEMPLATES)


def template(transport: str | Sequence[str]) -> tuple[str, ...]:
    """Return the argv template of a transport, which may be one already.

    Raises:
        ValueError: the name is unknown, or the template has no ``{host}``; the message says what it must be.
    """
    if isinstance(transport, str):
        if transport not in _TEMPLATES:
            raise ValueError(
                f"must be one of {', '.join(_TEMPLATES)}, or a list of words with {HOST} for the node"
            )
        return _TEMPLATES[transport]
    words = tuple(transport)
    if not words or not all(isinstance(word, str) and word and "\0" not in word for word in words):
        raise ValueError("must be a list of words, none of them empty")
    if HOST in words[0] or not any(HOST in word for word in words):
        raise ValueError(f"must have {HOST}, for the node, in one of the words after the first")
    return words


def argv(transport: str | Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """Return the argv that starts ``command`` on ``host``.

    Raises:
        ValueError: as :func:`template`.
    """
    words = [word.replace(HOST, host) for word in template(transport)]
    if not any(COMMAND in word for word in words):
        return [*words, *command]
    return [word.replace(COMMAND, shlex.join(command)) for word in words]


def on_own_host(transport: str | Sequence[str]) -> str | Sequence[str]:
    """Return the transport that starts a command on the client job's own host."""
    return transport if isinstance(transport, str) and transport in _ALSO_ON_OWN_HOST else LOCAL


def client(argv: Sequence[str]) -> str:
    """Return the name of the program that connects, for people; a shell's script has a name of its own."""
    named = len(argv) > 3 and tuple(argv[:2]) == ("sh", "-c")
    return os.path.basename(argv[3 if named else 0])  # noqa: PTH119 - a word of a command, not a file
