"""Tries a node group without a job, step by step: what a group would find out too, but one thing at a time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvflare_torchrun_plugin import (
    agreement,
    all_reduce,
    node_agent,
    node_probe,
    planning,
    program,
    standalone,
    transports,
    wire,
)
from nvflare_torchrun_plugin.channel import Channel
from nvflare_torchrun_plugin.group import Group
from nvflare_torchrun_plugin.group_description import NodeGroup
from nvflare_torchrun_plugin.launch import Launch
from nvflare_torchrun_plugin.verdict import Verdict, describe

OK, FAILED, SKIPPED = "ok", "failed", "skipped"

_REACH_BOUND = 30.0
"""Seconds for a node to run a command that does nothing."""
_AGENT_BOUND = 60.0
"""Seconds for an agent to greet, and to answer."""
_NAME_BOUND = 10.0
"""Seconds for a name to be known."""
_CONNECT_BOUND = 5.0
"""Seconds for one connection."""
_PROBE_BOUND = 40.0
"""Seconds for a probe to start, or to try its connections."""
_END_BOUND = 10.0
"""Seconds for an agent or a probe to end when told."""
_JOIN_BOUND = 90
"""Seconds for the nodes' torchruns to meet."""
_RUN_BOUND = 240.0
"""Seconds for an all-reduce, all imports included, on a busy machine."""


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: what.
        state: ``ok``, ``failed``, or ``skipped`` because something before it has failed.
        detail: what was found; or what is wrong on which node, and what to do.
        nodes: hosts on which it failed.
    """

    name: str
    state: str
    detail: str
    nodes: tuple[str, ...] = ()


@dataclass
class _Found:
    """What an agent has said of its node."""

    hello: wire.Hello | None = None
    ready: wire.Ready | None = None
    seconds: float = 0.0
    wrong: str = ""


class Checkup:
    """The checks of one group, in their order.

    Args:
        group: the nodes.
        directory: the one that the nodes should share, or get a copy of.
        environ: the environment of this process.
        begins: gets the name of each check before it is tried.
    """

    def __init__(
        self, group: NodeGroup, directory: Path, environ: Mapping[str, str], begins: Callable[[str], None]
    ) -> None:
        self._group = group
        self._hosts = [node.host for node in group.nodes]
        # Several nodes may be one host.
        self._names = [
            host if self._hosts.count(host) == 1 else f"{host} (node {node_rank})"
            for node_rank, host in enumerate(self._hosts)
        ]
        self._directory = directory
        self._environ = environ
        self._begins = begins
        self._checks: list[Check] = []

    async def run(self) -> list[Check]:
        """Try everything, as far as what was found before allows it; nothing is left on any node."""
        if await self._reach():
            await self._with_launch()
        for name in ("agent started", "free port", "versions", "cores and GPUs", "shared directory"):
            self._skip(name)
        for name in ("master address", "master connected", "nodes connected", "all-reduce (gloo)"):
            self._skip(name)
        return self._checks

    # -- results --------------------------------------------------------------------------------------------

    def _add(self, name: str, wrong: Mapping[str, str], found: str) -> bool:
        """Take note of a check: what is wrong by host, else what was found; return whether all is well."""
        if wrong:
            self._checks.append(Check(name, FAILED, "; ".join(wrong.values()), tuple(wrong)))
        else:
            self._checks.append(Check(name, OK, found))
        return not wrong

    def _skip(self, name: str) -> None:
        if name not in {check.name for check in self._checks}:
            self._checks.append(Check(name, SKIPPED, "not tried: what failed above comes first"))

    # -- steps ----------------------------------------------------------------------------------------------

    async def _reach(self) -> bool:
        """Run nothing on each node."""
        self._begins("nodes reached")
        results = await asyncio.gather(*(self._reach_node(number) for number in range(len(self._names))))
        wrong = {host: why for host, (why, _) in zip(self._names, results, strict=True) if why}
        return self._add("nodes reached", wrong, _list(self._names, [f"{taken:.1f} s" for _, taken in results]))

    async def _reach_node(self, number: int) -> tuple[str, float]:
        name = self._names[number]
        argv = transports.argv(self._transport(number), self._hosts[number], ["true"])
        began = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self._environ),
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            return f"{name}: {argv[0]} cannot be started: {error.strerror}", 0.0
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _REACH_BOUND)
        except asyncio.TimeoutError:
            return f"{name}: no answer within {_REACH_BOUND:g} s; try: {shlex.join(argv)}", 0.0
        finally:
            await _kill(process)
        if process.returncode:
            lines = output.decode(errors="backslashreplace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "")
            how = f"{transports.client(argv)} ended with {describe(process.returncode)}"
            return f"{name}: {how}{': ' if said else ''}{said}; try: {shlex.join(argv)}", 0.0
        return "", time.monotonic() - began

    def _transport(self, number: int) -> str | Sequence[str]:
        transport = self._group.transport
        return transport if number else transports.on_own_host(transport)

    async def _with_launch(self) -> None:
        """What needs an address and a port: all that an agent does."""
        self._begins("free port")
        try:
            launch, reservation = planning.launch(
                self._plan(self._group, self._directory, self._directory, "gloo"), 1
            )
        except planning.PlanError as error:
            name = "free port" if "master_port_range" in str(error) else "master address"
            self._add(name, {self._names[0]: str(error)}, "")
            return
        try:
            first, last = self._group.master_port_range
            port = launch.contract.master_port
            none = "not needed: one node"
            self._add("free port", {}, f"{port} of {first} to {last}" if len(self._names) > 1 else none)
            found = await self._ask_agents(launch)
            if all(each.ready for each in found):
                well = self._judge(launch, found)
                if len(self._names) == 1:
                    self._checks += [Check(name, OK, none) for name in ("master connected", "nodes connected")]
                elif self._resolved(found):
                    well = await self._connect(launch) and well
                else:
                    well = False
            else:
                well = False
        finally:
            if reservation is not None:
                reservation.release()
        if well:
            await self._all_reduce("gloo", 1)
            if all(each.hello and each.hello.gpus for each in found):
                await self._all_reduce("nccl", "gpu")

    async def _ask_agents(self, launch: Launch) -> list[_Found]:
        self._begins("agent started")
        marker = self._directory / launch.marker
        with contextlib.suppress(OSError):
            marker.touch()
        try:
            found = await asyncio.gather(*(self._ask_agent(launch, number) for number in range(len(self._names))))
        finally:
            with contextlib.suppress(OSError):
                marker.unlink()
        wrong = {
            host: f"{host}: {each.wrong}; it must be able to run {shlex.join(self._agent_command(number))}"
            for number, (host, each) in enumerate(zip(self._names, found, strict=True))
            if each.wrong
        }
        self._add("agent started", wrong, _list(self._names, [f"{each.seconds:.1f} s" for each in found]))
        return found

    def _agent_command(self, number: int) -> list[str]:
        return list(node_agent.command(self._python(number)))

    def _python(self, number: int) -> str:
        return planning.python_of(self._group, self._group.nodes[number])

    async def _ask_agent(self, launch: Launch, number: int) -> _Found:
        found = _Found()
        answered = asyncio.Event()
        began = time.monotonic()

        def on_frame(frame: wire.Frame) -> None:
            if isinstance(frame, wire.Hello):
                found.hello, found.seconds = frame, time.monotonic() - began
            elif isinstance(frame, wire.Ready):
                found.ready = frame
                answered.set()

        channel = Channel(
            launch.members[number].agent_argv, self._environ, launch.node_timeout, on_frame, lambda _: None
        )
        channel.post(
            wire.Prepare(
                launch.contract.master_addr,
                str(self._directory),
                launch.marker,
                _NAME_BOUND,
                launch.node_timeout,
            )
        )
        serving = asyncio.create_task(channel.run())
        waiting = asyncio.create_task(answered.wait())
        try:
            await asyncio.wait({serving, waiting}, timeout=_AGENT_BOUND, return_when="FIRST_COMPLETED")
            if found.ready is None:
                found.wrong = serving.result() if serving.done() else f"no word from it within {_AGENT_BOUND:g} s"
            channel.post(wire.Stop(0.0))
            await asyncio.wait({serving}, timeout=_END_BOUND)
            channel.kill()
            await asyncio.wait({serving}, timeout=_END_BOUND)
        finally:
            waiting.cancel()
            serving.cancel()
        return found

    def _judge(self, launch: Launch, found: Sequence[_Found]) -> bool:
        """Look at what the agents have found."""
        nodes = [
            (host, each.hello, each.ready)
            for host, each in zip(self._names, found, strict=True)
            if each.hello and each.ready
        ]
        wanted = [member.nproc_per_node for member in launch.members]
        hellos = [hello for _, hello, _ in nodes]
        gpu_host = agreement.host_with_gpus(nodes)
        first_host, first, _ = nodes[0]
        others = list(enumerate(nodes))[1:]
        versions = {
            host: text
            for _, (host, hello, _) in others
            if (text := agreement.disagrees(first_host, first, host, hello))
        }
        may_differ = [
            text
            for node_rank, (host, hello, _) in others
            for text in agreement.differences(first_host, first, node_rank, host, hello)
        ]
        text = f"this package {first.version}, torch {first.torch}, nvflare {first.nvflare}, Python {first.python}"
        well = self._add("versions", versions, "; ".join([text, *may_differ]))
        gpus = {
            host: f"{host}: {text}"
            for (host, hello, _), number in zip(nodes, wanted, strict=True)
            if (text := agreement.lacks_gpu(hello, number, gpu_host))
        }
        counted = [f"{hello.cores} cores, {_gpus(hello)}" for hello in hellos]
        well = self._add("cores and GPUs", gpus, _list(self._names, counted)) and well
        well = self._judge_directory(nodes) and well
        return self._judge_master(launch, nodes) and well

    def _judge_directory(self, nodes: Sequence[agreement.Found]) -> bool:
        apart = [host for host, _, ready in nodes if not ready.shares]
        stage = self._group.stage
        copied = f"{self._directory} is not seen by {', '.join(apart)}: they get a copy (stage: {stage})"
        wrong = {
            host: f"{host} does not see {self._directory}, and gets no copy (stage: never): share it, or copy it"
            for host in apart
            if stage == "never"
        }
        return self._add("shared directory", wrong, copied if apart else f"{self._directory} is seen by all")

    def _judge_master(self, launch: Launch, nodes: Sequence[agreement.Found]) -> bool:
        name = launch.contract.master_addr
        wrong = {host: f"{host}: {ready.error}{_ADVICE}" for host, _, ready in nodes if ready.error}
        if launch.spans_hosts:
            wrong |= {host: f"{host}: {text}" for host, _, ready in nodes[1:] if (text := agreement.misled(ready))}
        means = sorted({ready.address for _, _, ready in nodes if ready.address})
        return self._add("master address", wrong, f"{name} means {', '.join(means)}" if name else "none: one node")

    @staticmethod
    def _resolved(found: Sequence[_Found]) -> bool:
        return all(each.ready and each.ready.address for each in found)

    async def _connect(self, launch: Launch) -> bool:
        """Let every node connect to node rank 0's port, and to every other node."""
        self._begins("nodes connected")
        name, port = str(launch.contract.master_addr), launch.contract.master_port
        probes = [
            _Probe(
                transports.argv(self._transport(number), host, _probe_command(self._python(number))), self._environ
            )
            for number, host in enumerate(self._hosts)
        ]
        try:
            questions = [{"master": name, "port": port if number == 0 else 0} for number in range(len(probes))]
            answers = await asyncio.gather(
                *(probe.ask(question) for probe, question in zip(probes, questions, strict=True))
            )
            broken = {
                host: f"{host}: its probe says: {answer}"
                for host, answer in zip(self._names, answers, strict=True)
                if not isinstance(answer, dict) or "error" in answer
            }
            if broken:
                return self._add("master connected", broken, "")
            places = [(name, port)] + [
                (str(answer["address"] or host), int(answer["port"]))
                for host, answer in zip(self._hosts[1:], answers[1:], strict=True)
                if isinstance(answer, dict)
            ]
            question = {"targets": places, "timeout": _CONNECT_BOUND}
            results = await asyncio.gather(*(probe.ask(question) for probe in probes))
        finally:
            await asyncio.gather(*(probe.end() for probe in probes))
        return self._judge_connections(places, results)

    def _judge_connections(self, places: Sequence[tuple[str, int]], results: Sequence[object]) -> bool:
        first, *others = self._names
        address = "{}:{}".format(*places[0])
        to_master: dict[str, str] = {}
        pairs: dict[str, str] = {}
        for name, result in zip(self._names, results, strict=True):
            if not isinstance(result, list) or len(result) != len(places):
                to_master[name] = f"{name}: its probe says: {result}"
                continue
            if result[0]:
                to_master[name] = f"{name} cannot connect to {first} at {address}: {result[0]}"
            missing = [
                f"{name} cannot connect to {other} at {place}: {why}"
                for other, (place, _), why in zip(others, places[1:], result[1:], strict=True)
                if why
            ]
            if missing:
                pairs[name] = "; ".join(missing)
        ports = "{} to {}".format(*self._group.master_port_range)
        _advise(to_master, f"give node rank 0 another address (--master-addr, address), or open its ports {ports}")
        _advise(pairs, "ranks connect to each other at any port, let the hosts of the group do so")
        well = self._add("master connected", to_master, f"by all nodes, at {address}")
        number = len(places) * (len(places) - 1) // 2
        return self._add("nodes connected", pairs, f"each to each, {number} pair{'s' * (number > 1)}") and well

    # -- all-reduce -----------------------------------------------------------------------------------------

    @staticmethod
    def _plan(group: NodeGroup, app_dir: Path, logs: Path, backend: str) -> planning.Plan:
        options = planning.Options.parse(
            torchrun_args=None,
            join_timeout=_JOIN_BOUND,
            launch_timeout=None,
            node_timeout=30.0,
            grace=1.0,
            log_ranks="all",
        )
        return planning.Plan(
            dataclasses.replace(group, least=0, stage="auto"),
            program.parse(None, all_reduce.__name__, [backend], {}),
            all_reduce.__name__,
            str(app_dir),
            str(logs),
            options,
            owes_result=False,
            folder=".",
        )

    async def _all_reduce(self, backend: str, processes: int | str) -> None:
        name = f"all-reduce ({backend})"
        self._begins(name)
        right: set[int] = set()

        def show(_node_rank: int, rank: int | None, text: str) -> None:
            if rank is not None and text == all_reduce.RIGHT:
                right.add(rank)

        def begun(group: Group) -> None:
            limit = f"no end within {_RUN_BOUND:g} s"
            asyncio.get_running_loop().call_later(_RUN_BOUND, group.stop, limit)

        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="nvfl-checkup-") as folder:
            app_dir = Path(folder, "app")
            app_dir.mkdir()
            nodes = tuple(dataclasses.replace(node, nproc_per_node=processes) for node in self._group.nodes)
            group = dataclasses.replace(self._group, nodes=nodes)
            plan = self._plan(group, app_dir, Path(folder, "logs"), backend)
            logger = logging.Logger("checkup", logging.CRITICAL)
            try:
                verdict = await standalone.run(plan, self._environ, logger, show, begun)
            except (planning.PlanError, OSError) as error:
                self._add(name, {self._names[0]: str(error)}, "")
                return
        taken = time.monotonic() - began
        self._add(name, self._blame(verdict), f"{len(right)} ranks on {len(self._names)} nodes, {taken:.1f} s")

    def _blame(self, verdict: Verdict) -> dict[str, str]:
        if verdict.outcome == "ok" and not verdict.leftovers:
            return {}
        failure = verdict.failure
        if failure is None:
            return {self._names[0]: f"{verdict.reason or 'it ended early'} {' '.join(verdict.leftovers)}".strip()}
        said = failure.traceback.strip().splitlines()[-1:] if failure.traceback else failure.last_lines[-1:]
        rank = "" if failure.rank is None else f" rank {failure.rank}"
        name = self._names[failure.node_rank]
        return {name: f"{name}{rank}: {': '.join([failure.what, *said])}"}


_ADVICE = ": give node rank 0 an address that it knows (--master-addr, address)"


class _Probe:
    """A probe on a node, and the client that connects to it."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self._argv = argv
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


def _advise(wrong: dict[str, str], advice: str) -> None:
    """Say what to do once, after the last of what is wrong."""
    if wrong:
        last = next(reversed(wrong))
        wrong[last] += f": {advice}"


def _probe_command(python: str) -> list[str]:
    return [python, "-m", node_probe.__name__]


async def _kill(process: asyncio.subprocess.Process) -> None:
    """End the client if it has not ended; whatever it has started elsewhere hears the end of its stdin."""
    if process.returncode is None:
        # It leads a session of its own, so nothing else is hit.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.communicate(), _END_BOUND)


def _gpus(hello: wire.Hello) -> str:
    return "accelerators that only torch can count" if hello.gpus is None else f"{hello.gpus} GPUs"


def _list(hosts: Sequence[str], values: Sequence[str]) -> str:
    return "; ".join(f"{host} {value}" for host, value in zip(hosts, values, strict=True))
