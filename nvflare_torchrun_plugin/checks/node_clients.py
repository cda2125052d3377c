"""What a checkup starts on nodes, by a client each: a command that does nothing, an agent, a probe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nvflare_torchrun_plugin import transports, wire
from nvflare_torchrun_plugin.checks import node_probe
from nvflare_torchrun_plugin.description.group_description import NodeGroup
from nvflare_torchrun_plugin.launching import planning
from nvflare_torchrun_plugin.supervision.channel import Channel
from nvflare_torchrun_plugin.verdict import describe

_REACH_BOUND = 30.0
"""Seconds for a node to run a command that does nothing."""
_AGENT_BOUND = 60.0
"""Seconds for an agent to greet, and to answer."""
_PROBE_BOUND = 40.0
"""Seconds for a probe to start, or to try its connections."""
_END_BOUND = 10.0
"""Seconds for an agent or a probe to end when told."""


@dataclass(frozen=True)
class Target:
    """One node as a client reaches it.

    Attributes:
        name: what people are told; several nodes may be one host.
        host: its host.
        transport: how a command is started there.
        python: the interpreter there.
    """

    name: str
    host: str
    transport: str | Sequence[str]
    python: str

    def argv(self, command: Sequence[str]) -> list[str]:
        """Return the client's command line that starts the command there."""
        return transports.argv(self.transport, self.host, list(command))


@dataclass
class AgentSaid:
    """What an agent has said of its node.

    Attributes:
        hello: its greeting, None if there was none.
        ready: what it has found out, None if it did not get so far.
        seconds: it took to greet.
        wrong: why there is no answer; empty when there is one.
    """

    hello: wire.Hello | None = None
    ready: wire.Ready | None = None
    seconds: float = 0.0
    wrong: str = ""


def targets(group: NodeGroup) -> list[Target]:
    """Return the group's nodes in the order of their ranks."""
    hosts = [node.host for node in group.nodes]
    return [
        Target(
            host if hosts.count(host) == 1 else f"{host} (node {node_rank})",
            host,
            group.transport if node_rank else transports.on_own_host(group.transport),
            planning.python_of(group, group.nodes[node_rank]),
        )
        for node_rank, host in enumerate(hosts)
    ]


async def reach(target: Target, environ: Mapping[str, str]) -> tuple[str, float]:
    """Run a command that does nothing; return what is wrong, or nothing and the seconds it took."""
    argv = target.argv(["true"])
    began = time.monotonic()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environ),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        return f"{target.name}: {argv[0]} cannot be started: {error.strerror}", 0.0
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _REACH_BOUND)
    except asyncio.TimeoutError:
        return f"{target.name}: no answer within {_REACH_BOUND:g} s; try: {shlex.join(argv)}", 0.0
    finally:
        await _kill(process)
    if process.returncode:
        lines = output.decode(errors="backslashreplace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        how = f"{transports.client(argv)} ended with {describe(process.returncode)}"
        return f"{target.name}: {how}{': ' if said else ''}{said}; try: {shlex.join(argv)}", 0.0
    return "", time.monotonic() - began


async def ask_agent(
    argv: Sequence[str], environ: Mapping[str, str], question: wire.Prepare, node_timeout: float
) -> AgentSaid:
    """Start an agent, ask it, and end it, also when nobody waits for the answer any more.

    Args:
        argv: the client's command line that starts it.
        environ: the client's environment.
        question: what it is asked.
        node_timeout: seconds of silence after which it is lost.
    """
    found = AgentSaid()
    answered = asyncio.Event()
    began = time.monotonic()

    def on_frame(frame: wire.Frame) -> None:
        if isinstance(frame, wire.Hello):
            found.hello, found.seconds = frame, time.monotonic() - began
        elif isinstance(frame, wire.Ready):
            found.ready = frame
            answered.set()

    channel = Channel(argv, environ, node_timeout, on_frame, lambda _: None)
    channel.post(question)
    serving = asyncio.create_task(channel.run())
    waiting = asyncio.create_task(answered.wait())
    try:
        await asyncio.wait({serving, waiting}, timeout=_AGENT_BOUND, return_when="FIRST_COMPLETED")
        if found.ready is None:
            found.wrong = serving.result() if serving.done() else f"no word from it within {_AGENT_BOUND:g} s"
    finally:
        waiting.cancel()
        try:
            channel.post(wire.Stop(0.0))
            await asyncio.wait({serving}, timeout=_END_BOUND)
            channel.kill()
            await asyncio.wait({serving}, timeout=_END_BOUND)
        finally:
            serving.cancel()
    return found


class Probe:
    """A probe on a node (see ``node_probe``), and the client that connects to it.

    Args:
        target: the node.
        environ: the client's environment.
    """

    def __init__(self, target: Target, environ: Mapping[str, str]) -> None:
        self._argv = target.argv([target.python, "-m", node_probe.__name__])
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, question: object) -> object:
        """Return the answer, or a sentence that says why there is none."""
        try:
            return await asyncio.wait_for(self._ask(question), _PROBE_BOUND)
        except asyncio.TimeoutError:
            return f"nothing within {_PROBE_BOUND:g} s"
        except (OSError, ValueError) as error:
            return str(error)

    async def _ask(self, question: object) -> object:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=dict(self._environ),
                cwd="/",
                start_new_session=True,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            return "nothing"
        stdin.write(json.dumps(question).encode() + b"\n")
        while line := await stdout.readline():
            with contextlib.suppress(ValueError):
                answer = json.loads(line)
                if isinstance(answer, dict) and node_probe.ANSWER in answer:
                    return answer[node_probe.ANSWER]
        return "nothing, it has ended"

    async def end(self) -> None:
        """End it."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_BOUND)
        await _kill(self._process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the client if it has not ended; whatever it has started elsewhere hears the end of its stdin."""
    if process.returncode is None:
        # It leads a session of its own, so nothing else is hit.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.communicate(), _END_BOUND)
