"""Batch systems that list the job's hosts, a slot or some to a line: PBS, LSF and Grid Engine."""

from __future__ import annotations

from collections.abc import Mapping

from nvflare_torchrun_plugin.group_values import MAX_PROCESSES, NodeGroupError, shown
from nvflare_torchrun_plugin.schedulers import checks, host_lists
from nvflare_torchrun_plugin.schedulers.found import INSIDE, Found


def pbs(environ: Mapping[str, str]) -> Found:
    """PBS: a line for each process, with its host (PBS Professional User's Guide and pbs_resources(7): the
    host of a chunk is repeated ``mpiprocs`` times; TORQUE: once per slot of ``ppn``)."""
    path = environ["PBS_NODEFILE"]
    slots = host_lists.Slots(host_lists.named("PBS_NODEFILE", path))
    for where, line in host_lists.lines(slots.where, path):
        slots.add(line, 1, where)
    return Found(
        f"PBS allocation {checks.job(environ, 'PBS_JOBID')}(PBS_NODEFILE={checks.bare(path)})",
        slots.hosts(),
        "ssh",
        f"{INSIDE}, by qsub",
    )


def lsf(environ: Mapping[str, str]) -> Found:
    """LSF: a host for each slot, in the file LSB_DJOB_HOSTFILE one to a line, in LSB_HOSTS one after another
    (IBM Spectrum LSF, "Environment variables set for job execution"). LSF leaves LSB_HOSTS out when it gets
    long, so the file goes before it. LSB_DJOB_NUMPROC is the number of slots."""
    variable = "LSB_DJOB_HOSTFILE" if "LSB_DJOB_HOSTFILE" in environ else "LSB_HOSTS"
    value = environ[variable]
    if variable == "LSB_HOSTS":
        slots = host_lists.Slots(f"{variable} {shown(value)}")
        for index, word in enumerate(value.split(), 1):
            slots.add(word, 1, f"{slots.where} word {index}")
    else:
        slots = host_lists.Slots(host_lists.named(variable, value))
        for where, line in host_lists.lines(slots.where, value):
            slots.add(line, 1, where)
    hosts = slots.hosts()
    checks.agree(environ, "LSB_DJOB_NUMPROC", slots.total, f"{slots.where} has {slots.total} slots")
    return Found(
        f"LSF allocation {checks.job(environ, 'LSB_JOBID')}({variable}={checks.bare(value)})",
        hosts,
        "ssh",
        f"{INSIDE}, by bsub",
    )


def grid_engine(environ: Mapping[str, str]) -> Found:
    """Grid Engine: ``host slots queue processors`` to a line, a line for each queue of a host (sge_pe(5));
    NHOSTS and NSLOTS are the job's numbers of hosts and slots (qsub(1))."""
    path = environ["PE_HOSTFILE"]
    slots = host_lists.Slots(host_lists.named("PE_HOSTFILE", path))
    for where, line in host_lists.lines(slots.where, path):
        words = line.split()
        if len(words) < 2:
            raise NodeGroupError(
                f"{where} is {shown(line)}: must be 'host slots queue processors', leave the file as Grid"
                " Engine writes it"
            )
        slots.add(words[0], checks.integer(words[1], f"{where} slots", 1, MAX_PROCESSES), where)
    hosts = slots.hosts()
    checks.agree(environ, "NHOSTS", len(hosts), f"{slots.where} has {len(hosts)} hosts")
    checks.agree(environ, "NSLOTS", slots.total, f"{slots.where} has {slots.total} slots")
    return Found(
        f"Grid Engine allocation {checks.job(environ, 'JOB_ID')}(PE_HOSTFILE={checks.bare(path)})",
        hosts,
        "ssh",
        f"{INSIDE}, by qsub",
    )
