"""Makes the pages whole: chapters of the README, and the help of every verb of the console command."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from nvflare_torchrun_plugin.cli.verbs import app

COMMANDS = "reference/commands.md"
README = Path(__file__).parents[1] / "README.md"
CHAPTERS = {
    "#your-nodes": "how-to/nodes.md",
    "#beside-nvflares-slurm-launcher": "how-to/slurm-launcher.md",
    "#nodes-that-dial-in": "how-to/join.md",
    "#who-may-run-it": "how-to/site.md",
    "#options-of-the-executor": "reference/readme.md#options-of-the-executor",
    "#signals": "reference/readme.md#signals",
}
"""Where the README's chapters are on these pages."""

_WORD = "TEXT"
"""What an option takes whose help says the rest, as in --help."""
_CHAPTER = re.compile(r'^--8<-- "README.md:(\w+)"$', re.MULTILINE)
_LINK = re.compile(r"\]\((#[^)]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page."""
    return whole(markdown, page.file.src_path)


def whole(markdown: str, path: str) -> str:
    """Return a page with what is to be in it.

    Args:
        markdown: as it is written; a line ``--8<-- "README.md:name"`` stands for the README's chapter between the
            markers of that name.
        path: of the page below ``docs``.

    Raises:
        LookupError: the README has no such chapter, or it refers to another that is on no page.
    """
    markdown = _CHAPTER.sub(lambda found: _chapter(found[1], path), markdown)
    if path == COMMANDS:
        markdown += "".join(_verbs(typer.main.get_command(app), "nvflare-torchrun"))
    return markdown


def _chapter(name: str, path: str) -> str:
    begin, end = (f"<!-- --8<-- [{which}:{name}] -->\n" for which in ("start", "end"))
    readme = README.read_text(encoding="utf-8")
    if begin not in readme or end not in readme:
        raise LookupError(f"{README} has no chapter {name} that {path} could have")
    text = readme.partition(begin)[2].partition(end)[0]
    return _LINK.sub(lambda found: f"]({_relative(CHAPTERS[found[1]], path)})", text)


def _relative(target: str, path: str) -> str:
    page, sharp, anchor = target.partition("#")
    if page == path:
        return f"#{anchor}" if anchor else posixpath.basename(page)
    return posixpath.relpath(page, posixpath.dirname(path) or ".") + sharp + anchor


def _verbs(command: Any, name: str) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"\n## {name}\n\n```text\n{usage}\n```\n\n{_plain(command.help)}\n\n"
    for parameter in command.params:
        if getattr(parameter, "help", None):
            yield f"- {_names(parameter)}: {_plain(parameter.help)}{_default(parameter)}\n"
    if command.epilog:
        yield f"\n{_plain(command.epilog)}\n"
    for verb, below in getattr(command, "commands", {}).items():
        yield from _verbs(below, f"{name} {verb}")


def _names(parameter: Any) -> str:
    """Return an option's names with what it takes, an argument's name as the usage has it."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    takes = "" if parameter.is_flag else f" {parameter.metavar or _WORD}"
    return ", ".join(f"`{one}{takes}`" for one in parameter.opts)


def _default(parameter: Any) -> str:
    """Return what --help shows as the default, where the help does not say it itself."""
    shown = parameter.default
    return "" if shown in (None, False, (), "") or "Default:" in parameter.help else f" Default: {shown}."


def _plain(text: str | None) -> str:
    """Return the text so that Markdown shows it as it is."""
    return (text or "").replace("*", r"\*").replace("<", "&lt;")
