"""The address at which the other nodes reach node rank 0."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"


class MasterAddressError(ValueError):
    """There is no address that other hosts could reach; one clear sentence."""


def address(given: str | None, first: str, others: Sequence[str]) -> str:
    """Return the master address of a group that spans several hosts.

    As given; else the host name of node rank 0, if it means another address here than loopback (Debian maps a
    host's own name to 127.0.1.1); else the address of the interface that routes to another node.

    Args:
        given: what the description says of node rank 0.
        first: host name of node rank 0, this host.
        others: names or addresses of the other nodes.

    Raises:
        MasterAddressError: what is given is loopback, or none can be found.
    """
    if given is not None:
        if _is_loopback(given):
            raise MasterAddressError(
                f"the address {given!r} of node rank 0 is loopback, which no other host reaches: give another"
            )
        return _bracketed(given)
    addresses = _addresses(first)
    if addresses and not any(map(_is_loopback, addresses)):
        return first
    for other in others:
        for found in _addresses(other):
            own = _own_address_towards(found)
            if own is not None and not _is_loopback(own):
                return _bracketed(own)
    raise MasterAddressError(
        f"no address found at which {', '.join(others)} could reach this host: {first!r} means"
        f" {', '.join(addresses) or 'nothing'} here, and there is no route to them: give node rank 0 an address"
        " (nodes: [{host: ..., address: ...}, ...])"
    )


def _bracketed(address: str) -> str:
    """Return an IPv6 address as the contract has it, all else as it is."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _addresses(name: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        return []


def _own_address_towards(address: str) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Connecting a datagram socket sends nothing; it only asks for the route.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return address.lower() == "localhost"
