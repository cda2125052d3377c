"""``nvflare-torchrun timeline``: where the time of a run went."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from ..timeline import PHASES, NodeTime, TaskTime, read
from .output import JsonOption, RefusedError, print_json, print_table
from .timeline_page import page

__all__ = ["show"]


def show(
    folder: Annotated[Path, typer.Argument(help="A run's directory, or a folder above several sites' runs.")],
    html: Annotated[Path | None, typer.Option(help="Write the timeline as a page into this file as well.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of a run went, in seconds per task, node and phase.

    Waiting is for busy nodes or NVFlare's client job, launching until every node has its agent and the job's
    files, joining until torchrun has started the ranks, importing until the script asks for the model. Receiving,
    training and sending are told by the script's calls of nvflare_torchrun_plugin.client; with NVFlare's own
    client all of it counts as training. What a warm start did ahead of the task has cost it nothing, and is not
    counted.

    The run may still be going on.
    """
    try:
        tasks = read(folder)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{folder} cannot be read: {error}; give a run's directory") from None
    if not tasks:
        raise RefusedError(
            f"no task had a group in {folder}: give a run's directory, or look for 'failed:' in its log"
        )
    if html is not None:
        try:
            html.write_text(page(tasks, str(folder)), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise RefusedError(f"{html} cannot be written: {error.strerror}; give another file") from None
    if as_json:
        print_json([_as_dict(task) for task in tasks])
    else:
        _print(tasks)
    if any(task.code not in (None, "OK") for task in tasks):
        raise typer.Exit(1)


def _as_dict(task: TaskTime) -> dict[str, object]:
    nodes = [
        {**dataclasses.asdict(node), "seconds": {phase: round(node.seconds(phase), 3) for phase in PHASES}}
        for node in task.nodes
    ]
    return {**dataclasses.asdict(task), "outcome": task.outcome, "nodes": nodes}


def _print(tasks: list[TaskTime]) -> None:
    rows = [_row(task, node) for task in tasks for node in task.nodes or (None,)]
    print_table(["site", "task", "round", "try", "start", "node", *PHASES, "total", "outcome"], rows)


def _row(task: TaskTime, node: NodeTime | None) -> list[str | Text]:
    head = [task.site, task.task, "" if task.round is None else str(task.round), str(task.number), task.start]
    total = f"{task.end - task.begin:.1f}"
    if node is None:
        return [*head, "no group", *("" for _ in PHASES), total, _colored(task, task.outcome)]
    name = node.host if node.node_rank is None else f"{node.node_rank} {node.host}"
    seconds = [f"{node.seconds(phase):.1f}" if node.seconds(phase) else "" for phase in PHASES]
    what = "left out" if node.node_rank is None else node.failure or task.outcome
    return [*head, name, *seconds, total, _colored(task, what)]


def _colored(task: TaskTime, what: str) -> Text:
    return Text(what, style="" if task.code in (None, "OK") else "red")
