"""Which node group a job gets: where from, how much of it the job wants, and what the job may do with it."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nvflare_torchrun_plugin import transports
from nvflare_torchrun_plugin.contract import NNODES, NODE_RANK, Contract, ContractError
from nvflare_torchrun_plugin.description import job_meta
from nvflare_torchrun_plugin.description.group_description import AUTO, PROPERTY, Node, NodeGroup, parse
from nvflare_torchrun_plugin.description.site_file import NAME, SiteFile
from nvflare_torchrun_plugin.group_values import NodeGroupError, parse_nproc_per_node, shown

DEFAULT_NPROC_PER_NODE = "auto"


@dataclass(frozen=True)
class Wish:
    """How much of the node group a job wants."""

    nnodes: tuple[int, int] | None = None
    """Least and most nodes; None: all that are offered."""

    nproc_per_node: int | str | None = None
    """Processes per node, or torchrun's word for a number; None: what each node offers."""


def parse_nnodes(value: object, where: str = "nnodes") -> tuple[int, int] | None:
    """Return the least and the most nodes of ``2``, ``"2"`` or ``"1:4"`` (torchrun's form), None for None.

    Args:
        where: the place and the name of the value, which messages begin with.

    Raises:
        NodeGroupError: it has another form, is below 1, or the first number is the larger.
    """
    if value is None:
        return None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text = value if isinstance(value, str) else shown(value) if is_number else ""
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?::\s*([0-9]{1,9})\s*)?", text)
    if match:
        least = int(match[1])
        most = int(match[2] or match[1])
        if 1 <= least <= most:
            return least, most
    raise NodeGroupError(
        f"{where} is {shown(value)}: must be a number of nodes of at least 1, or the least and the most as in"
        " '1:4'"
    )


def parse_wish(nnodes: object, nproc_per_node: object, meta: Mapping[str, object], site: str) -> Wish:
    """Return what the job wants at this site.

    Args:
        nnodes: the executor's argument.
        nproc_per_node: the executor's argument.
        meta: the job's meta; the keys ``nnodes`` and ``nproc_per_node`` of ``launcher_spec[site]["process"]``
            (or else of NVFlare's ``launcher_spec["default"]["process"]``) go before the arguments. All other
            keys there are NVFlare's.
        site: this site's name.

    Raises:
        NodeGroupError: a value is wrong; the message names the argument or the place in the meta.
    """
    asked = {
        "nnodes": (nnodes, "executor argument nnodes"),
        "nproc_per_node": (nproc_per_node, "executor argument nproc_per_node"),
        **job_meta.launcher_values(meta, site, ("nnodes", "nproc_per_node")),
    }
    return Wish(parse_nnodes(*asked["nnodes"]), parse_nproc_per_node(*asked["nproc_per_node"]))


def choose(
    environ: Mapping[str, str],
    site_file: SiteFile | None,
    property_value: object,
    wish: Wish,
    *,
    byoc: bool,
    launch_once: bool,
    script: str | None = None,
    module: str | None = None,
    job_env: bool = False,
    job_options: bool = False,
    job_preload: bool = False,
    app_dir: str | None = None,
) -> NodeGroup:
    """Return the node group for the job, after :func:`check_trust`.

    The first that applies: NVFlare's contract in the environment (for more than one node), the site's file,
    the property as the job has set it, this host alone. The other nodes of a contract may dial in, when the file
    or the property says so (transport ``join``); then each task can have a launch of its own there, too. Of it,
    the job gets the first nodes, as many as it wants and no more than there are. Every node of the result has
    its ``nproc_per_node``.

    Args:
        environ: the environment of the client job.
        site_file: what the site says, None when it says nothing.
        property_value: the FL context property as a component of the job has set it, else None.
        wish: how much the job wants.
        byoc: whether the job has the bring-your-own-code right.
        launch_once: whether one launch serves all tasks of the job.
        script: absolute path of the script to run, or None.
        module: name of the module to run instead, or None.
        job_env: whether the job sets environment variables for it.
        job_options: whether the job gives options of torchrun's.
        job_preload: whether the job names modules to import ahead of its script.
        app_dir: where the job's app is, or None.

    Raises:
        NodeGroupError: a description is wrong, the job wants more than is offered, or it may not do this.
    """
    check_trust(
        byoc,
        site_file,
        script=script,
        module=module,
        job_env=job_env,
        job_options=job_options,
        job_preload=job_preload,
        job_group=property_value is not None,
        app_dir=app_dir,
    )
    group = _from_contract(environ)
    if group is None or not launch_once:
        described = site_file.group if site_file is not None else None
        if described is None and property_value is not None:
            described = parse(property_value, f"FL context property {PROPERTY}", environ)
        group = _that_joins(group, described) if group is not None else described
    if group is None:
        group = alone(f"neither the site's local/{NAME} nor the job describes a node group")
    return grant(group, wish)


