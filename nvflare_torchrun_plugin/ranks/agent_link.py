"""A rank's end of the connection to its node agent (standard library only; the other end: ``rank_port.py``).

The rank says who it is, gets its orders and a pipe for its output, and may tell a traceback at its end. This
runs in the script's process: what it needs is imported late, and never by name from ``sys.modules`` afterwards.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping
    from types import ModuleType
    from typing import Any

AGENT_DIR = "NVFL_AGENT_DIR"
SOCKET_NAME = "ranks"
TRACEBACK_LIMIT = 64 * 1024
"""Characters of a traceback that the agent gets, the last ones."""
SEND_TIMEOUT = 5.0
"""Seconds that the end of a rank waits at most for an agent that does not read."""


class AgentError(Exception):
    """The agent cannot be reached, or what it says is not valid."""


class Orders:
    """What the agent wants this rank to run.

    Attributes:
        module: ``target`` is a module's name (``python -m``), else a path.
        target: The module's name, or the script's path, absolute or relative to the working directory.
        args: What the script finds in ``sys.argv[1:]``.
        preload: What to import before the agent is asked for the rest of the environment (``a.b``, or ``a:b`` for
            ``from a import b``); None when there is nothing to wait for.
    """

    def __init__(self, module: bool, target: str, args: list[str], preload: list[str] | None) -> None:
        self.module = module
        self.target = target
        self.args = args
        self.preload = preload


class Agent:
    """The node agent of this rank, at the other end of a connected socket.

    Args:
        environ: torchrun's environment of this rank: ``RANK``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, and
            ``NVFL_AGENT_DIR``, which is removed from it.

    Raises:
        AgentError: a variable is missing or not a number, or nobody listens in that directory.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        import json
        import socket

        from nvflare_torchrun_plugin.node import private_dir

        # Kept here, because rank.main() takes the names out of sys.modules before the script runs.
        self._json: ModuleType = json
        self._socket: ModuleType = socket
        ranks = {"rank": _number(environ, "RANK"), "local_rank": _number(environ, "LOCAL_RANK")}
        hello = json.dumps({**ranks, "pid": os.getpid()}).encode() + b"\n"
        self._local_world_size = _number(environ, "LOCAL_WORLD_SIZE")
        directory = environ.pop(AGENT_DIR, "")
        if not directory:
            raise AgentError(f"{AGENT_DIR} is not set: only the node agent starts this module.")
        try:
            connection = private_dir.connect(directory, SOCKET_NAME)
            connection.sendall(hello)
        except OSError as error:
            raise AgentError(f"cannot reach the node agent in {directory!r}: {error}.") from None
        # A bare number: as an object, "python -X dev" would warn at the end that it was never closed.
        self._fd = connection.detach()
        self._rest = b""
        self._identity = _identity(self._fd)

    def receive_orders(self) -> Orders:
        """Wait for the agent's answer, put its pipe in place as the output, and return what to run.

        It waits as long as the agent lives.

        Raises:
            AgentError: the agent has gone, or its answer is not valid. The answer may hold secrets: of it, no more
                than a number or a type is told.
        """
        line, fds = self._receive_line()
        try:
            if not line.endswith(b"\n"):
                raise AgentError(f"the node agent ended after {len(line)} bytes of its answer.")
            try:
                answer: Any = self._json.loads(line)
            except ValueError as error:
                raise AgentError(f"the node agent's answer is not JSON ({error}).") from None
            if len(fds) != 1:
                raise AgentError(f"the node agent sent {len(fds)} descriptors with its answer, not 1.")
            orders, output = _checked(answer)
            _adopt_output(fds[0], output)
        finally:
            for fd in fds:
                os.close(fd)
        return orders

    def wait_for_go(self, failed: list[str]) -> dict[str, str]:
        """Say that everything is imported, wait for the agent's word to go on, and return the variables with it.

        Args:
            failed: a sentence for each module that could not be imported.

        Raises:
            AgentError: the agent has gone, or its answer is not valid.
        """
        message = self._json.dumps({"warm": failed, "of": self._local_world_size}).encode() + b"\n"
        connection = self._socket.socket(fileno=self._fd)
        try:
            connection.sendall(message)
        except OSError as error:
            raise AgentError(f"the node agent went away before it said go: {error}.") from None
        finally:
            connection.detach()
        line, fds = self._receive_line()
        for fd in fds:
            os.close(fd)
        try:
            answer: Any = self._json.loads(line)
        except ValueError as error:
            raise AgentError(f"the node agent's word to go on is not JSON ({error}).") from None
        environ = answer.get("environ") if type(answer) is dict else None
        if type(environ) is not dict or not all(type(value) is str for value in environ.values()):
            raise AgentError("the node agent's word to go on holds no environment.")
        return environ

    def report_uncaught(self, text: str) -> None:
        """Tell the agent with which traceback the script ended; an agent that has gone is no error."""
        message = self._json.dumps({"traceback": text[-TRACEBACK_LIMIT:]}).encode() + b"\n"
        try:
            # A script may have closed all descriptors (as daemons do) and have this number in other use now.
            if _identity(self._fd) != self._identity:
                return
            connection = self._socket.socket(fileno=self._fd)
            try:
                connection.settimeout(SEND_TIMEOUT)
                # The script may have given SIGPIPE its deadly default back.
                connection.sendall(message, self._socket.MSG_NOSIGNAL)
            finally:
                connection.detach()  # it stays open as long as the process lives
        except OSError:
            return

    def _receive_line(self) -> tuple[bytes, list[int]]:
        line = self._rest
        fds: list[int] = []
        connection = self._socket.socket(fileno=self._fd)
        try:
            while b"\n" not in line:
                part, more, _, _ = self._socket.recv_fds(connection, 65536, 4, self._socket.MSG_CMSG_CLOEXEC)
                fds += more
                line += part
                if not part:
                    break
        except OSError as error:
            raise AgentError(f"the node agent went away before it gave orders: {error}.") from None
        finally:
            connection.detach()
        if not line:
            raise AgentError("the node agent went away before it gave orders.")
        # To a rank that comes after its task the word to go on is sent together with the orders.
        line, newline, self._rest = line.partition(b"\n")
        return line + newline, fds


