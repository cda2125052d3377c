"""``nvflare-torchrun site``: a site's own say about its nodes, in its startup kit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .command_line import Verb
from .kit import (
    ALLOW_LIST,
    CLASSES,
    allows,
    command,
    is_allowed,
    local_folder,
    put,
    resources_file,
    resources_of,
    show_difference,
)
from .output import JsonOption, RefusedError, console, print_json, print_table

if TYPE_CHECKING:
    from ..description.site_file import SiteFile

__all__ = ["app"]

app = typer.Typer(help="A site's nodes and what it allows, in its startup kit.", no_args_is_help=True)

_HEADER = (
    "# The nodes of this site, and the scripts that any job may run on them. Whether all is well is said by\n"
    "# `nvflare-torchrun site check`, followed by the site's folder.\n"
)

_Kit = Annotated[Path, typer.Argument(help="The site's startup kit: the folder with local/ and startup/ in it.")]
_Elsewhere = Annotated[
    bool,
    typer.Option("--elsewhere", help="This is not the site's host: do not ask whether node rank 0 is this one."),
]


@app.command(
    cls=Verb,
    epilog="Example: nvflare-torchrun site check prod_00/site-1\n\n"
    "Exit codes: 0 all is well; 1 there is something to correct, and it is named; 2 there is no kit.",
)
def check(kit: _Kit, elsewhere: _Elsewhere = False, as_json: JsonOption = False) -> None:
    """Check local/node_group.yaml, and whether a job without code of its own finds our classes allowed."""
    local = local_folder(kit)
    try:
        found = _read(local / _name(), elsewhere)
    except ValueError as error:
        if as_json:
            print_json({"problem": str(error)})
        else:
            console().print(f"problem: {error}", markup=False)
        raise typer.Exit(1) from None
    allowed = allows(local)
    missing = [
        script
        for script in (found.allowed_scripts if found else ())
        if not elsewhere and not _is_there(Path(script))
    ]
    if as_json:
        print_json(
            {
                "file": str(local / _name()),
                "exists": found is not None,
                "group": found.group.to_property() if found and found.group else None,
                "allowed_scripts": list(found.allowed_scripts) if found else [],
                "missing_scripts": missing,
                "classes_allowed": allowed,
            }
        )
    else:
        _tell(kit, found, allowed, missing)
    if missing:
        raise typer.Exit(1)


@app.command(
    cls=Verb,
    epilog="Example: nvflare-torchrun site write prod_00/site-1 --nodes gpu-0,gpu-1 --transport ssh "
    "--allow /opt/site/train.py\n\n"
    "Exit codes: 0 it is written; 2 it cannot work, or something is in the way: nothing is written.",
)
def write(
    kit: _Kit,
    nodes: Annotated[
        str | None, typer.Option(help="How many on this host, host names with commas between, or auto.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="local, ssh, srun, join, or a command with {host} (and {command}) in it.")
    ] = None,
    nproc_per_node: Annotated[
        str | None, typer.Option(help="Processes on each of the hosts: a number, auto, gpu, cpu.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="The Python interpreter on the nodes.")] = None,
    master_port_range: Annotated[
        str | None, typer.Option(help="First and last port of the rendezvous, as 29400-30399.")
    ] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the ranks; several times.")] = None,
    on_busy: Annotated[
        str | None, typer.Option(help="wait, fail or share, while another job uses a node.")
    ] = None,
    busy_timeout: Annotated[float | None, typer.Option(help="Seconds to wait for a busy node.")] = None,
    stage: Annotated[
        str | None, typer.Option(help="auto, always or never: whether nodes get a copy of the job's code.")
    ] = None,
    join_file: Annotated[
        str | None,
        typer.Option(help="With join: the client's join file, made beforehand. Default: one for each job."),
    ] = None,
    join_ports: Annotated[
        str | None, typer.Option(help="With join: first and last port to wait at, as 30400-30499.")
    ] = None,
    join_wait: Annotated[
        float | None, typer.Option(help="With join: seconds for a node that is not there. Default: 60.")
    ] = None,
    allow: Annotated[
        list[str] | None, typer.Option(help="A script that any job may run, absolute; several times.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a file that is there.")] = False,
    elsewhere: _Elsewhere = False,
    as_json: JsonOption = False,
) -> None:
    """Write local/node_group.yaml, and no other file of the kit.

    What cannot work is refused before anything is written. The running site reads the file at the
    start of each job.
    """
    import yaml

    local = local_folder(kit)
    described = {
        "nodes": _nodes(nodes, nproc_per_node, transport),
        "transport": _transport(transport),
        "python": python,
        "master_port_range": _ports(master_port_range),
        "env": dict(_pair(word) for word in env) if env else None,
        "on_busy": on_busy,
        "busy_timeout": busy_timeout,
        "stage": stage,
        "join": _join(join_file, join_ports, join_wait),
        "allowed_scripts": allow or None,
    }
    given = {key: value for key, value in described.items() if value is not None}
    if not given:
        raise RefusedError("nothing to write: give --nodes, --allow or both (see --help)")
    text = _HEADER + yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    target = local / _name()
    if target.exists() and not replace:
        look = command("check", kit)
        raise RefusedError(f"{target} is there already: `{look}` shows what it says, --replace writes over it")
    try:
        old = target.read_text(encoding="utf-8", errors="replace") if target.exists() else ""
    except OSError as error:
        raise RefusedError(f"{target} cannot be read: {error.strerror}; correct or remove it") from None
    put(target, text, lambda draft: _read(draft, elsewhere))
    if as_json:
        print_json({"file": str(target), "written": given})
        return
    show_difference(old, text, target)
    look = command("check", kit, *(["--elsewhere"] if elsewhere else []))
    console().print(f"{target} is written; {look} looks at it again", markup=False)


@app.command(
    cls=Verb,
    epilog="Example: nvflare-torchrun site allow prod_00/site-1\n\n"
    "Example: nvflare-torchrun site allow prod_00/site-1 --write\n\n"
    "Exit codes: 0 it is shown, or written; 2 a file of the kit is not whole: nothing is written.",
)
def allow(
    kit: _Kit,
    write: Annotated[bool, typer.Option("--write", help="Write local/resources.json.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the entry of class_allow_list that a job without code of its own needs, or write it.

    NVFlare's resources.json replaces resources.json.default. With --write the first is written as a full copy of
    the second (or kept as it is, when it is there) with the entry added; the difference is shown before. A site
    that runs must be started again to see it.
    """
    local = local_folder(kit)
    source = resources_file(local)
    before, resources = resources_of(source)
    there = is_allowed(resources)
    after = before
    if not there:
        resources[ALLOW_LIST] = [*resources[ALLOW_LIST], CLASSES]
        after = json.dumps(resources, indent=2, ensure_ascii=False) + "\n"
    target = local / "resources.json"
    if there and not as_json:
        console().print(f"{source} allows {CLASSES} already", markup=False)
    elif not as_json:
        shown = json.dumps(json.loads(before), indent=2, ensure_ascii=False) + "\n"
        console().print(f'{ALLOW_LIST} needs the entry "{CLASSES}":', markup=False)
        show_difference(shown, after, target, source)
    if write and not there:
        put(target, after, resources_of, source)
        if not as_json:
            console().print(f"{target} is written", markup=False)
    if as_json:
        told = {"entry": CLASSES, "key": ALLOW_LIST, "from": str(source), "to": str(target)}
        print_json({**told, "allowed": there, "written": write and not there})


