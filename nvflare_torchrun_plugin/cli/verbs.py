"""The command line: the verbs, ``--version``, and what the exit codes of all verbs mean."""

from typing import Annotated

import typer

from .. import __version__
from . import doctor, plan, run, site, templates, timeline
from .command_line import TorchrunCommand, Verb

__all__ = ["app"]

app = typer.Typer(
    name="nvflare-torchrun",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Node groups for NVFlare and torchrun: look at them, try them, run on them.",
    epilog="Exit codes: 0 all is well; 1 what was asked for failed, or its result could not be written; 2 what was"
    " asked for makes no sense; 130 it was stopped by Ctrl-C.",
)
app.command("run", cls=TorchrunCommand, epilog=run.EPILOG)(run.run)
app.command("plan", cls=TorchrunCommand, epilog=plan.EPILOG)(plan.plan)
app.command("doctor", cls=Verb, epilog=doctor.EPILOG)(doctor.doctor)
app.add_typer(templates.app, name="templates")
app.add_typer(site.app, name="site")
app.command(
    "timeline",
    cls=Verb,
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
