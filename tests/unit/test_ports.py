"""One port for one attempt."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nvflare_torchrun_plugin.launching import ports


@pytest.fixture
def free_pair() -> tuple[int, int]:
    """Two neighbouring ports that nothing listens on."""
    for first in range(20011, 30000, 2):
        try:
            for port in (first, first + 1):
                ports.reserve((port, port)).release()
        except OSError:
            continue
        return first, first + 1
    raise AssertionError("no two free ports")


@pytest.fixture
def busy(free_pair: tuple[int, int]) -> Iterator[int]:
    """The first of the two, with a listener."""
    with socket.create_server(("", free_pair[0])):
        yield free_pair[0]


def test_no_port_is_reserved_twice(free_pair: tuple[int, int]) -> None:
    first, second = ports.reserve(free_pair), ports.reserve(free_pair)
    try:
        assert {first.port, second.port} == set(free_pair)
        with pytest.raises(OSError, match="no free port") as caught:
            ports.reserve(free_pair)
        assert str(caught.value) == (
            f"no free port in master_port_range {free_pair[0]}..{free_pair[1]} on this host; widen the range"
        )
        first.release()
        again = ports.reserve(free_pair)
        assert again.port == first.port
        again.release()
    finally:
        first.release()
        second.release()


def test_another_process_sees_the_claim_and_its_end(free_pair: tuple[int, int]) -> None:
    port = free_pair[0]
    script = (
        "from nvflare_torchrun_plugin.launching import ports\n"
        f"held = ports.reserve(({port}, {port}))\n"
        "print(held.port, flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"{port}\n"
        with pytest.raises(OSError, match="no free port"):
            ports.reserve((port, port))
        other.kill()
    held = ports.reserve((port, port))
    assert held.port == port
    held.release()


def test_a_busy_port_is_skipped(free_pair: tuple[int, int], busy: int) -> None:
    for _ in range(8):  # the pick is random
        held = ports.reserve(free_pair)
        assert held.port == free_pair[1] != busy
        held.release()


def test_a_reserved_port_can_be_listened_on(free_pair: tuple[int, int]) -> None:
    held = ports.reserve(free_pair)
    with socket.create_server(("", held.port)) as server:
        assert server.getsockname()[1] == held.port
    held.release()
