"""What a job says about starting its groups ahead of their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nvflare_torchrun_plugin.group_values import NodeGroupError, shown

DEFAULT_MAX_AGE = 3600.0
"""Seconds that a group may wait for its task: what its ranks have read, on the way, grows old."""


@dataclass(frozen=True)
class WarmStart:
    """The settings.

    Attributes:
        preload: names of modules that the ranks import before they wait; None: those that the script imports.
        max_age: seconds that a group may wait for its task.
    """

    preload: tuple[str, ...] | None = None
    max_age: float = DEFAULT_MAX_AGE

    @classmethod
    def parse(cls, value: object) -> WarmStart | None:
        """Return the settings, None when nothing is to be started ahead.

        Args:
            value: the executor's argument: false, true, or a mapping with ``preload`` and ``max_age``.

        Raises:
            NodeGroupError: it is none of them; the message names what is wrong, and its value.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if not isinstance(value, Mapping):
            raise NodeGroupError(
                f"warm_start is {shown(value)}: must be true, false, or a mapping with preload and max_age"
            )
        unknown = sorted(str(name) for name in set(value) - {"preload", "max_age"})
        if unknown:
            raise NodeGroupError(f"warm_start: unknown key {unknown[0]!r}; known are preload and max_age")
        return cls(_preload(value.get("preload")), _max_age(value.get("max_age", DEFAULT_MAX_AGE)))


def _preload(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(_is_module(name) for name in value):
        raise NodeGroupError(f"warm_start: preload is {shown(value)}: must be a list of names of modules")
    return tuple(value)


def _is_module(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


def _max_age(value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    raise NodeGroupError(f"warm_start: max_age is {shown(value)}: must be a number of seconds above 0")
