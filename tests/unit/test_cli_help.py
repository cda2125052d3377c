"""What every verb of the console command tells of itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from nvflare_torchrun_plugin.cli.verbs import app


def verbs(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    if not below:
        yield words
    for name, verb in below.items():
        yield from verbs(verb, (*words, name))


@pytest.mark.parametrize("words", list(verbs(typer.main.get_command(app))), ids=" ".join)
def test_help_has_an_example_and_the_exit_codes(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0
    assert "Example: nvflare" in done.output
    assert "Exit codes: 0" in done.output


@pytest.mark.parametrize("words", list(verbs(typer.main.get_command(app))), ids=" ".join)
def test_every_verb_speaks_to_machines(words: tuple[str, ...]) -> None:
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    assert "--json" in {option for parameter in command.params for option in parameter.opts}


def test_a_paragraph_is_wrapped_where_the_terminal_ends() -> None:
    done = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert (
        "ends the group on all nodes; Ctrl-C does, too. The nodes need this package, and the script" in done.output
    )
    assert "run [OPTIONS] [TORCHRUN OPTIONS] SCRIPT [ARGS]..." in done.output
