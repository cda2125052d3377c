"""Puts the help of every verb of the console command on its page, as the command prints it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from nvflare_torchrun_plugin.cli.verbs import app

PAGE = "reference/commands.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs with each page."""
    if page.file.src_path != PAGE:
        return markdown
    return markdown + "".join(_verbs(typer.main.get_command(app), "nvflare-torchrun"))


def _verbs(command: Any, name: str) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"\n## {name}\n\n```text\n{usage}\n```\n\n{_plain(command.help)}\n\n"
    for parameter in command.params:
        if getattr(parameter, "help", None):
            names = ", ".join(f"`{one}`" for one in parameter.opts)
            yield f"- {names}: {_plain(parameter.help)}\n"
    if command.epilog:
        yield f"\n{_plain(command.epilog)}\n"
    for verb, below in getattr(command, "commands", {}).items():
        yield from _verbs(below, f"{name} {verb}")


def _plain(text: str | None) -> str:
    """Return the text so that Markdown shows it as it is."""
    return (text or "").replace("*", r"\*").replace("<", "&lt;")
