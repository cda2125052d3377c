"""How many CPU cores this node gives us, and over how many processes they go.

Standard library only, and without pathlib, because the translator starts with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping


def allotted_cores(root: str = "/") -> int:
    """Return the number of cores that this process may use, at least 1.

    That is the smaller of its CPU affinity and the tightest CPU quota of its cgroups (version 1 and 2),
    rounded up: ``os.cpu_count()`` knows neither, and a container with a quota of 4 cores on a host with 128
    would start 128 threads.

    Args:
        root: where the ``proc`` and ``sys`` file systems are found, for tests.
    """
    cores = len(os.sched_getaffinity(0))
    for quota, period in _quotas(root):
        # Rounded up: 1.5 cores can keep two threads busy. In integers, so that huge values stay exact.
        cores = min(cores, -(-quota // period))
    return max(1, cores)


def count_processes(nproc_per_node: str, environ: Mapping[str, str], root: str = "/") -> int | None:
    """Return how many processes torchrun starts on this node, None where only torch can tell.

    Args:
        nproc_per_node: torchrun's option: a number of at least 1, or a word. torchrun takes ``cpu`` for the
            CPUs that this process may run on, ``gpu`` for the GPUs, and ``auto`` for the GPUs if there are
            any, else the CPUs. GPUs are counted here as NVIDIA's driver shows them.
        environ: where ``CUDA_VISIBLE_DEVICES`` is looked up.
        root: where the ``dev`` file system is found, for tests.
    """
    if nproc_per_node in ("gpu", "auto"):
        gpus = _count_gpus(environ, root)
        if gpus or nproc_per_node == "gpu":
            return gpus or None
    if nproc_per_node in ("cpu", "auto"):
        return len(os.sched_getaffinity(0))
    return None if nproc_per_node.isalpha() else int(nproc_per_node)


def _count_gpus(environ: Mapping[str, str], root: str) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        with os.scandir(f"{root}/dev") as files:
            return sum(file.name.startswith("nvidia") and file.name[6:].isdecimal() for file in files)
    chosen = 0
    for device in visible.split(","):
        # CUDA ignores everything from the first invalid one on.
        if device.strip() in ("", "-1"):
            break
        chosen += 1
    return chosen


def _quotas(root: str) -> Iterator[tuple[int, int]]:
    """Yield (quota, period) in microseconds for each limit that applies to this process."""
    mounts = f"{root}/sys/fs/cgroup"
    for line in read(f"{root}/proc/self/cgroup").splitlines():
        # "id:controllers:path"; version 2 names no controllers.
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        # The usual mount points; "unified" is version 2 on hosts that have both.
        if line.startswith("0::"):
            for mount in (mounts, f"{mounts}/unified"):
                for directory in _upwards(mount, path):
                    yield from _pair(read(f"{directory}/cpu.max"))
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys((f"{mounts}/cpu", f"{mounts}/{controllers}")):
                for directory in _upwards(mount, path):
                    quota, period = (read(f"{directory}/cpu.cfs_{name}_us") for name in ("quota", "period"))
                    yield from _pair(f"{quota} {period}")


def _upwards(mount: str, path: str) -> Iterator[str]:
    """Yield the cgroup's directory and its parents' up to the mount point, which limit it as well.

    Inside a container the path may be the host's, and not exist below the mount point; then only the mount
    point itself, the container's own cgroup, is found. A path that leads out of the namespace starts with
    ``/..``, and nothing below the mount point belongs to it.
    """
    names = [name for name in path.split("/") if name]
    if ".." in names:
        names = []
    for length in range(len(names), -1, -1):
        yield "/".join([mount, *names[:length]])


def read(file: str) -> str:
    """Return what a file of the kernel says, nothing when it cannot be read."""
    try:
        with open(file, errors="surrogateescape") as opened:
            return opened.read()
    except OSError:
        return ""


def _pair(text: str) -> Iterator[tuple[int, int]]:
    """Yield (quota, period) if the text is that; "max" and -1 mean no limit."""
    words = text.split()
    if len(words) == 2 and all(word.isascii() and word.isdigit() for word in words):
        quota, period = int(words[0]), int(words[1])
        if quota > 0 and period > 0:
            yield quota, period
