"""What the ranks run: the job's script or module, its arguments and environment, secrets and all."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_REFERENCE = "${secret:"
"""How a secret reference begins. What has none needs nothing of NVFlare, whose import takes a while."""


class ProgramError(ValueError):
    """The script, its arguments or its environment are wrong; the message is one clear sentence."""


@dataclass(frozen=True)
class Program:
    """The job's program as it was configured, checked.

    Attributes:
        script: path of a Python file, absolute or relative to the job's ``custom`` or app folder, or None.
        module: name of a module to run as ``python -m`` does, or None; exactly one of both is given.
        args: its arguments; secret references (``${secret:NAME}``) are still references.
        env: environment variables for the ranks, with secret references as well.
    """

    script: str | None
    module: str | None
    args: tuple[str, ...]
    env: Mapping[str, str]

    def find(self, folders: Sequence[str]) -> str:
        """Return the script's absolute path (or the module's name), looked for in each folder in turn.

        Raises:
            ProgramError: there is no such file, or this user may not look there; the message names the places.
        """
        if self.script is None:
            return str(self.module)
        places = [Path(folder, self.script) for folder in folders]
        for place in places:
            try:
                if place.is_file():
                    return str(place.absolute())
            except OSError as e:
                raise ProgramError(f"script {self.script!r} cannot be looked for: {place}: {e.strerror}") from None
        tried = ", ".join(dict.fromkeys(str(place) for place in places))
        raise ProgramError(f"script {self.script!r} is not there; looked for {tried}")

    def resolved(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return arguments and environment with the site's secrets in place; for the ranks alone.

        Raises:
            ProgramError: a secret is not set on this site; the message names the reference, not a value.
        """
        if not any(_REFERENCE in text for text in (*self.args, *self.env.values())):
            return self.args, dict(self.env)
        from nvflare.fuel.utils.secret_utils import resolve_secret_refs

        try:
            return tuple(resolve_secret_refs(list(self.args))), dict(resolve_secret_refs(dict(self.env)))
        except ValueError as e:
            raise ProgramError(str(e)) from None


def parse(script: object, module: object, script_args: object, env: Mapping[str, str] | None) -> Program:
    """Return the checked program.

    Args:
        script, module: exactly one of both, a non-empty string.
        script_args: one string, split as a POSIX shell splits words (without expanding anything), or a list
            of strings taken as they are.
        env: checked variables, or None.

    Raises:
        ProgramError: the argument and its value.
    """
    for name, value in (("script", script), ("module", module)):
        if value is not None and (not isinstance(value, str) or not value.strip() or "\0" in value):
            raise ProgramError(f"{name} must be a non-empty string, got {value!r}")
    if (script is None) == (module is None):
        raise ProgramError(f"give either script or module, got script={script!r} and module={module!r}")
    if isinstance(script_args, str):
        try:
            script_args = _split(script_args)
        except ValueError as e:
            raise ProgramError(f"script_args cannot be split into words ({e}); give a list instead") from None
    if not isinstance(script_args, (list, tuple)) or not all(
        isinstance(arg, str) and "\0" not in arg for arg in script_args
    ):
        raise ProgramError("script_args must be a string or a list of strings without NUL characters")
    return Program(
        script if isinstance(script, str) else None,
        module if isinstance(module, str) else None,
        tuple(script_args),
        dict(env or {}),
    )


def _split(text: str) -> list[str]:
    if _REFERENCE not in text:
        return shlex.split(text)
    from nvflare.fuel.utils.secret_utils import split_command_preserving_secret_refs

    words: list[str] = split_command_preserving_secret_refs(text, posix=True)
    return words
