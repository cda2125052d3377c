"""``nvflare-torchrun templates``: the bundled job templates."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..templates import path
from .command_line import Verb
from .output import JsonOption, RefusedError, console, print_json, print_table

__all__ = ["app"]

app = typer.Typer(help="The bundled NVFlare job templates.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="The template's name, as `templates list` shows it.")]
_DESCRIPTION = re.compile(r'^\s*description\s*=\s*"(.*)"\s*$', re.MULTILINE)


@app.command(
    "path",
    cls=Verb,
    epilog="Example: nvflare job create -w $(nvflare-torchrun templates path)/torchrun_fedavg_pt -j job\n\n"
    "Exit codes: 0 it is there; 2 the package is not whole.",
)
def print_path(as_json: JsonOption = False) -> None:
    """Print the folder of all templates, for `nvflare job create -w`."""
    if as_json:
        print_json({"folder": str(_bundled())})
    else:
        typer.echo(str(_bundled()))


@app.command(
    "list",
    cls=Verb,
    epilog="Example: nvflare-torchrun templates list\n\n"
    "Exit codes: 0 they are listed; 2 the package is not whole.",
)
def list_all(as_json: JsonOption = False) -> None:
    """List the templates, with what each is for."""
    found = [(folder.name, _description(folder)) for folder in _folders()]
    if as_json:
        print_json([{"name": name, "description": description} for name, description in found])
    else:
        print_table(["template", "description"], found)


@app.command(
    cls=Verb,
    epilog="Example: nvflare-torchrun templates show torchrun_fedavg_pt\n\n"
    "Exit codes: 0 it is shown; 2 there is no such one.",
)
def show(name: _Name, as_json: JsonOption = False) -> None:
    """Show what a template does, its variables, and its files."""
    folder = _folder(name)
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    told = (folder / "info.md").read_text(encoding="utf-8")
    if as_json:
        described = {"description": _description(folder), "info": told, "files": files, "folder": str(folder)}
        print_json({"name": name, **described})
        return
    out = console()
    if out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(told))
    else:
        typer.echo(told.rstrip("\n"))
    out.print(f"\n{folder}: {', '.join(files)}", markup=False)


@app.command(
    cls=Verb,
    epilog="Example: nvflare-torchrun templates copy torchrun_fedavg_pt my_template\n\n"
    "Exit codes: 0 it is copied; 2 there is no such one, or something is in the way.",
)
def copy(
    name: _Name,
    target: Annotated[Path, typer.Argument(help="The new folder, which must not be there yet.")],
    as_json: JsonOption = False,
) -> None:
    """Copy a template into a folder of your own, to change more of it than its variables."""
    folder = _folder(name)
    try:
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))
    except FileExistsError:
        raise RefusedError(f"{target} is there already; give a folder that is not") from None
    except OSError as error:
        raise RefusedError(f"{target} cannot be written: {error.strerror or error}") from None
    if as_json:
        print_json({"name": name, "folder": str(target.absolute())})
    else:
        command = shlex.join(["nvflare", "job", "create", "-w", str(target.absolute())])
        console().print(f"{target} is a copy: {command} ...", markup=False)


def _bundled() -> Path:
    try:
        return path()
    except FileNotFoundError as error:
        raise RefusedError(str(error)) from None


def _folders() -> list[Path]:
    return sorted(folder for folder in _bundled().iterdir() if (folder / "info.conf").is_file())


def _folder(name: str) -> Path:
    for folder in _folders():
        if folder.name == name:
            return folder
    names = ", ".join(folder.name for folder in _folders())
    raise RefusedError(f"there is no template {name!r}: the templates are {names}")


def _description(folder: Path) -> str:
    found = _DESCRIPTION.search((folder / "info.conf").read_text(encoding="utf-8"))
    return found[1] if found else ""
