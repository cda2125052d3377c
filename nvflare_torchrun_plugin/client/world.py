"""Where this process stands among the ranks that torchrun has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Ranks, from the variables that torchrun gives each of its processes.

    Attributes:
        rank: global rank.
        size: ranks of all nodes.
        local_rank: rank on this node; 0 is the node's first.
        local_size: ranks on this node.
        node_rank: this node.
        nnodes: nodes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    nnodes: int = 1

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> World:
        """Read the variables; a process that torchrun has not started is a world of its own.

        Raises:
            ValueError: they do not add up; the message names the variable and its value.
        """
        if "WORLD_SIZE" not in environ:
            return cls()
        size = _number(environ, "WORLD_SIZE", 1, None)
        local_size = _number(environ, "LOCAL_WORLD_SIZE", 1, size)
        nnodes = _number(environ, "GROUP_WORLD_SIZE", 1, size)
        return cls(
            rank=_number(environ, "RANK", 0, size - 1),
            size=size,
            local_rank=_number(environ, "LOCAL_RANK", 0, local_size - 1),
            local_size=local_size,
            node_rank=_number(environ, "GROUP_RANK", 0, nnodes - 1),
            nnodes=nnodes,
        )

    @property
    def leads_node(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None) -> int:
    text = environ.get(name)
    if text is None:
        raise ValueError(f"environment variable {name} is missing, though WORLD_SIZE is set; torchrun sets both")
    bound = f"from {least} to {most}" if most is not None else f"of at least {least}"
    if not (text.isascii() and text.isdigit()) or int(text) < least or (most is not None and int(text) > most):
        raise ValueError(f"environment variable {name} is {text!r}: must be a number {bound}")
    return int(text)
