"""Memory that the ranks of a node share: it has no name anywhere, and is gone with the last process that uses it.

A memory file of the kernel (``memfd_create``) needs no room in /dev/shm, which is small in many containers.
"""

from __future__ import annotations

import mmap
import os


def create(nbytes: int) -> int:
    """Return a descriptor of ``nbytes`` bytes of new memory, all zero; the caller closes it.

    Raises:
        OSError: there is none, or no descriptor is left.
    """
    descriptor = os.memfd_create("nvflare-model", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_shared(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the memory; what is written is seen by all."""
    return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_WRITE)


def map_private(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the memory; a page of it becomes this process's own when it is first written."""
    return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
