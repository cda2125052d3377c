"""The contract: five ``NVFL_*`` environment variables that tell a node its place in the node group.

The names, the defaults and the meaning are NVFlare's (2.9, ``nvflare.app_opt.pt.torchrun_node``); NVFlare's
own launchers set them too. Standard library only, because the translator starts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NNODES = "NVFL_NNODES"
NODE_RANK = "NVFL_NODE_RANK"
MASTER_ADDR = "NVFL_MASTER_ADDR"
MASTER_PORT = "NVFL_MASTER_PORT"
RUN_ID = "NVFL_RUN_ID"

DEFAULT_MASTER_PORT = 29400


class ContractError(ValueError):
    """The contract is wrong. The message is one line: the variable, its value, the rule, what to do."""


@dataclass(frozen=True)
class Contract:
    """One node's place in its node group; always valid, however it was made.

    Raises:
        ContractError: a value breaks its rule, or one is missing that more than one node need.
    """

    nnodes: int = 1
    """Nodes in the group, at least 1."""

    node_rank: int = 0
    """This node's rank, from 0 to ``nnodes - 1``. Node rank 0 is the client job's host."""

    master_addr: str | None = None
    """Address of node rank 0: host name, IPv4, or IPv6 in brackets. Needed with more than one node; an empty
    one counts as none, as in NVFlare."""

    master_port: int = DEFAULT_MASTER_PORT
    """Port of the rendezvous on node rank 0, 1 to 65535."""

    run_id: str | None = None
    """Keeps one rendezvous apart from another. Needed with more than one node; empty counts as none."""

    def __post_init__(self) -> None:
        for name, number in (
            (NNODES, self.nnodes),
            (NODE_RANK, self.node_rank),
            (MASTER_PORT, self.master_port),
        ):
            # bool is an int to Python, but True nodes is a mistake.
            if not isinstance(number, int) or isinstance(number, bool):
                raise ContractError(f"{name} is {number!r}: must be an int, got {type(number).__name__}")
        for name, text in ((MASTER_ADDR, self.master_addr), (RUN_ID, self.run_id)):
            if not isinstance(text, str | None):
                raise ContractError(f"{name} is {text!r}: must be a str, got {type(text).__name__}")

        if self.nnodes < 1:
            raise ContractError(f"{NNODES} is {self.nnodes!r}: must be at least 1, set it to the number of nodes")
        if not 0 <= self.node_rank < self.nnodes:
            raise ContractError(
                f"{NODE_RANK} is {self.node_rank!r}: must be from 0 to {self.nnodes - 1}"
                f" because {NNODES} is {self.nnodes!r}, set it to this node's rank"
            )
        if not 1 <= self.master_port <= 65535:
            raise ContractError(
                f"{MASTER_PORT} is {self.master_port!r}: must be a port from 1 to 65535, choose one that is"
                " free on node rank 0"
            )
        self._need(MASTER_ADDR, self.master_addr, "set it to the address of node rank 0")
        self._need(RUN_ID, self.run_id, "set it to the same new text on all nodes of the group")
        # "" and None mean the same, so that equal contracts compare equal.
        object.__setattr__(self, "master_addr", self.master_addr or None)
        object.__setattr__(self, "run_id", self.run_id or None)
        if self.master_addr:
            _check_address(self.master_addr)
        if self.run_id and "\0" in self.run_id:
            raise ContractError(
                f"{RUN_ID} is {self.run_id!r}: an environment variable cannot hold a NUL character, remove it"
            )

    def _need(self, name: str, text: str | None, advice: str) -> None:
        if self.nnodes > 1 and not text:
            found = "is not set" if text is None else f"is {text!r}"
            raise ContractError(f"{name} {found}: needed because {NNODES} is {self.nnodes!r}, {advice}")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Contract:
        """Read the contract from environment variables; absent ones take their defaults.

        Raises:
            ContractError: a variable breaks its rule.
        """
        return cls(
            nnodes=_read_integer(environ, NNODES, 1),
            node_rank=_read_integer(environ, NODE_RANK, 0),
            master_addr=environ.get(MASTER_ADDR),
            master_port=_read_integer(environ, MASTER_PORT, DEFAULT_MASTER_PORT),
            run_id=environ.get(RUN_ID),
        )

    def to_environ(self) -> dict[str, str]:
        """Return the variables that :meth:`from_environ` reads back as this contract.

        The three numbers are always there, the address and the run id if they are known.
        """
        environ = {
            NNODES: str(self.nnodes),
            NODE_RANK: str(self.node_rank),
            MASTER_PORT: str(self.master_port),
        }
        if self.master_addr is not None:
            environ[MASTER_ADDR] = self.master_addr
        if self.run_id is not None:
            environ[RUN_ID] = self.run_id
        return environ


def parse_integer(text: str) -> int:
    """Return the number that plain decimal digits spell.

    An optional sign and surrounding whitespace are fine, as for Python's ``int()`` with which NVFlare reads
    its numbers. Underscores and digits of other scripts are not: no launcher writes them on purpose.

    Raises:
        ValueError: ``text`` is anything else, or longer than Python converts (4300 digits by default).
    """
    word = text.strip()
    digits = word[1:] if word.startswith(("+", "-")) else word
    if not (digits.isascii() and digits.isdigit()):
        raise ValueError(f"not an integer: {text!r}")
    return int(word)


def _read_integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return parse_integer(text)
    except ValueError:
        raise ContractError(
            f"{name} is {text!r}: must be an integer in decimal digits, correct it or unset it to get {default}"
        ) from None


def _check_address(address: str) -> None:
    """Refuse what torchrun cannot take as the host of ``--rdzv_endpoint=HOST:PORT``, or takes for another.

    torchrun allows letters, digits, ``_``, ``.``, ``-`` and IPv6 addresses in brackets (without a zone), and
    finds out in every node's log, seconds later.
    """

    def refuse(rule: str) -> ContractError:
        return ContractError(f"{MASTER_ADDR} is {address!r}: {rule}")

    if any(character.isspace() or not character.isprintable() for character in address):
        raise refuse("must have no whitespace or control characters, remove them")
    if address.startswith("[") and address.endswith("]"):
        if not _is_ipv6(address[1:-1]):
            raise refuse("what is in the brackets must be an IPv6 address without a zone, correct it")
    elif _is_ipv6(address):
        raise refuse(f"an IPv6 address must be in brackets, write '[{address}]'")
    elif ":" in address:
        raise refuse(f"must be a host without a port, put the port into {MASTER_PORT}")
    elif address.startswith("-") or not all(c.isalnum() or c in "._-" for c in address):
        raise refuse("must be a host name, an IPv4 address, or an IPv6 address in brackets, correct it")
    elif _is_dotted_quad(address) and any(int(part) > 255 for part in address.split(".")):
        raise refuse("each part of an IPv4 address must be at most 255, correct it")


def _is_ipv6(text: str) -> bool:
    if ":" not in text or "%" in text:
        return False
    # Imported here: most addresses are names or IPv4, and the translator's start is counted in milliseconds.
    from ipaddress import AddressValueError, IPv6Address

    try:
        IPv6Address(text)
    except AddressValueError:
        return False
    return True


def _is_dotted_quad(text: str) -> bool:
    parts = text.split(".")
    return len(parts) == 4 and all(part.isascii() and part.isdigit() for part in parts)
