"""The command line: verbs, ``--version`` and the exit codes that all verbs share."""

import sys
from typing import Annotated

import typer

from .. import __version__
from . import doctor, plan, run, site, templates, timeline
from .command_line import TorchrunCommand
from .output import RefusedError, complain

__all__ = ["main"]

app = typer.Typer(
    name="nvflare-torchrun",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Node groups for NVFlare and torchrun: look at them, try them, run on them.",
    epilog="Exit codes: 0 all is well; 1 what was asked for failed; 2 what was asked for makes no sense.",
)
app.command("run", cls=TorchrunCommand, epilog=run.EPILOG)(run.run)
app.command("plan", cls=TorchrunCommand, epilog=plan.EPILOG)(plan.plan)
app.command("doctor", epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(templates.app, name="templates")
app.add_typer(site.app, name="site")
app.command(
    "timeline",
    epilog="Example: nvflare-torchrun timeline demo-workspace/run --html timeline.html\n\n"
    "Exit codes: 0 no task has failed; 1 one has; 2 there is nothing to show.",
)(timeline.show)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Only what comes before the verb."""


def main() -> None:
    """What the console command runs; ends the process with the verb's exit code."""
    try:
        app()
    except RefusedError as refused:
        complain(str(refused))
        sys.exit(2)
