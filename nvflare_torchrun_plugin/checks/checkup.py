"""Tries a node group without a job, step by step: what a group would find out too, but one thing at a time."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nvflare_torchrun_plugin import node_agent, wire
from nvflare_torchrun_plugin.checks import findings, node_clients, trial_run
from nvflare_torchrun_plugin.checks.findings import OK, SKIPPED, Check
from nvflare_torchrun_plugin.checks.node_clients import AgentSaid, Probe
from nvflare_torchrun_plugin.description.group_description import NodeGroup
from nvflare_torchrun_plugin.launching import planning
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.supervision import agreement

_NAME_BOUND = 10.0
"""Seconds for a name to be known."""
_CONNECT_BOUND = 5.0
"""Seconds for one connection."""

NAMES = (
    "nodes reached",
    "free port",
    "agent started",
    "versions",
    "cores and GPUs",
    "shared directory",
    "master address",
    "master connected",
    "nodes connected",
    trial_run.name_of(trial_run.GLOO),
)
"""Of the checks that every group gets, in the order in which they are told where one has failed."""


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
        self._targets = node_clients.targets(group)
        self._names = [target.name for target in self._targets]
        self._directory = directory
        self._environ = environ
        self._begins = begins
        self._checks: list[Check] = []

    async def run(self) -> list[Check]:
        """Try everything, as far as what was found before allows it; nothing is left on any node."""
        if await self._reach():
            await self._with_launch()
        tried = {check.name for check in self._checks}
        self._checks += [
            Check(name, SKIPPED, "not tried: what failed above comes first") for name in NAMES if name not in tried
        ]
        return self._checks

    def _add(self, *checks: Check) -> bool:
        """Take note of checks; return whether all is well."""
        self._checks += checks
        return all(check.state == OK for check in checks)

    async def _reach(self) -> bool:
        """Run nothing on each node."""
        self._begins("nodes reached")
        results = await asyncio.gather(*(node_clients.reach(target, self._environ) for target in self._targets))
        wrong = {name: why for name, (why, _) in zip(self._names, results, strict=True) if why}
        found = findings.each(self._names, [f"{taken:.1f} s" for _, taken in results])
        return self._add(Check.of("nodes reached", wrong, found))

    async def _with_launch(self) -> None:
        """What needs an address and a port: all that an agent does."""
        self._begins("free port")
        plan = trial_run.plan(self._group, self._directory, self._directory, trial_run.GLOO)
        try:
            launch, reservation = planning.launch(plan, 1)
        except planning.PlanError as error:
            name = "free port" if "master_port_range" in str(error) else "master address"
            self._add(Check.of(name, {self._names[0]: str(error)}, ""))
            return
        try:
            first, last = self._group.master_port_range
            alone = len(self._names) == 1
            none = "not needed: one node"
            port = none if alone else f"{launch.contract.master_port} of {first} to {last}"
            self._add(Check("free port", OK, port))
            said = await self._ask_agents(launch)
            nodes = [
                (name, each.hello, each.ready)
                for name, each in zip(self._names, said, strict=True)
                if each.hello and each.ready
            ]
            if len(nodes) < len(said):
                return
            well = self._judge(launch, nodes)
            if alone:
                self._add(Check("master connected", OK, none), Check("nodes connected", OK, none))
            elif all(ready.address for _, _, ready in nodes):
                well = self._add(*await self._connect(launch)) and well
            else:
                return
        finally:
            if reservation is not None:
                reservation.release()
        if well:
            await self._all_reduce(trial_run.GLOO, 1)
            if all(hello.gpus for _, hello, _ in nodes):
                await self._all_reduce(trial_run.NCCL, "gpu")

    async def _ask_agents(self, launch: Launch) -> list[AgentSaid]:
        self._begins("agent started")
        question = wire.Prepare(
            launch.contract.master_addr,
            str(self._directory),
            launch.marker,
            _NAME_BOUND,
            launch.node_timeout,
        )
        with _marked(self._directory / launch.marker):
            said = await asyncio.gather(
                *(
                    node_clients.ask_agent(member.agent_argv, self._environ, question, launch.node_timeout)
                    for member in launch.members
                )
            )
        wrong = {
            target.name: f"{target.name}: {each.wrong}; it must be able to run"
            f" {shlex.join(node_agent.command(target.python))}"
            for target, each in zip(self._targets, said, strict=True)
            if each.wrong
        }
        greeted = findings.each(self._names, [f"{each.seconds:.1f} s" for each in said])
        self._add(Check.of("agent started", wrong, greeted))
        return said

    def _judge(self, launch: Launch, nodes: Sequence[agreement.Found]) -> bool:
        """Look at what the agents have found."""
        return self._add(
            findings.versions(nodes),
            findings.cores_and_gpus(nodes, [member.nproc_per_node for member in launch.members]),
            findings.shared_directory(nodes, self._directory, self._group.stage),
            findings.master_address(nodes, launch),
        )

    async def _connect(self, launch: Launch) -> Sequence[Check]:
        """Let every node connect to node rank 0's port, and to every other node."""
        self._begins("nodes connected")
        name, port = str(launch.contract.master_addr), launch.contract.master_port
        probes = [Probe(target, self._environ) for target in self._targets]
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
                return (Check.of("master connected", broken, ""),)
            places = [(name, port)] + [
                (str(answer["address"] or target.host), int(answer["port"]))
                for target, answer in zip(self._targets[1:], answers[1:], strict=True)
                if isinstance(answer, dict)
            ]
            question = {"targets": places, "timeout": _CONNECT_BOUND}
            results = await asyncio.gather(*(probe.ask(question) for probe in probes))
        finally:
            await asyncio.gather(*(probe.end() for probe in probes))
        return findings.connections(self._names, places, results, self._group.master_port_range)

    async def _all_reduce(self, backend: str, processes: int | str) -> None:
        self._begins(trial_run.name_of(backend))
        self._add(await trial_run.check(self._group, self._names, self._environ, backend, processes))


@contextmanager
def _marked(path: Path) -> Iterator[None]:
    """A file by which nodes find out that they see the same directory; where none can be made they do not."""
    with contextlib.suppress(OSError):
        path.touch()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
