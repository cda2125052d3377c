"""What NVFlare's backend starts as "the trainer": a stand-in for the group (standard library only).

It hands its environment, which holds the Client API bootstrap, to the supervisor in the CJ, passes on the
signals to end and those that announce something (SIGUSR1, SIGUSR2), each with its sender, waits, and exits with
the code that the supervisor gives. It prints nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading

from nvflare_torchrun_plugin.node import private_dir

SOCKET = "relay"
SUPERVISOR_GONE = 70
"""Exit code when the supervisor went away without giving one (``EX_SOFTWARE``)."""


DIR_VARIABLE = "NVFL_SUPERVISOR_DIR"
"""Names the supervisor's private directory; the ranks do not get it."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run the relay and return its exit code."""
    directory = os.environ.pop(DIR_VARIABLE, None)
    if directory is None:
        sys.exit(f"relay: {DIR_VARIABLE} is not set: TorchrunExecutor has NVFlare start it, nobody else does")
    try:
        with private_dir.connect(directory, SOCKET) as channel:
            answer = _serve(channel)
    except OSError:
        answer = b""
    if not answer.endswith(b"\n"):
        # Only a CJ that was killed leaves without a word, so nobody else will remove this.
        private_dir.remove(directory)
        return SUPERVISOR_GONE
    return int(json.loads(answer)["exit"])


def _serve(channel: socket.socket) -> bytes:
    """Hand over the environment, and pass signals on until the answer is complete or there will be none."""
    # A handler would not learn who has sent one; who waits for it does.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    # One that closes while we still send has said why before.
    with contextlib.suppress(OSError):
        channel.sendall(json.dumps({"environ": dict(os.environ)}).encode() + b"\n")
    threading.Thread(target=_pass_on, args=(channel,), daemon=True).start()
    answer = b""
    while not answer.endswith(b"\n") and (piece := channel.recv(1024)):
        answer += piece
    return answer


def _pass_on(channel: socket.socket) -> None:
    """Tell of each signal as it comes, as long as somebody listens."""
    with contextlib.suppress(OSError):
        while True:
            got = signal.sigwaitinfo(_PASSED_ON)
            channel.sendall(json.dumps({"signal": got.si_signo, "sender": got.si_pid}).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
