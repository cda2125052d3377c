"""What all schedulers' variables have to be; what is not is an error that shows it."""

from __future__ import annotations

from collections.abc import Mapping

from nvflare_torchrun_plugin.group_values import MAX_PROCESSES, NodeGroupError, host_name, integer_of, shown
from nvflare_torchrun_plugin.schedulers.found import MAX_HOSTS


def host(text: str, where: str) -> str:
    """Return the text when it is a host's name."""
    host_name(text, where)
    return text


def distinct(names: list[str], where: str) -> list[str]:
    """Return the names when they are at least one, not too many, and each a host's and there once."""
    if not names:
        raise NodeGroupError(f"{where} has no host: correct it")
    if len(names) > MAX_HOSTS:
        raise NodeGroupError(f"{where} has {len(names)} hosts: must be at most {MAX_HOSTS}, ask for fewer")
    seen: set[str] = set()
    for name in names:
        host(name, f"{where} host")
        # Case says nothing in a host's name (RFC 4343).
        if name.lower() in seen:
            raise NodeGroupError(f"{where} has host {shown(name)} twice: correct it")
        seen.add(name.lower())
    return names


def index_zero(environ: Mapping[str, str], name: str, first: str) -> None:
    """Check that this process is the first of its group."""
    index = integer(required(environ, name), name, 0, 2**31)
    if index:
        raise NodeGroupError(f"{name} is {index}: the client must run as {first} of the group, start it there")


def required(environ: Mapping[str, str], name: str, at: str = "") -> str:
    """Return the variable, which must be set; ``at`` says where a person sets it."""
    if name not in environ:
        raise NodeGroupError(f"{name} is not set: set it{at}, or name the nodes")
    return environ[name]


def optional(environ: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """Return the variable's number, None where it is not set."""
    text = environ.get(name)
    return None if text is None else integer(text, name, least, most)


def integer(text: str, where: str, least: int, most: int) -> int:
    """Return the number that the text is."""
    number = integer_of(text)
    if number is None or not least <= number <= most:
        raise NodeGroupError(f"{where} is {shown(text)}: must be a number from {least} to {most}, correct it")
    return number


def agree(environ: Mapping[str, str], name: str, counted: int, what: str) -> None:
    """Check that the variable, where it is set, is the number that was counted."""
    number = optional(environ, name, 1, MAX_HOSTS * MAX_PROCESSES)
    if number not in (None, counted):
        raise NodeGroupError(f"{name} is {number}, but {what}: leave both as the scheduler sets them")


def job(environ: Mapping[str, str], name: str) -> str:
    """The job's id and a blank for a sentence, nothing where it is not known."""
    return f"{bare(environ[name])} " if name in environ else ""


def bare(text: str) -> str:
    """The text as :func:`shown` has it, without the quotes."""
    return shown(text)[1:-1]
