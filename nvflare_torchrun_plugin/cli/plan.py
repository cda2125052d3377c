"""``nvflare-torchrun plan``: what a job, or a run, would start on each node; nothing is started."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract import NODE_RANK
from .asked import GroupAsked, ProgramAsked, takes_what_is_asked
from .output import JsonOption, RefusedError, console, print_json, print_table

if TYPE_CHECKING:
    from ..launching.planning import Plan

__all__ = ["EPILOG", "plan"]

EPILOG = (
    "Example: nvflare-torchrun plan --job jobs/digits --site site-1 --workspace /opt/nvflare/site-1\n\n"
    "Example: nvflare-torchrun plan --nodes gpu-0,gpu-1 --nproc-per-node 8 train.py --lr 0.1\n\n"
    "Exit codes: 0 it can be planned; 2 it makes no sense, or the site would refuse it."
)
_NO_KIT = Path("/nonexistent")
_SITE = "site-1"


@takes_what_is_asked
def plan(
    asked: GroupAsked,
    program: ProgramAsked,
    job: Annotated[
        Path | None,
        typer.Option(
            "--job", metavar="FOLDER", help="A job: from a template, exported by the Job API, or written."
        ),
    ] = None,
    site: Annotated[
        str, typer.Option("--site", metavar="NAME", help="The site whose part of the job is planned.")
    ] = _SITE,
    as_json: JsonOption = False,
) -> None:
    """Show what would be started on each node, from a job's folder or from the options of `run`; start nothing.

    A job is planned as this host's client would: with --workspace as the site, without it as a site that does not
    describe its nodes. Ports and run ids are new for each attempt, those shown are examples; torchrun gets what is
    left of join_timeout by then.

    All options of `run` are taken, so that its command line can be planned as it is. Those that only count once
    something runs (--node-timeout, --hang-timeout, --stop-grace-period, --log-ranks) are checked, and change
    nothing in what is shown.
    """
    if job is None:
        directory = Path.cwd()
        planned = program.plan(asked.group(os.environ), directory, program.log_dir(directory))
    elif (asked, program) == (GroupAsked(workspace=asked.workspace), ProgramAsked()):
        planned = _of_job(job, site, asked.workspace)
    else:
        raise RefusedError("--job says what to run, and how: give besides it --site and --workspace alone")
    explained = _explained(planned)
    if as_json:
        print_json(explained)
    else:
        _print(explained)


def _of_job(job: Path, site: str, workspace: Path | None) -> Plan:
    from ..group_values import NodeGroupError
    from ..launching.program import ProgramError
    from .job_folder import read

    app = read(job, site)
    try:
        return app.executor.plan(
            os.environ,
            site=site,
            meta=app.meta,
            app_dir=app.app_dir,
            custom_dir=app.app_dir / "custom",
            site_config_dir=(workspace or _NO_KIT) / "local",
            described=app.described,
            log_dir=Path("torchrun"),
        )
    except (NodeGroupError, ProgramError) as error:
        raise RefusedError(str(error)) from None


def _explained(planned: Plan) -> dict[str, Any]:
    from ..launching.planning import PlanError
    from ..launching.program import ProgramError
    from .explained import explain

    try:
        return explain(planned, os.environ)
    except (PlanError, ProgramError) as error:
        raise RefusedError(str(error)) from None


def _print(explained: Mapping[str, Any]) -> None:
    group, ports = explained["node_group"], explained["master_port_range"]
    least = f", at least {group['least']}" if group["least"] < group["nodes"] else ""
    rows = [
        ("node group", f"{group['nodes']} nodes{least}, from {group['source']}"),
        ("transport", _words(group["transport"])),
        ("master address", explained["master_address"] or "none: one node needs no rendezvous"),
        ("master port", f"a free one of {ports[0]} to {ports[1]}" if ports else "its launcher's, or none"),
        ("runs", f"{explained['target']} in {explained['directory']}"),
    ]
    print_table(("what", "value"), rows)
    shown: dict[str, int] = {}
    for node in explained["nodes"]:
        name = f"node {node['node_rank']} ({node['host']})"
        # Of many nodes most are alike, and a screen holds three.
        first = shown.setdefault(_but_for_its_place(node), node["node_rank"])
        if first != node["node_rank"]:
            console().print(f"{name}: as node {first}, but for its host and node rank", markup=False)
            continue
        environment = node["environment"]
        rows = [
            ("reached by", _words(node["transport"])),
            ("contract", " ".join(f"{name}={value}" for name, value in node["contract"].items())),
            ("translator", _words(node["translator"])),
            ("torchrun", _words(node["torchrun"])),
            ("copy of code", node["staging"]),
            ("variables set", " ".join(f"{name}={value}" for name, value in environment["set"].items())),
            ("set by the node", " ".join(environment["set_by_node"])),
            ("kept", _names(environment["kept"])),
            ("hidden", _names(environment["hidden"])),
        ]
        print_table(("what", "value"), rows, title=name)


def _but_for_its_place(node: Mapping[str, Any]) -> str:
    """Return what is the same text for two nodes that differ in host and node rank only."""
    rank = node["node_rank"]
    contract = {**node["contract"], NODE_RANK: ""}
    environment = {**node["environment"], "set": {**node["environment"]["set"], NODE_RANK: ""}}
    return json.dumps(
        {
            **node,
            "node_rank": "",
            "host": "",
            "transport": [word.replace(node["host"], "{host}") for word in node["transport"]],
            "torchrun": [word for word in node["torchrun"] if word != f"--node_rank={rank}"],
            "contract": contract,
            "environment": environment,
        },
        sort_keys=True,
    )


def _words(words: str | list[str]) -> str:
    return words if isinstance(words, str) else shlex.join(words)


def _names(names: list[str] | None) -> str:
    return "the node's own" if names is None else " ".join(names) or "none"
