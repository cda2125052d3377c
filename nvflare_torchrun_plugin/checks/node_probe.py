"""One node's part in the question which nodes can connect to which (standard library only).

    python -m nvflare_torchrun_plugin.checks.node_probe

Questions come as lines of JSON on stdin, the answers go out the same way; the end of stdin is its end. First
``{"master": ADDRESS, "port": PORT}`` (0: any): it listens there and tells its own address on the way to the
master. Then ``{"targets": [[ADDRESS, PORT], ...], "timeout": SECONDS}``: for each, null or why it cannot connect.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from typing import Any

ANSWER = "probe"
"""The key of every answer, by which it is told from what a login shell says."""
_LONGEST = 300
"""Seconds after which it ends, whoever has forgotten it."""


def main() -> None:
    """Answer the questions on stdin."""
    signal.alarm(_LONGEST)
    try:
        first = _ask()
        port = _listen(int(first["port"]))
        _say({"address": own_address(str(first["master"])), "port": port})
        second = _ask()
        _say([*_connect_all([(str(host), int(port)) for host, port in second["targets"]], second["timeout"])])
        sys.stdin.read()
    except EOFError:
        return
    except OSError as error:
        _say({"error": str(error)})


def own_address(towards: str) -> str | None:
    """Return this host's address on the way to another; None when there is no way."""
    try:
        found = socket.getaddrinfo(towards.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing; it only asks for the route.
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError:
        return None


def why_not(address: str, port: int, timeout: float) -> str | None:
    """Return why nobody can be connected to there; None when somebody can."""
    try:
        socket.create_connection((address.strip("[]"), port), timeout).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _ask() -> Any:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return json.loads(line)


def _say(answer: object) -> None:
    # A login shell may have left a word without a newline before it.
    sys.stdout.write(f"\n{json.dumps({ANSWER: answer})}\n")
    sys.stdout.flush()


def _listen(port: int) -> int:
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", port))

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    found: int = server.getsockname()[1]
    return found


def _connect_all(targets: list[tuple[str, int]], timeout: float) -> list[str | None]:
    """Try all targets at the same time."""
    results: list[str | None] = [None] * len(targets)

    def connect(number: int) -> None:
        results[number] = why_not(*targets[number], timeout)

    threads = [threading.Thread(target=connect, args=(number,)) for number in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


if __name__ == "__main__":
    main()
