"""What an agent finds on its node: versions, cores, GPUs, the way to the master (standard library only)."""

from __future__ import annotations

import array
import fcntl
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable

from nvflare_torchrun_plugin import __version__, wire
from nvflare_torchrun_plugin.node import cores

_RETRY = 0.5
"""Seconds between two questions for a name that is not known yet."""
_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s4x4s16x")
"""One answer of ``SIOCGIFCONF`` (``netdevice(7)``) on a 64-bit Linux: an interface's name and IPv4 address."""
_MAX_ADDRESSES = 1024
# What torch can use beside NVIDIA's GPUs: AMD's, Intel's and others' device files.
_OTHER_ACCELERATORS = re.compile(r"kfd|accel\d*|renderD\d+")


def hello() -> wire.Hello:
    """Return the agent's greeting."""
    return wire.Hello(
        version=__version__,
        torch=installed_version("torch"),
        nvflare=installed_version("nvflare"),
        python=".".join(map(str, sys.version_info[:3])),
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=cores.allotted_cores(),
        gpus=_gpus(),
        at=time.monotonic(),
    )


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None when it is not there.

    Read off the name of its metadata directory: ``importlib.metadata`` takes longer to import than all of the
    agent.
    """
    metadata = re.compile(rf"{re.escape(package)}-([^-]+)(\.dist-info|(-py[\d.]+)?\.egg-info)", re.IGNORECASE)
    for directory in sys.path:
        try:
            names = os.listdir(directory or ".")  # noqa: PTH208 - pathlib is not needed elsewhere here
        except OSError:
            continue
        for name in names:
            if found := metadata.fullmatch(name):
                return found[1]
    return None


def oom_kills(root: str = "/") -> int:
    """Return how many processes the kernel has killed so far for lack of memory in this process's cgroup.

    0 where it cannot be read. Version 2 counts those of cgroups below as well (``memory.events``); version 1 has
    the same word in ``memory.oom_control``.
    """
    for line in cores.read(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if line.startswith("0::"):
            file = f"{root}/sys/fs/cgroup{path}/memory.events"
        elif "memory" in controllers.split(","):
            file = f"{root}/sys/fs/cgroup/memory{path}/memory.oom_control"
        else:
            continue
        for entry in cores.read(file).splitlines():
            words = entry.split()
            if words[:1] == ["oom_kill"] and words[-1].isdecimal():
                return int(words[-1])
    return 0


def _gpus() -> int | None:
    gpus = cores.count_processes("gpu", os.environ)
    if gpus:
        return gpus
    names = [entry.name for place in ("/dev", "/dev/dri") if os.path.isdir(place) for entry in os.scandir(place)]  # noqa: PTH112
    return None if any(_OTHER_ACCELERATORS.fullmatch(name) for name in names) else 0


def find_master(name: str, timeout: float, clock: Callable[[], float] = time.monotonic) -> tuple[str | None, str]:
    """Ask for the address of node rank 0 until it is known.

    Args:
        name: its name or address.
        timeout: seconds until it is given up; a pod's name may be known some seconds after it has started.

    Returns:
        The address, and an empty text; or None and why it is not known.
    """
    deadline = clock() + timeout
    name = name.strip("[]")
    while True:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:
            reason = f"cannot resolve master address {name!r}: {getattr(e, 'strerror', None) or e}"
        else:
            return str(found[0][4][0]), ""
        if clock() + _RETRY > deadline:
            return None, f"{reason} (asked for {timeout:g} s)"
        time.sleep(_RETRY)


def interface_towards(address: str) -> str | None:
    """Return the name of the interface by which packets to the address leave, or on which it is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Connecting a datagram socket sends nothing; it only asks for the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address.partition("%")[0], 9))
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return interfaces().get(own)


def interfaces() -> dict[str, str]:
    """Return this host's addresses with the name of the interface that has each."""
    found = {}
    answers = array.array("B", bytes(_IFREQ.size * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        question = struct.pack("iL", len(answers), answers.buffer_info()[0])
        size, _ = struct.unpack("iL", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, question))
    for name, address in _IFREQ.iter_unpack(answers.tobytes()[:size]):
        # A second address of an interface may have a label: eth0:1.
        found[socket.inet_ntoa(address)] = name.rstrip(b"\0").decode().partition(":")[0]
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        rows = []
    for row in rows:
        found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))] = row[-1]
    return found
