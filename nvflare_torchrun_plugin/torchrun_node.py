"""The translator: turns the contract in the environment into a torchrun command line, and becomes torchrun.

    python -m nvflare_torchrun_plugin.torchrun_node [options] SCRIPT [ARGS...]

Takes what ``nvflare.app_opt.pt.torchrun_node`` (NVFlare 2.9) takes, and torchrun's own options besides. It
imports neither torch nor nvflare, so it costs an interpreter start and nothing more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from nvflare_torchrun_plugin.contract import (
    MASTER_ADDR,
    MASTER_PORT,
    NNODES,
    NODE_RANK,
    RUN_ID,
    Contract,
    ContractError,
    parse_integer,
)
from nvflare_torchrun_plugin.node.cores import allotted_cores, count_processes
from nvflare_torchrun_plugin.node.inherited_environ import clean_environ

DEFAULT_JOIN_TIMEOUT = 600
"""Seconds that a node waits for the others."""

USAGE = f"""\
usage: python -m nvflare_torchrun_plugin.torchrun_node [options] SCRIPT [ARGS...]

Runs SCRIPT under torchrun as this node's part of a node group. The group is read from {NNODES},
{NODE_RANK}, {MASTER_ADDR}, {MASTER_PORT} and {RUN_ID}; without them it is this node alone.

options:
  -h, --help            show this text and end
  --nproc-per-node N    processes on this node: a number, auto, gpu, cpu, ... (default: auto)
  --join-timeout S      seconds to wait for the other nodes (default: {DEFAULT_JOIN_TIMEOUT})

torchrun's own options (-m, --tee, --log-dir, --local-ranks-filter, ...) are passed on to it, except
those that the group decides: --nnodes, --node-rank, --rdzv-*, --master-*, --standalone, and
--max-restarts with more than one node.
"""

_NPROC = "--nproc-per-node"
_JOIN = "--join-timeout"

_FLAGS = "standalone module no-python run-path virtual-local-rank help"
_WITH_VALUE = (
    "nnodes nproc-per-node node-rank local-addr master-addr master-port rdzv-backend rdzv-endpoint rdzv-id"
    " rdzv-conf max-restarts monitor-interval start-method event-log-handler role log-dir redirects tee"
    " local-ranks-filter duplicate-stdout-filters duplicate-stderr-filters logs-specs numa-binding"
    " signals-to-handle shutdown-timeout"
)
TORCHRUN_OPTIONS = {
    **{f"--{name}": False for name in _FLAGS.split()},
    **{f"--{name}": True for name in _WITH_VALUE.split()},
}
"""torchrun's options (torch 2.13) and whether each takes a value: only so is it known where the options end
and SCRIPT begins. torchrun takes ``_`` for ``-`` in them as well."""

TORCHRUN_SHORT_OPTIONS = {"-h": "--help", "-m": "--module", "-r": "--redirects", "-t": "--tee"}
"""torchrun's short options and what they are short for."""

_OPTIONS = {**TORCHRUN_OPTIONS, _JOIN: True}

_REFUSED = {
    "--nnodes": f"the number of nodes comes from {NNODES}",
    "--node-rank": f"the node rank comes from {NODE_RANK}",
    "--master-addr": f"the address of node rank 0 comes from {MASTER_ADDR}",
    "--master-port": f"the port of node rank 0 comes from {MASTER_PORT}",
    "--rdzv-endpoint": f"the rendezvous comes from {MASTER_ADDR} and {MASTER_PORT}",
    "--rdzv-id": f"the rendezvous id comes from {RUN_ID}",
    "--rdzv-backend": "only the static rendezvous gives each node the rank that the group says",
    "--rdzv-conf": f"the rendezvous is configured by {_JOIN}",
    "--standalone": f"it is chosen whenever {NNODES} is 1 or not set",
}
_ALIKE = 0.75
"""How much alike, from 0 to 1, a wrong option and one that may be meant are; less than that would only puzzle."""
_NO_RESTARTS = "torchrun cannot restart its processes when there is more than one node"


class UsageError(ValueError):
    """The command line is wrong. The message is one line: the option, its value, the rule, what to do."""


@dataclass
class CommandLine:
    """The translator's words, told apart."""

    nproc_per_node: str = "auto"
    join_timeout: int = DEFAULT_JOIN_TIMEOUT
    torchrun_options: list[str] = field(default_factory=list)
    """The words to pass on to torchrun, in order."""
    names: list[str] = field(default_factory=list)
    """The full names of all options that were given."""
    command: list[str] = field(default_factory=list)
    """SCRIPT and ARGS; a ``--`` before them stays, so that torchrun finds the same SCRIPT."""


