"""Lists of hosts, in files or not, with slots on each."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from nvflare_torchrun_plugin.group_values import MAX_PROCESSES, NodeGroupError, shown
from nvflare_torchrun_plugin.schedulers import checks
from nvflare_torchrun_plugin.schedulers.found import Host

MAX_FILE_SIZE = 1 << 20
"""Most bytes of a file that lists hosts."""


class Slots:
    """Slots by host, in the order in which the hosts come."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.counts: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def add(self, name: str, count: int, where: str) -> None:
        host = checks.host(name, f"{where} host")
        self.counts[host] = self.counts.get(host, 0) + count
        if self.counts[host] > MAX_PROCESSES:
            raise NodeGroupError(f"{where} gives host {shown(host)} more than {MAX_PROCESSES} slots: correct it")

    def hosts(self) -> tuple[Host, ...]:
        """The hosts. One slot on each of them is how a person asks for nodes, and says nothing of processes."""
        names = checks.distinct(list(self.counts), self.where)
        known = max(self.counts.values()) > 1
        return tuple(Host(name, processes=self.counts[name] if known else None) for name in names)


def named(variable: str, path: str) -> str:
    """Return how messages name the file."""
    return f"{variable} {shown(path)}"


def lines(where: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of the lines of a file that are not blank.

    It is read at once and opened without waiting: a pipe would keep the client for ever.
    """
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MAX_FILE_SIZE + 1) if regular else b""
    except OSError as error:
        raise NodeGroupError(f"{where} cannot be read: {error.strerror}; correct it") from None
    except ValueError:  # no path can hold a NUL character or half of a character pair
        raise NodeGroupError(f"{where} is no path: correct it") from None
    if not regular:
        raise NodeGroupError(f"{where} is no regular file: correct it")
    if len(content) > MAX_FILE_SIZE:
        raise NodeGroupError(f"{where} has more than {MAX_FILE_SIZE} bytes: it lists no hosts, correct it")
    for number, raw in enumerate(content.split(b"\n"), 1):
        place = f"{where} line {number}"
        try:
            line = raw.decode().strip()
        except UnicodeDecodeError:
            raise NodeGroupError(f"{place} is {shown(raw)}: must be UTF-8, correct it") from None
        if line:
            yield place, line


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