def _number(environ: MutableMapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise AgentError(f"{name} is {value!r} in the environment; torchrun sets a number for each rank.")
    return int(value)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _checked(answer: Any) -> tuple[Orders, tuple[int, int]]:
    if type(answer) is not dict:
        raise AgentError(f"the node agent's answer is a {type(answer).__name__}, not an object.")
    expected: dict[str, type] = {"module": bool, "target": str, "args": list, "output": list}
    for key, kind in expected.items():
        if type(answer.get(key)) is not kind:
            found = type(answer.get(key)).__name__
            raise AgentError(f"{key!r} of the node agent's answer is a {found}, not a {kind.__name__}.")
    module, target, args, output = (answer[key] for key in expected)
    if not all(type(arg) is str for arg in args):
        raise AgentError("'args' of the node agent's answer is not a list of str.")
    preload = answer.get("preload")
    if preload is not None and (type(preload) is not list or not all(type(name) is str for name in preload)):
        raise AgentError("'preload' of the node agent's answer is not a list of str.")
    if [type(number) for number in output] != [int, int]:
        raise AgentError(f"'output' of the node agent's answer is {output!r}, not [st_dev, st_ino].")
    return Orders(module, target, args, preload), (output[0], output[1])


def _adopt_output(pipe: int, inherited: tuple[int, int]) -> None:
    """Make ``pipe`` stdout and stderr, each only where torchrun left what it had from the agent itself.

    torchrun's ``--redirects`` and ``--tee`` give a rank files of its own; those stay.
    """
    for fd in (1, 2):
        try:
            kept = _identity(fd) == inherited
        except OSError:
            continue  # closed, and so it stays
        if kept:
            os.dup2(pipe, fd)
