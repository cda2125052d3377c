"""The transport ``join``: its stdin and stdout are a connection that a node has opened (standard library only).

``python -m nvflare_torchrun_plugin.joining.bridge DIRECTORY NODE ...`` asks the client job, at a socket in its
private directory, for the node's connection. What may follow is the command for other transports: here the node
itself starts its agent.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys

from nvflare_torchrun_plugin.joining.greeting import END
from nvflare_torchrun_plugin.node import private_dir

SOCKET = "join"
TAKEN = b"+\n"
"""The answer when the node is there; any other line says why it is not."""
_CHUNK = 1 << 16


def main(argv: list[str]) -> int:
    """Serve one agent; return the exit code."""
    directory, node = argv[:2]
    with private_dir.connect(directory, SOCKET) as desk:
        desk.sendall(node.encode() + b"\n")
        answer = b""
        # Byte by byte: what follows the line is the agent's.
        while not answer.endswith(b"\n") and (byte := desk.recv(1)):
            answer += byte
        if answer != TAKEN:
            print(answer.decode(errors="replace").strip() or "the client job ends", file=sys.stderr)
            return 1
        code = _pump(desk)
        if code is not None:
            return code
    print(f"the connection of node {node} has broken", file=sys.stderr)
    return 1


def _pump(desk: socket.socket) -> int | None:
    """Pass on orders and frames to the end of either; return the agent's exit code, None when it has not come."""
    end = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(desk, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    orders = os.read(0, _CHUNK)
                    if not orders:
                        # Nobody waits for frames any more.
                        return 0
                    desk.sendall(orders)
                    continue
                received = desk.recv(_CHUNK)
                if not received:
                    return None
                frames, mark, rest = (b"", b"", received) if end else received.partition(END)
                _write(frames)
                end += mark + rest
                if len(end) > 1:
                    return end[1]


def _write(frames: bytes) -> None:
    while frames:
        frames = frames[os.write(1, frames) :]


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except OSError as error:
        sys.exit(f"the connection to the client job has broken: {error}")
