"""Slurm's allocation."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from nvflare_torchrun_plugin.group_values import MAX_PROCESSES, NodeGroupError, integer_of, shown
from nvflare_torchrun_plugin.schedulers import checks
from nvflare_torchrun_plugin.schedulers.found import MAX_HOSTS, Found, Host

SCONTROL_TIMEOUT = 30.0
"""Seconds for ``scontrol``, which asks no daemon when it expands a list."""


def find(environ: Mapping[str, str]) -> Found:
    """Slurm: the job's node list, expanded by Slurm's own tool (``scontrol show hostnames``, scontrol(1)).

    SLURM_JOB_NUM_NODES is the allocation's. SLURM_NNODES means the same in a batch script (sbatch(1)), but in
    a step it is the step's (srun(1)): it counts only where the other is missing. SLURMD_NODENAME is this
    host's name in Slurm, which need not be its host name (NodeName and NodeHostname, slurm.conf(5)).
    """
    checks.integer(checks.required(environ, "SLURM_JOB_ID"), "SLURM_JOB_ID", 1, 2**32)
    node_list = checks.host(checks.required(environ, "SLURM_JOB_NODELIST"), "SLURM_JOB_NODELIST")
    names = _expand(node_list, environ)
    size = "SLURM_JOB_NUM_NODES" if "SLURM_JOB_NUM_NODES" in environ else "SLURM_NNODES"
    checks.agree(environ, size, len(names), f"SLURM_JOB_NODELIST {shown(node_list)} has {len(names)} hosts")
    processes = _processes(environ, len(names))
    return Found(
        f"Slurm allocation {checks.job(environ, 'SLURM_JOB_ID')}(SLURM_JOB_NODELIST={checks.bare(node_list)})",
        tuple(Host(name, processes=count) for name, count in zip(names, processes, strict=True)),
        "srun",
        "start the client by sbatch, or in an interactive allocation through 'srun --pty' (salloc leaves the"
        " shell on the submit host unless slurm.conf has LaunchParameters=use_interactive_step)",
        here=environ.get("SLURMD_NODENAME"),
    )


def _expand(node_list: str, environ: Mapping[str, str]) -> list[str]:
    command = "scontrol show hostnames"
    value = f"SLURM_JOB_NODELIST is {shown(node_list)}"
    try:
        done = subprocess.run(
            [*command.split(), node_list],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SCONTROL_TIMEOUT,
            env=dict(environ),
            check=False,
        )
        output = done.stdout.decode()
    except FileNotFoundError:
        raise NodeGroupError(f"{value}, but there is no scontrol in PATH to expand it: add Slurm's") from None
    except subprocess.TimeoutExpired:
        raise NodeGroupError(
            f"{value}, but '{command}' did not end in {SCONTROL_TIMEOUT:g} s: find out what it waits for"
        ) from None
    except UnicodeDecodeError:
        raise NodeGroupError(f"{value}, but '{command}' prints no UTF-8: correct the list") from None
    except (OSError, ValueError) as error:
        # ValueError: a value of the mapping that no environment can hold.
        raise NodeGroupError(f"{value}, but '{command}' cannot be started: {error}; correct this") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise NodeGroupError(
            f"{value}, but '{command}' fails with exit status {done.returncode} and says {shown(said)}:"
            " leave the list as Slurm sets it"
        )
    lines = [line.strip() for line in output.split("\n") if line.strip()]
    return checks.distinct(lines, f"SLURM_JOB_NODELIST {shown(node_list)}")


def _processes(environ: Mapping[str, str], hosts: int) -> list[int | None]:
    """GPUs per node, else tasks per node.

    SLURM_GPUS_PER_NODE holds what ``--gpus-per-node`` was given, SLURM_GPUS_ON_NODE the number on this node
    alone (sbatch(1)). A step on another node asks for as many where the job asked in total (``--gpus``), so
    the nodes must have the same number then; in a step, it is the step's own, and else tells nothing of what a
    wider step will have. So do the task variables (srun(1)). One task per node is how torchrun is started and
    says nothing of processes.
    """
    unknown: list[int | None] = [None] * hosts
    gpus = _gpus(environ, "SLURM_GPUS_PER_NODE", MAX_PROCESSES)
    in_step = "SLURM_STEP_ID" in environ
    if gpus is None:
        gpus = _gpus(environ, "SLURM_GPUS_ON_NODE", MAX_PROCESSES)
        total = _gpus(environ, "SLURM_GPUS", MAX_HOSTS * MAX_PROCESSES)
        if in_step and not total:
            gpus = None
        elif gpus and total and gpus * hosts != total and not in_step:
            raise NodeGroupError(
                f"SLURM_GPUS is {shown(environ['SLURM_GPUS'])}, but SLURM_GPUS_ON_NODE is"
                f" {shown(environ['SLURM_GPUS_ON_NODE'])}: a step has to ask for its GPUs, so each of the {hosts}"
                " hosts must have the same number: ask for them by --gpus-per-node"
            )
    if gpus:
        return [gpus] * hosts
    if "SLURM_TASKS_PER_NODE" not in environ or in_step:
        return unknown
    if checks.optional(environ, "SLURM_NTASKS", 1, MAX_HOSTS * MAX_PROCESSES) is None:
        return unknown
    tasks = _tasks_per_node(environ["SLURM_TASKS_PER_NODE"], hosts)
    return list(tasks) if max(tasks) > 1 else unknown


def _gpus(environ: Mapping[str, str], name: str, most: int) -> int | None:
    """Number in Slurm's ``[type:]number[,[type:]number...]``."""
    text = environ.get(name)
    if text is None:
        return None
    numbers = [integer_of(part.rpartition(":")[2]) for part in text.split(",")]
    total = sum(number for number in numbers if number is not None)
    if any(number is None or number < 0 for number in numbers) or total > most:
        raise NodeGroupError(
            f"{name} is {shown(text)}: must be a number of GPUs, or numbers by type as in 'a100:2,v100:2':"
            " leave it as Slurm sets it"
        )
    return total


def _tasks_per_node(text: str, hosts: int) -> list[int]:
    """Counts in Slurm's short form, in which ``2(x3),1`` is 2, 2, 2, 1 (sbatch(1))."""
    where = f"SLURM_TASKS_PER_NODE is {shown(text)}"
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        repeats = int(match[2] or 1) if match else 0
        if not match or not repeats or not 1 <= int(match[1]) <= MAX_PROCESSES:
            raise NodeGroupError(f"{where}: must be numbers of tasks as in '2(x3),1': leave it as Slurm sets it")
        # One more than there are hosts is enough to see that there are too many.
        counts += [int(match[1])] * min(repeats, hosts + 1 - len(counts))
    if len(counts) != hosts:
        raise NodeGroupError(
            f"{where}: must have a count for each of the {hosts} hosts in SLURM_JOB_NODELIST: leave both as"
            " Slurm sets them"
        )
    return counts
