"""What a person asks of a node group on the command line, made into the plan that a client job would make."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from .output import RefusedError

if TYPE_CHECKING:
    from ..description.group_description import NodeGroup
    from ..launching.planning import Plan

__all__ = ["GroupAsked", "ProgramAsked", "takes_what_is_asked"]


def takes_what_is_asked(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb that takes one of the classes below their fields as options of its own."""
    hints = get_type_hints(verb, include_extras=True)
    taken: dict[str, tuple[type[Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []

    def add(name: str, annotation: object, default: object) -> None:
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    for parameter in inspect.signature(verb).parameters.values():
        kind = hints[parameter.name]
        if not dataclasses.is_dataclass(kind):
            add(parameter.name, kind, parameter.default)
            continue
        fields = dataclasses.fields(kind)
        taken[parameter.name] = (hints[parameter.name], [field.name for field in fields])
        of_kind = get_type_hints(kind, include_extras=True)
        for field in fields:
            add(field.name, of_kind[field.name], field.default)

    @functools.wraps(verb)
    def called(**given: Any) -> None:
        made = {
            name: kind(**{field: given.pop(field) for field in fields}) for name, (kind, fields) in taken.items()
        }
        verb(**made, **given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # where inspect looks for it
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


@dataclass(frozen=True)
class GroupAsked:
    """The options that describe a node group."""

    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes",
            metavar="NODES",
            help="Hosts, this one first: gpu-0,gpu-1. Or a number: so many nodes on this host. Or auto: those of"
            " the scheduler's allocation around this process. Default: this host alone.",
        ),
    ] = None
    workspace: Annotated[
        Path | None,
        typer.Option(
            "--workspace", metavar="KIT", help="A site's startup kit, whose local/node_group.yaml has the nodes."
        ),
    ] = None
    nnodes: Annotated[
        str | None,
        typer.Option("--nnodes", metavar="N", help="How many of the nodes: 2, or 1:4 for as many as are well."),
    ] = None
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            "--nproc-per-node", metavar="N", help="Processes per node: a number, gpu, cpu or auto. Default: auto."
        ),
    ] = None
    transport: Annotated[
        str | None,
        typer.Option(
            "--transport",
            metavar="WORDS",
            help="How a node is reached: local, ssh, srun, or a command with {host} in it."
            " Default: ssh for other hosts than this one.",
        ),
    ] = None
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Python on the nodes. Default: this one's path.")
    ] = None
    master_addr: Annotated[
        str | None,
        typer.Option("--master-addr", metavar="ADDR", help="Address of this host that the other nodes know."),
    ] = None
    forward_env: Annotated[
        list[str] | None,
        typer.Option(
            "--forward-env",
            metavar="PATTERN",
            help="Variables that go from here to the nodes, besides NCCL_*, GLOO_*, UCX_*, HF_* and PYTHONPATH.",
        ),
    ] = None

    def group(self, environ: Mapping[str, str]) -> NodeGroup:
        """Return the node group.

        Raises:
            RefusedError: there is no such group; the message says why.
        """
        from ..description import group_choice
        from ..group_values import NodeGroupError, parse_nproc_per_node

        try:
            wish = group_choice.Wish(
                group_choice.parse_nnodes(self.nnodes, "--nnodes"),
                parse_nproc_per_node(self.nproc_per_node, "--nproc-per-node"),
            )
            group = group_choice.grant(self._offered(environ), wish)
        except NodeGroupError as error:
            raise RefusedError(str(error)) from None
        if group.join is not None:
            raise RefusedError(f"{group.source}: nodes that dial in (transport join) are there for jobs alone")
        first, *others = group.nodes
        if self.master_addr is not None:
            first = dataclasses.replace(first, address=self.master_addr)
        if self.python is not None:
            group = dataclasses.replace(group, python=self.python)
        forward = (*group.forward_env, *(self.forward_env or ()))
        return dataclasses.replace(group, nodes=(first, *others), forward_env=forward)

    def _offered(self, environ: Mapping[str, str]) -> NodeGroup:
        from ..description import group_choice, group_description

        if self.workspace is not None:
            if self.nodes is not None or self.transport is not None:
                raise RefusedError("--workspace says which nodes there are: leave --nodes and --transport out")
            return _of_site(self.workspace, environ)
        if self.nodes is None:
            return group_choice.alone("neither --nodes nor --workspace is given")
        described: dict[str, Any] = {"nodes": _nodes(self.nodes)}
        transport = self.transport
        if transport is None and isinstance(described["nodes"], list):
            transport = "local" if all(map(group_description.is_this_host, described["nodes"])) else "ssh"
        if transport is not None:
            try:
                words = shlex.split(transport)
            except ValueError as error:
                raise RefusedError(f"--transport {transport!r}: cannot be split into words ({error})") from None
            described["transport"] = words[0] if len(words) == 1 else words
        return group_description.parse(described, "--nodes", environ)