def check_trust(
    byoc: bool,
    site_file: SiteFile | None,
    *,
    script: str | None,
    module: str | None,
    job_env: bool,
    job_options: bool,
    job_preload: bool,
    job_group: bool,
    app_dir: str | None = None,
) -> None:
    """Check that the job may do what it asks for.

    A job with the bring-your-own-code right runs anything as the site's user anyway. One without it gets only
    what the site's file gives: scripts on the list ``allowed_scripts`` (the same file, links followed).

    Args:
        byoc: whether the job has the right.
        site_file: what the site says, None when it says nothing.
        script: absolute path of the script to run, or None.
        module: name of the module to run instead, or None.
        job_env: whether the job sets environment variables.
        job_options: whether the job gives options of torchrun's, some of which write files or run other programs.
        job_preload: whether the job names modules to import ahead of its script.
        job_group: whether a component of the job describes a node group.
        app_dir: where the job's app is, or None. It is the working directory, in which ``python -m``, and so
            torchrun, finds modules first; NVFlare looks for code in the folder ``custom`` alone.

    Raises:
        NodeGroupError: it may not. The message names the rule and both ways out.
    """
    if byoc:
        return
    path = site_file.path if site_file else f"local/{NAME} of its workspace"
    allowed = site_file.allowed_scripts if site_file else ()
    if module is not None:
        refused, way_out = (
            f"run a module ({shown(module)})",
            f"add a script for it to allowed_scripts in {path}",
        )
    elif script is None or not _is_among(script, allowed):
        refused, way_out = f"run the script {script}", f"add the script to allowed_scripts in {path}"
    elif job_env:
        refused, way_out = "set environment variables (env)", f"put them under env in {path}"
    elif job_options:
        refused, way_out = "give options of torchrun (torchrun_args)", "set what they need in the script itself"
    elif job_preload:
        refused, way_out = "name modules to import ahead (preload of warm_start)", "let the script import them"
    elif job_group:
        refused, way_out = f"describe a node group ({PROPERTY})", f"describe the nodes in {path}"
    elif app_dir is not None and (code := _code_in(app_dir)) is not None:
        refused, way_out = f"have Python code ({shown(code)})", "run a script of the site that does without it"
    else:
        return
    raise NodeGroupError(
        f"a job without the BYOC right (bring your own code) may not {refused} at this site: submit it with a"
        f" custom folder, as a user who has the right, or ask the site's admin to {way_out}"
    )


def _code_in(app_dir: str) -> str | None:
    """Return a file in the folder, at any depth, that Python could import."""
    suffixes = tuple(importlib.machinery.all_suffixes())
    for folder, _, files in os.walk(app_dir):
        for file in files:
            if file.endswith(suffixes):
                return os.path.relpath(f"{folder}/{file}", app_dir)
    return None


