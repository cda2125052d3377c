"""``nvflare-torchrun site``: a site's own say about its nodes, in its startup kit."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import JsonOption, RefusedError, console, print_json, print_table

if TYPE_CHECKING:
    from ..site_file import SiteFile

__all__ = ["app"]

app = typer.Typer(help="A site's nodes and what it allows, in its startup kit.", no_args_is_help=True)

_CLASSES = "nvflare_torchrun_plugin."
_KEY = "class_allow_list"
_HEADER = (
    "# The nodes of this site, and the scripts that any job may run on them. Check: nvflare-torchrun site check\n"
)

_Kit = Annotated[Path, typer.Argument(help="The site's startup kit: the folder with local/ and startup/ in it.")]
_Elsewhere = Annotated[
    bool,
    typer.Option("--elsewhere", help="This is not the site's host: do not ask whether node rank 0 is this one."),
]


@app.command(
    epilog="Example: nvflare-torchrun site check prod_00/site-1\n\n"
    "Exit codes: 0 all is well; 1 there is something to correct, and it is named; 2 there is no kit."
)
def check(kit: _Kit, elsewhere: _Elsewhere = False, as_json: JsonOption = False) -> None:
    """Check local/node_group.yaml, and whether a job without code of its own finds our classes allowed."""
    local = _local(kit)
    try:
        found = _read(local / _name(), elsewhere)
    except ValueError as error:
        if as_json:
            print_json({"problem": str(error)})
        else:
            console().print(f"problem: {error}", markup=False)
        raise typer.Exit(1) from None
    allows = _allows(local)
    missing = [
        script
        for script in (found.allowed_scripts if found else ())
        if not elsewhere and not Path(script).is_file()
    ]
    if as_json:
        print_json(
            {
                "file": str(local / _name()),
                "exists": found is not None,
                "group": found.group.to_property() if found and found.group else None,
                "allowed_scripts": list(found.allowed_scripts) if found else [],
                "missing_scripts": missing,
                "classes_allowed": allows,
            }
        )
    else:
        _tell(local, found, allows, missing)
    if missing:
        raise typer.Exit(1)


@app.command(
    epilog="Example: nvflare-torchrun site write prod_00/site-1 --nodes gpu-0,gpu-1 --transport ssh "
    "--allow /opt/site/train.py\n\n"
    "Exit codes: 0 it is written; 2 it cannot work, or something is in the way: nothing is written."
)
def write(
    kit: _Kit,
    nodes: Annotated[
        str | None, typer.Option(help="How many on this host, host names with commas between, or auto.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="local, ssh, srun, or a command with {host} (and {command}) in it.")
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
    allow: Annotated[
        list[str] | None, typer.Option(help="A script that any job may run, absolute; several times.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a file that is there.")] = False,
    elsewhere: _Elsewhere = False,
) -> None:
    """Write local/node_group.yaml, and no other file of the kit.

    What cannot work is refused before anything is written. The running site reads the file at the
    start of each job.
    """
    import yaml

    local = _local(kit)
    described = {
        "nodes": _nodes(nodes, nproc_per_node),
        "transport": _transport(transport),
        "python": python,
        "master_port_range": _ports(master_port_range),
        "env": dict(_pair(word) for word in env) if env else None,
        "on_busy": on_busy,
        "busy_timeout": busy_timeout,
        "stage": stage,
        "allowed_scripts": allow or None,
    }
    given = {key: value for key, value in described.items() if value is not None}
    if not given:
        raise RefusedError("nothing to write: give --nodes, --allow or both (see --help)")
    text = _HEADER + yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
    target = local / _name()
    if target.exists() and not replace:
        raise RefusedError(f"{target} is there already; look at it with `site check`, or give --replace")
    try:
        old = target.read_text(encoding="utf-8", errors="replace") if target.exists() else ""
    except OSError as error:
        raise RefusedError(f"{target} cannot be read: {error.strerror}; correct or remove it") from None
    _put(target, text, lambda draft: _read(draft, elsewhere))
    _show_difference(old, text, target)


@app.command(
    epilog="Example: nvflare-torchrun site allow prod_00/site-1 (shows it); nvflare-torchrun site allow "
    "prod_00/site-1 --write (does it)\n\n"
    "Exit codes: 0 it is shown, or written; 2 a file of the kit is not whole: nothing is written."
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
    local = _local(kit)
    source = _resources(local)
    before, resources = _resources_of(source)
    there = _is_allowed(resources)
    after = before
    if not there:
        resources[_KEY] = [*resources[_KEY], _CLASSES]
        after = json.dumps(resources, indent=2, ensure_ascii=False) + "\n"
    target = local / "resources.json"
    if as_json:
        print_json({"entry": _CLASSES, "key": _KEY, "from": str(source), "to": str(target), "allowed": there})
    elif there:
        console().print(f"{source} allows {_CLASSES} already", markup=False)
    else:
        shown = json.dumps(json.loads(before), indent=2, ensure_ascii=False) + "\n"
        console().print(f'{_KEY} needs the entry "{_CLASSES}":', markup=False)
        _show_difference(shown, after, target, source)
    if write and not there:
        _put(target, after, _resources_of, source)
        if not as_json:
            console().print(f"{target} is written", markup=False)


def _name() -> str:
    from ..site_file import NAME

    return NAME


def _local(kit: Path) -> Path:
    local = kit / "local"
    if not local.is_dir() or not (kit / "startup").is_dir():
        raise RefusedError(f"{kit} is no startup kit: it has no local/ and startup/; give the site's folder")
    return local


def _read(path: Path, elsewhere: bool) -> SiteFile | None:
    from ..site_file import read_site_file

    return read_site_file(str(path), None if elsewhere else os.environ)


def _tell(local: Path, found: SiteFile | None, allows: bool | None, missing: list[str]) -> None:
    out = console()
    if found is None:
        out.print(
            f"{local / _name()} is not there: each job says which nodes it takes, or takes this host", markup=False
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
        out.print(f"on_busy: {group.on_busy}, {group.busy_timeout:g} s; stage: {group.stage}", markup=False)
        if group.env:
            out.print(f"env: {', '.join(sorted(group.env))}", markup=False)
    if found is not None:
        for script in found.allowed_scripts:
            out.print(f"any job may run: {script}{' (MISSING here)' if script in missing else ''}", markup=False)
    if allows is False:
        out.print(
            f"jobs without code of their own are refused: {_CLASSES} is not allowed (site allow)", markup=False
        )
    elif allows:
        out.print("jobs without code of their own find our classes allowed", markup=False)


# -- class_allow_list ---------------------------------------------------------------------------------------------


def _resources(local: Path) -> Path:
    for name in ("resources.json", "resources.json.default"):
        if (local / name).is_file():
            return local / name
    raise RefusedError(f"{local} has no resources.json and no resources.json.default; make the kit again")


def _resources_of(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        resources = json.loads(text)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read: {error}; correct it") from None
    classes = resources.get(_KEY) if isinstance(resources, dict) else None
    if not isinstance(classes, list):
        raise RefusedError(f"{path} has no list {_KEY}: it is no whole copy of resources.json.default; correct it")
    return text, resources


def _is_allowed(resources: dict[str, Any]) -> bool:
    return any(prefix in resources[_KEY] for prefix in ("*", _CLASSES, _CLASSES.rstrip(".")))


def _allows(local: Path) -> bool | None:
    return _is_allowed(_resources_of(_resources(local))[1])


# -- writing ------------------------------------------------------------------------------------------------------


def _put(target: Path, text: str, check: Callable[[Path], object], source: Path | None = None) -> None:
    """Write the file in one piece, once it has been read back without a complaint; a link stays one.

    Who may read it stays as it was, or is as with the source of a new one.
    """
    place = Path(os.path.realpath(target))
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        check(draft)
        like = place if place.exists() else source
        if like is not None:
            shutil.copymode(like, draft)
        draft.replace(place)
    except OSError as error:
        raise RefusedError(f"{target} cannot be written: {error.strerror}") from None
    except ValueError as error:
        raise RefusedError(str(error).replace(str(draft), str(target))) from None
    finally:
        draft.unlink(missing_ok=True)


def _show_difference(old: str, new: str, target: Path, source: Path | None = None) -> None:
    lines = difflib.unified_diff(
        old.splitlines(True), new.splitlines(True), str(source or target), str(target), n=2
    )
    sys.stdout.write("".join(lines))


# -- options ------------------------------------------------------------------------------------------------------


def _number(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _nodes(text: str | None, nproc_per_node: str | None) -> object:
    if text is None:
        if nproc_per_node is not None:
            raise RefusedError("--nproc-per-node needs --nodes with host names")
        return None
    if text == "auto" or isinstance(_number(text), int):
        if nproc_per_node is not None:
            raise RefusedError("--nproc-per-node needs --nodes with host names (of this host: --nodes localhost)")
        return _number(text)
    hosts = [host.strip() for host in text.split(",")]
    if nproc_per_node is None:
        return hosts
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


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals:
        raise RefusedError(f"--env is {word!r}: must be NAME=VALUE")
    return name, value
