"""What a scheduler's variables come to: hosts, and where they were found."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HOSTS = 4096
"""Most hosts of an allocation: each costs this host a process."""

INSIDE = "start the client inside the job"
"""What to do on a host that is not in the allocation."""


@dataclass(frozen=True)
class Host:
    """One host of an allocation."""

    name: str
    """Name by which the transport reaches it."""

    address: str | None = None
    """Address at which the other hosts reach it; None: its name."""

    processes: int | None = None
    """Processes that the allocation is meant for on it; None: it does not say."""


@dataclass(frozen=True)
class Found:
    """An allocation as a row of the table finds it, before this host is put first."""

    source: str
    hosts: tuple[Host, ...]
    transport: tuple[str, ...] | str
    elsewhere: str | None = None
    """What to do when this host is none of them; None: the first host is known to be this one."""

    here: str | None = None
    """The scheduler's own word for which of them this host is."""