def _is_among(script: str, allowed: tuple[str, ...]) -> bool:
    # What a relative path means depends on who resolves it.
    if not Path(script).is_absolute():
        return False
    try:
        return os.path.realpath(script) in {os.path.realpath(path) for path in allowed}
    except ValueError:  # no path can hold a NUL character
        return False


def _that_joins(given: NodeGroup, described: NodeGroup | None) -> NodeGroup:
    """Return the group in which each task has a launch of its own, of nodes that a launcher has started.

    Raises:
        NodeGroupError: they do not dial in, or are others than are described.
    """
    if described is None or described.join is None:
        raise NodeGroupError(
            f"{given.source}: its launcher has started the other nodes once for the whole job, so launching for"
            " each task is impossible unless they dial in: set launch_once to true, or describe the node group by"
            f" nodes: {AUTO} and transport: {transports.JOIN}"
        )
    if described.nnodes != given.nnodes:
        raise NodeGroupError(
            f"{described.source} describes {described.nnodes} nodes, but {given.source} says {given.nnodes}: set"
            f" nodes to '{AUTO}'"
        )
    # They are this job's alone: whoever started them for it has seen to that.
    return dataclasses.replace(described, on_busy="share")


def _from_contract(environ: Mapping[str, str]) -> NodeGroup | None:
    if NNODES not in environ:
        return None
    source = "environment of the client job"
    try:
        contract = Contract.from_environ(environ)
    except ContractError as error:
        raise NodeGroupError(f"{source}: {error}") from None
    if contract.nnodes == 1:
        return None
    if contract.node_rank != 0:
        raise NodeGroupError(
            f"{source}: {NODE_RANK} is {contract.node_rank}: the client job's host must be node rank 0,"
            " correct the launcher that has set it"
        )
    return NodeGroup(
        nodes=(Node(host=socket.gethostname(), address=contract.master_addr),),
        source=f"{source} ({NNODES}={contract.nnodes})",
        contract=contract,
    )


def alone(why: str) -> NodeGroup:
    """Return this host as a group of one node."""
    return NodeGroup(nodes=(Node(host=socket.gethostname()),), source=f"this host alone ({why})")


def grant(group: NodeGroup, wish: Wish) -> NodeGroup:
    """Return the first nodes of the group, as many as are wanted, each with its ``nproc_per_node``.

    Raises:
        NodeGroupError: more is wanted than there is.
    """
    least, most = wish.nnodes or (1, group.nnodes)
    if group.contract and not least <= group.nnodes <= most:
        raise NodeGroupError(
            f"the job wants {_span(least, most)} nodes (nnodes), but {group.source} says {group.nnodes},"
            f" which are started already: set nnodes to {group.nnodes} or leave it out"
        )
    if least > group.nnodes:
        raise NodeGroupError(
            f"the job wants {_span(least, most)} nodes (nnodes), but {group.source} offers {group.nnodes}:"
            " lower nnodes, or describe more nodes"
        )
    nodes = tuple(
        dataclasses.replace(node, nproc_per_node=_processes(node, wish.nproc_per_node, group.source))
        for node in group.nodes[:most]
    )
    return dataclasses.replace(group, nodes=nodes, least=min(least, len(nodes)) if wish.nnodes else 0)


def _span(least: int, most: int) -> str:
    return f"{least}" if least == most else f"{least} to {most}"


def _processes(node: Node, wanted: int | str | None, source: str) -> int | str:
    offered = node.nproc_per_node
    if isinstance(offered, int):
        if not isinstance(wanted, int):
            return offered
        if wanted > offered:
            raise NodeGroupError(
                f"the job wants {wanted} processes per node (nproc_per_node), but {source} offers {offered}"
                f" on node {node.host}: lower nproc_per_node"
            )
        return wanted
    # "auto" leaves it open whether to count GPUs or cores, so the job may say; "gpu" from the site does not.
    if isinstance(offered, str) and offered != DEFAULT_NPROC_PER_NODE and isinstance(wanted, str):
        return offered
    return wanted or offered or DEFAULT_NPROC_PER_NODE