def _name() -> str:
    from ..description.site_file import NAME

    return NAME


def _is_there(script: Path) -> bool:
    try:
        return script.is_file()
    except OSError:
        # This user may not look there, for one.
        return False


def _read(path: Path, elsewhere: bool) -> SiteFile | None:
    from ..description.site_file import read_site_file

    return read_site_file(str(path), None if elsewhere else os.environ)


def _tell(kit: Path, found: SiteFile | None, allowed: bool, missing: list[str]) -> None:
    out = console()
    if found is None:
        out.print(
            f"{kit / 'local' / _name()} is not there: each job says which nodes it takes, or takes this host",
            markup=False,
        )
    elif found.group is None:
        out.print("nodes: each job says which it takes, or takes this host", markup=False)
    else:
        group = found.group
        transport = group.transport if isinstance(group.transport, str) else " ".join(group.transport)
        nodes = group.nodes
        if nodes:
            rows = [
                [
                    str(rank),
                    node.host,
                    node.address or "",
                    str(node.nproc_per_node or ""),
                    node.python or group.python or "",
                ]
                for rank, node in enumerate(nodes)
            ]
            print_table(["node", "host", "address", "processes", "python"], rows)
        else:
            out.print("nodes: the scheduler's, found when a job runs", markup=False)
        out.print(f"transport: {transport}", markup=False)
        if group.join is not None:
            first, last = group.join.ports
            file = group.join.file or "one for each job"
            out.print(
                f"join: file {file}; ports {first} to {last}; {group.join.wait:g} s for an absent node",
                markup=False,
            )
        out.print(f"on_busy: {group.on_busy}, {group.busy_timeout:g} s; stage: {group.stage}", markup=False)
        if group.env:
            out.print(f"env: {', '.join(sorted(group.env))}", markup=False)
    if found is not None:
        for script in found.allowed_scripts:
            out.print(f"any job may run: {script}{' (MISSING here)' if script in missing else ''}", markup=False)
    if allowed:
        out.print("jobs without code of their own find our classes allowed", markup=False)
    else:
        way_out = command("allow", kit, "--write")
        out.print(
            f"jobs without code of their own are refused: {CLASSES} is not allowed; {way_out} allows it",
            markup=False,
        )


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _nodes(text: str | None, nproc_per_node: str | None, transport: str | None) -> object:
    if text is None or text == "auto":
        if nproc_per_node is not None:
            raise RefusedError("--nproc-per-node needs --nodes with a number or host names")
        return text
    number, hosts = _number(text), [host.strip() for host in text.split(",")]
    if nproc_per_node is None:
        return number if isinstance(number, int) else hosts
    if isinstance(number, int):
        if transport not in (None, "local"):
            raise RefusedError(f"with transport {transport} --nproc-per-node needs --nodes with host names")
        hosts = ["localhost"] * number
    return [{"host": host, "nproc_per_node": _number(nproc_per_node)} for host in hosts]


def _transport(text: str | None) -> object:
    import shlex

    if text is None or "{" not in text:
        return text
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RefusedError(f"--transport is {text!r}: cannot be split into words ({error})") from None


def _ports(text: str | None) -> list[int | str] | None:
    return None if text is None else [_number(port) for port in text.split("-")]


def _join(file: str | None, ports: str | None, wait: float | None) -> dict[str, object] | None:
    said = {"file": file, "ports": _ports(ports), "wait": wait}
    return {key: value for key, value in said.items() if value is not None} or None


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise RefusedError(f"--env is {word!r}: must be NAME=VALUE")
    return name, value
