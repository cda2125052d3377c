"""A rendezvous port for one attempt that no other job or site on this host picks at the same time."""

from __future__ import annotations

import random
import socket


class Reservation:
    """One port, held until :meth:`release`.

    The TCP port itself must stay free for torchrun, which binds it seconds later. So the claim is a second,
    abstract Unix socket named after the port: visible to every user of this network namespace, exactly the
    scope in which the port is shared, and gone with its holder however that ends.
    """

    def __init__(self, port: int, claim: socket.socket) -> None:
        self.port = port
        self._claim = claim

    def release(self) -> None:
        """Let others take the port."""
        self._claim.close()


def reserve(port_range: tuple[int, int]) -> Reservation:
    """Reserve a port of the closed range that nothing listens on, picked at random.

    Raises:
        OSError: every port is taken; the message names the range.
    """
    first, last = port_range
    for port in random.sample(range(first, last + 1), last - first + 1):
        claim = _claim(port)
        if claim is None:
            continue
        if _is_free(port):
            return Reservation(port, claim)
        claim.close()
    raise OSError(f"no free port in master_port_range {first}..{last} on this host; widen the range")


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0nvflare-torchrun-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_free(port: int) -> bool:
    """Return whether torchrun could listen on the port, as it does: all addresses, address reuse on."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True
