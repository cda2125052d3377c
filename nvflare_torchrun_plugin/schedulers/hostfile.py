"""A hostfile of Open MPI or DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping

from nvflare_torchrun_plugin.group_values import MAX_PROCESSES, NodeGroupError, shown
from nvflare_torchrun_plugin.schedulers import checks, host_lists
from nvflare_torchrun_plugin.schedulers.found import Found, Host

VARIABLES = (
    "PRTE_MCA_prte_default_hostfile",
    "OMPI_MCA_orte_default_hostfile",
    "DLTS_HOSTFILE",
)
"""Each names a hostfile; the first that is set counts."""


def find(environ: Mapping[str, str]) -> Found:
    """A hostfile: ``host slots=4``, ``host:4`` or ``host`` to a line, '#' begins a comment.

    It is the form of Open MPI ("Hostfile" in its documentation; ``max_slots`` concerns its mpirun alone, and a
    line without slots leaves the number open), and of DeepSpeed ("Resource Configuration"), which has no host
    twice. Here a host may be repeated as long as no line of it has slots: each line is one then.
    """
    variable = next(name for name in VARIABLES if name in environ)
    slots = host_lists.Slots(host_lists.named(variable, environ[variable]))
    with_slots: set[str] = set()
    for where, line in host_lists.lines(slots.where, environ[variable]):
        words = line.partition("#")[0].replace("=", " = ").split()
        if not words:
            continue
        name, count = _line(words, where)
        if name in slots.counts and (count is not None or name in with_slots):
            raise NodeGroupError(f"{where} has host {shown(name)} again: give its slots in one line")
        if count is not None:
            with_slots.add(name)
        slots.add(name, 1 if count is None else count, where)
    hosts = tuple(
        # A host that is there once without slots has not said 1.
        Host(host.name) if host.processes == 1 and host.name not in with_slots else host
        for host in slots.hosts()
    )
    return Found(
        f"hostfile ({variable}={checks.bare(environ[variable])})", hosts, "ssh", "start the client on one of them"
    )


def _line(words: list[str], where: str) -> tuple[str, int | None]:
    """Host and slots of a line of which every '=' is a word."""
    name, *rest = words
    if name.count(":") == 1 and not rest:
        # With more colons it is an IPv6 address.
        name, _, slots = name.partition(":")
        rest = ["slots", "=", slots]
    pairs = dict(zip(rest[::3], rest[2::3], strict=False))
    # Open MPI's "^host" leaves a host out and "+n0" counts in another list.
    if (
        name.startswith(("=", "^", "+"))
        or len(rest) != 3 * len(pairs)
        or not set(rest[1::3]) <= {"="}
        or not pairs.keys() <= {"slots", "max_slots"}
    ):
        raise NodeGroupError(
            f"{where} is {shown(' '.join(words))}: must be 'host', 'host slots=N' or 'host:N', correct it"
        )
    numbers = {key: checks.integer(value, f"{where} {key}", 1, MAX_PROCESSES) for key, value in pairs.items()}
    return name, numbers.get("slots")
