"""The words after a verb that runs something: the verb's options, torchrun's, then SCRIPT and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from .. import torchrun_node
from .output import RefusedError

__all__ = ["TorchrunCommand", "Verb", "split"]


def split(words: Sequence[str], ours: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Return the verb's own options, and all other words in the order given.

    Both kinds of options may come in any order; SCRIPT, or ``--``, ends them. torchrun's ``_`` for ``-`` is fine
    in both.

    Args:
        words: what follows the verb.
        ours: the verb's options, and whether each takes a value.

    Raises:
        UsageError: a word is an option of neither.
    """
    mine: list[str] = []
    theirs: list[str] = []
    left = list(words)
    while left and left[0].startswith("-") and left[0] not in ("-", "--"):
        word = left.pop(0)
        given, equals, value = word.partition("=")
        name = "--" + given[2:].replace("_", "-") if given.startswith("--") else given
        if name in ours:
            taken, another = mine, ours[name] and not equals
            word = name + equals + value
        else:
            taken, another = theirs, torchrun_node.takes_another_word(word, ours)
        taken.append(word)
        if another and left:
            taken.append(left.pop(0))
    return mine, theirs + left


class Verb(TyperCommand):
    """A verb whose help is its function's docstring, wrapped where the terminal ends and not where a line did."""

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:
        paragraphs = inspect.cleandoc(help or "").split("\n\n")
        super().__init__(*args, help="\n\n".join(" ".join(each.split()) for each in paragraphs), **more)


class TorchrunCommand(Verb):
    """A verb whose last argument takes torchrun's options, SCRIPT and ARGS."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Show them as what they are."""
        return ["[OPTIONS]", "[TORCHRUN OPTIONS]", "SCRIPT", "[ARGS]..."]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give the verb its own options, and all that is torchrun's as its argument."""
        ours = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        try:
            mine, theirs = split(args, ours)
        except torchrun_node.UsageError as error:
            # A shell that asks how to go on is told of no mistake.
            if not ctx.resilient_parsing:
                raise RefusedError(str(error)) from None
            mine, theirs = [], []
        return super().parse_args(ctx, [*mine, "--", *theirs])
