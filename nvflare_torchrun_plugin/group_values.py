"""Values of a node group's description, checked one by one, and the error that all of them raise."""

from __future__ import annotations

import difflib
import os
import re
import reprlib
from collections.abc import Mapping
from types import MappingProxyType

from nvflare_torchrun_plugin.contract import parse_integer

MAX_PROCESSES = 65536
"""Most processes per node: far above any host, so a number beyond it is a slip."""

# Set by the contract, by torchrun for each rank, or by NVFlare's Client API: another value breaks the group.
# torchrun reads PET_* as its own options.
_RESERVED_PREFIXES = ("NVFL_", "PET_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_RESERVED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CLIENT_API_TYPE",
    "NVFLARE_CLIENT_API_BOOTSTRAP",
)


class NodeGroupError(ValueError):
    """A node group, or what a job wants of it, is wrong.

    The message is one line: where, the key, its value (never that of an environment variable), what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


def check_keys(
    given: object,
    known: tuple[str, ...],
    where: str,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Mapping[str, object]:
    """Return ``given`` if it is a mapping with no other keys than ``known``.

    Args:
        hints: what to say of certain unknown keys; of others it is said which known one looks like them.

    Raises:
        NodeGroupError: it is not; the message begins with ``where``.
    """
    if not isinstance(given, Mapping):
        raise NodeGroupError(
            f"{where} is of type {type(given).__name__}: must be a mapping with the keys {', '.join(known)}"
        )
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1) if isinstance(key, str) else []
            hint = hints.get(key) or (f"did you mean {near[0]!r}?" if near else "")
            raise NodeGroupError(
                f"{where}: unknown key {shown(key)}: {hint or 'remove it'} (known keys: {', '.join(known)})"
            )
    return given


def parse_nproc_per_node(value: object, where: str) -> int | str | None:
    """Return a number of processes as an int, torchrun's word for one as it is, None for None.

    Args:
        where: the place and the name of the value, which messages begin with.

    Raises:
        NodeGroupError: it is neither.
    """
    if isinstance(value, str) and re.fullmatch("[a-z][a-z0-9_]*", value):
        return value
    number = integer_of(value)
    if value is None or (number is not None and 1 <= number <= MAX_PROCESSES):
        return number
    raise NodeGroupError(
        f"{where} is {shown(value)}: must be a number from 1 to {MAX_PROCESSES}, or one of torchrun's words"
        " such as 'auto', 'gpu' or 'cpu'"
    )


def parse_env(value: object, where: str) -> dict[str, str]:
    """Return environment variables for the ranks as a new dict, an empty one for None.

    Args:
        where: the place and the name of the value, which messages begin with.

    Raises:
        NodeGroupError: it is no mapping of names to strings, or a name belongs to the contract, to torchrun
            or to NVFlare's Client API. Values may be secret and are never shown.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise NodeGroupError(
            f"{where} is of type {type(value).__name__}: must be a mapping of variable names to strings"
        )
    for name, text in value.items():
        if not (isinstance(name, str) and re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name)):
            raise NodeGroupError(
                f"{where} has the name {shown(name)}: must be letters, digits and '_', no digit first"
            )
        if name in _RESERVED or name.startswith(_RESERVED_PREFIXES):
            raise NodeGroupError(
                f"{where} sets {name}, which this package, torchrun or NVFlare sets itself: remove it"
            )
        if not isinstance(text, str):
            raise NodeGroupError(
                f"{where}: the value of {name} is of type {type(text).__name__}: must be a string, put it in"
                " quotes"
            )
        if not _is_os_text(text):
            raise NodeGroupError(
                f"{where}: the value of {name} has a character that an environment variable cannot hold (NUL"
                " or half of a character pair): remove it"
            )
    return dict(value)


def host_name(value: object, where: str) -> str | None:
    """Return the name or address of a host, None for None.

    Raises:
        NodeGroupError: it cannot be one; the message begins with ``where``.
    """
    text = text_of(value, where, "the name or address of a host")
    # A transport's client takes a word that begins with '-' for an option.
    if text and (text.startswith("-") or " " in text or not text.isprintable()):
        raise NodeGroupError(f"{where} is {shown(text)}: must have no blanks and no '-' in front")
    return text


def text_of(value: object, where: str, what: str) -> str | None:
    """Return a string that is not empty and that a path can hold, None for None.

    Raises:
        NodeGroupError: it is anything else; the message begins with ``where`` and ends with ``what`` it is.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not value or not _is_os_text(value):
        raise NodeGroupError(f"{where} is {shown(value)}: must be a string, {what}")
    return value


def _is_os_text(text: str) -> bool:
    """Return whether a path or an environment variable can hold the text."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def integer_of(value: object) -> int | None:
    """Return an int as it is and one written as a string, as configuration tools do; None for all else."""
    if isinstance(value, str):
        try:
            return parse_integer(value)
        except ValueError:
            return None
    # To Python, True is an int.
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def shown(value: object) -> str:
    """Return the value for a message: as Python writes it, but short, on one line, and without what is in
    mappings, which may be environment variables."""
    try:
        return " ".join(_short.repr(value).splitlines())
    except ValueError:  # Python refuses to write integers of thousands of digits
        return f"a very large {type(value).__name__}"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120
_short.maxdict = 0