def build_torchrun_argv(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the torchrun command line for this node, starting with this interpreter.

    Args:
        argv: options, SCRIPT and its arguments, without the program's name.
        environ: the environment with the contract in it; nothing else is read from it.

    Raises:
        UsageError: ``argv`` is wrong.
        ContractError: a contract variable is wrong.
        SystemExit: ``--help`` was asked for and has been printed.
    """
    return _to_torchrun(_parse_or_help(argv), Contract.from_environ(environ))


def check_options(options: Sequence[str]) -> None:
    """Check that these words are only torchrun options which may be given beside a contract.

    For the executor: it adds SCRIPT, the number of processes and the join timeout itself, on however many
    nodes.

    Raises:
        UsageError: a word is not an option of torchrun, contradicts the contract, or says what to run.
    """
    if isinstance(options, str):
        raise UsageError(f"torchrun options are {options!r}: must be a list, one word of the command line each")
    for word in options:
        if not isinstance(word, str) or "\0" in word:
            raise UsageError(f"torchrun option {word!r}: must be a string without NUL characters, correct it")
    line = parse(options)
    if line.command:
        raise UsageError(
            f"torchrun option {line.command[0]!r}: not an option, remove it from the torchrun options"
        )
    for name in line.names:
        if name in (_NPROC, _JOIN):
            raise UsageError(f"torchrun option {name}: has an argument of its own, use that")
        if name in ("--help", "--module", "--no-python", "--run-path"):
            raise UsageError(
                f"torchrun option {name}: says what to run and how, which is not a torchrun option here"
            )
    _refuse(line, more_nodes=True)


def main() -> None:
    """Become torchrun. Bad input: one line on stderr, exit code 2, nothing started."""
    try:
        line = _parse_or_help(sys.argv[1:])
        torchrun_argv = _to_torchrun(line, Contract.from_environ(os.environ))
        environ = clean_environ(os.environ)
        if "OMP_NUM_THREADS" not in environ:
            # torchrun would set 1 for each of several processes, however many cores there are.
            processes = count_processes(line.nproc_per_node, environ)
            if processes is not None:
                environ["OMP_NUM_THREADS"] = str(max(1, allotted_cores() // processes))
        os.execve(sys.executable, torchrun_argv, environ)  # noqa: S606 - becoming torchrun is the purpose
    except (UsageError, ContractError) as error:
        message = str(error)
    except OSError as error:
        message = f"cannot start {sys.executable!r}: {error.strerror}"
    sys.stderr.write(f"torchrun_node: {message}\n")
    raise SystemExit(2)


def _parse_or_help(argv: Sequence[str]) -> CommandLine:
    line = parse(argv)
    if "--help" in line.names:
        sys.stdout.write(USAGE)
        sys.stdout.flush()
        raise SystemExit(0)
    return line


def takes_another_word(word: str, besides: Collection[str] = ()) -> bool:
    """Return whether the value of this option is the next word.

    Args:
        word: the option as it is written.
        besides: other options that there are, for who has misspelt one.

    Raises:
        UsageError: it is no option of the translator's or of torchrun's.
    """
    name, value, _ = _read_option(word, besides)
    return value is None and _OPTIONS[name]


def parse(argv: Sequence[str]) -> CommandLine:
    """Split the words into options and command, where argparse does it for torchrun and for NVFlare.

    Raises:
        UsageError: an option is wrong; whether the contract allows it is not looked at.
    """
    line = CommandLine()
    words = list(argv)
    while words and words[0] != "--" and _is_option(words[0]):
        word = words.pop(0)
        name, value, taken = _read_option(word)
        line.names.append(name)
        if name == "--help":
            return line
        if value is None and _OPTIONS[name]:
            if not words or words[0] == "--" or _is_option(words[0]):
                raise UsageError(f"option {word!r} has no value: put one after it")
            value = words.pop(0)
            taken.append(value)
        if name == _NPROC:
            line.nproc_per_node = _check_nproc(value or "")
        elif name == _JOIN:
            line.join_timeout = _check_join_timeout(value or "")
        else:
            line.torchrun_options += taken
    line.command = words
    return line


def _is_option(word: str) -> bool:
    """Whether argparse takes the word for an option: ``-``, ``-5`` and unknown ones with a space are not."""
    if not word.startswith("-") or word == "-" or _is_negative_number(word):
        return False
    return " " not in word or bool(_candidates(word))


def _is_negative_number(word: str) -> bool:
    whole, point, fraction = word[1:].partition(".")
    if point:
        return fraction.isdecimal() and (not whole or whole.isdecimal())
    return whole.isdecimal()


def _candidates(word: str) -> list[str]:
    """Return the full names of the options that the word may mean: it may be cut short and have a value."""
    if not word.startswith("--"):
        return [TORCHRUN_SHORT_OPTIONS[word[:2]]] if word[:2] in TORCHRUN_SHORT_OPTIONS else []
    start = word.partition("=")[0].replace("_", "-")
    if start in _OPTIONS:
        return [start]
    # NVFlare's translator has these two only, so "--n 2" is enough for it.
    ours = [name for name in (_NPROC, _JOIN) if name.startswith(start)]
    return ours or [name for name in _OPTIONS if name.startswith(start)]


def _like(word: str, besides: Collection[str]) -> str:
    # Imported for who has made a mistake only: every node starts this file.
    import difflib

    names = [*besides, *(name for name in _OPTIONS if name not in _REFUSED)]
    near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), names, 1, _ALIKE)
    return f", did you mean {near[0]}?" if near else ""


def _read_option(word: str, besides: Collection[str] = ()) -> tuple[str, str | None, list[str]]:
    """Return an option's full name, the value inside the word if there is one, and the words for torchrun."""
    names = _candidates(word)
    if not names:
        raise UsageError(
            f"option {word!r} is not known here or to torchrun{_like(word, besides)}: see --help, and put --"
            " before a SCRIPT that starts with a dash"
        )
    if len(names) > 1:
        raise UsageError(f"option {word!r} can mean {', '.join(names)}: write it out")
    name = names[0]
    if word.startswith("--"):
        given, equals, text = word.partition("=")
        value = text if equals else None
        # Names that were cut short are written out: which are unique depends on torch's version.
        known = given in (name, "--" + name[2:].replace("-", "_"))
        taken = (given if known else name) + equals + text
    else:
        value = word[2:].removeprefix("=") if len(word) > 2 else None
        taken = word
    if value is not None and not _OPTIONS[name]:
        raise UsageError(f"option {word!r} takes no value: write only {name}")
    return name, value, [taken]


def _check_nproc(text: str) -> str:
    # torchrun knows the words of the devices that this torch supports, also those of extensions.
    if text.isascii() and text.isalpha():
        return text
    try:
        number = parse_integer(text)
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{_NPROC} is {text!r}: must be a number of at least 1, auto, gpu, cpu or another device")
    return text


def _check_join_timeout(text: str) -> int:
    try:
        seconds = parse_integer(text)
    except ValueError:
        seconds = 0
    if seconds < 1:
        raise UsageError(f"{_JOIN} is {text!r}: must be a positive integer, the seconds to wait for other nodes")
    return seconds


def _refuse(line: CommandLine, more_nodes: bool) -> None:
    for name in line.names:
        reason = _NO_RESTARTS if name == "--max-restarts" and more_nodes else _REFUSED.get(name)
        if reason:
            raise UsageError(f"option {name} is refused: {reason}; remove it")


def _to_torchrun(line: CommandLine, contract: Contract) -> list[str]:
    _refuse(line, more_nodes=contract.nnodes > 1)
    script = next((word for word in line.command if word != "--"), None)
    if not script:
        found = "is missing" if script is None else f"is {script!r}"
        raise UsageError(f"SCRIPT {found}: name the training script after the options")
    argv = [sys.executable, "-u", "-m", "torch.distributed.run", f"--nproc_per_node={line.nproc_per_node}"]
    if contract.nnodes == 1:
        argv.append("--standalone")
    else:
        argv += [
            f"--nnodes={contract.nnodes}",
            f"--node_rank={contract.node_rank}",
            # The elastic backends hand out ranks as nodes arrive. Global rank 0 must be on node rank 0:
            # only there can it talk to the client job.
            "--rdzv_backend=static",
            f"--rdzv_endpoint={contract.master_addr}:{contract.master_port}",
            f"--rdzv_id={contract.run_id}",
            f"--rdzv_conf=timeout={line.join_timeout}",
        ]
    return argv + line.torchrun_options + line.command


if __name__ == "__main__":
    main()