@dataclass(frozen=True)
class ProgramAsked:
    """What to run on the group, and how."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TORCHRUN OPTIONS] SCRIPT [ARGS]...", help="As torchrun takes them; -m MODULE too."
        ),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="A variable for the ranks; more than once if need be."),
    ] = None
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy this directory to nodes that do not see it; removed at the end.")
    ] = False
    join_timeout: Annotated[
        int | None,
        typer.Option("--join-timeout", metavar="SECONDS", help="For the nodes to meet. Default: 600."),
    ] = None
    node_timeout: Annotated[
        float,
        typer.Option(
            "--node-timeout",
            metavar="SECONDS",
            help="Of silence after which a node is lost; a rank may be stopped as long.",
        ),
    ] = 30.0
    hang_timeout: Annotated[
        float | None,
        typer.Option("--hang-timeout", metavar="SECONDS", help="Without a line from any rank. Default: never."),
    ] = None
    stop_grace_period: Annotated[
        float,
        typer.Option("--stop-grace-period", metavar="SECONDS", help="Between SIGTERM and SIGKILL for the ranks."),
    ] = 4.0
    log_ranks: Annotated[
        str, typer.Option("--log-ranks", metavar="RANKS", help="Global ranks whose lines are shown: all, or 0,3.")
    ] = "all"
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="Gets the ranks' files and the verdict. Default: a new one in torchrun-runs.",
        ),
    ] = None

    def log_dir(self, directory: Path) -> Path:
        """Return where the ranks' files go: where it is said, or a folder below that no other process has."""
        own = Path("torchrun-runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        return directory / (self.run_dir or own)

    def plan(self, group: NodeGroup, directory: Path, log_dir: Path) -> Plan:
        """Return the plan that runs it.

        Args:
            group: the nodes.
            directory: where the ranks work.
            log_dir: gets their files.

        Raises:
            RefusedError: it makes no sense; the message says what.
        """
        from .. import torchrun_node
        from ..group_values import NodeGroupError, parse_env
        from ..launching import planning, program

        try:
            line = torchrun_node.parse(self.words or ())
            command = line.command[1:] if line.command[:1] == ["--"] else line.command
            if not command:
                raise torchrun_node.UsageError("SCRIPT is missing: name the training script after the options")
            is_module = "--module" in line.names
            parsed = program.parse(
                None if is_module else command[0],
                command[0] if is_module else None,
                command[1:],
                parse_env(dict(map(_variable, self.env or ())), "--env"),
            )
            options = planning.Options.parse(
                torchrun_args=[word for word in line.torchrun_options if word not in ("-m", "--module")],
                join_timeout=self.join_timeout,
                launch_timeout=None,
                node_timeout=self.node_timeout,
                hang_timeout=self.hang_timeout,
                grace=self.stop_grace_period,
                log_ranks=_ranks(self.log_ranks),
            )
            target = parsed.find([str(directory)])
        except (torchrun_node.UsageError, NodeGroupError, program.ProgramError, planning.PlanError) as error:
            raise RefusedError(str(error)) from None
        return planning.Plan(
            dataclasses.replace(group, stage="auto" if self.copy else "never"),
            parsed,
            target,
            str(directory),
            str(log_dir),
            options,
            owes_result=False,
            folder=".",
        )


def _of_site(kit: Path, environ: Mapping[str, str]) -> NodeGroup:
    from ..description import site_file

    path = kit / "local" / site_file.NAME
    described = site_file.read_site_file(str(path), environ)
    if described is None or described.group is None:
        raise RefusedError(
            f"{path} describes no nodes: `nvflare-torchrun site` writes it, or name them by --nodes"
        )
    return described.group


def _nodes(text: str) -> object:
    if text == "auto" or text.strip().isdecimal():
        return text.strip()
    return [host.strip() for host in text.split(",")]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise RefusedError(f"--env {name}: must be NAME=VALUE")
    return name, value


def _ranks(text: str) -> object:
    # Python reads numbers of some thousand digits at most.
    words = text.split(",")
    return (
        text if text == "all" else [int(word) if word.isdecimal() and len(word) < 10 else word for word in words]
    )
