"""Stands for ssh where every node is this host: ``pump.py HOST COMMAND...`` connects its streams to the command's.

The command is in a session of its own; it sees the end of its orders when this ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading


def copy(source: int, sink: int) -> None:
    while data := os.read(source, 1 << 16):
        os.write(sink, data)
    os.close(sink)


def main() -> int:
    command = subprocess.Popen(
        sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
    )
    assert command.stdin is not None
    assert command.stdout is not None
    threading.Thread(target=copy, args=(0, command.stdin.fileno()), daemon=True).start()
    copy(command.stdout.fileno(), 1)
    return command.wait()


if __name__ == "__main__":
    sys.exit(main())
