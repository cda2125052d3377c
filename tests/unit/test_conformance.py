"""The same words give an equivalent torchrun command line here and in NVFlare's own translator."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nvflare.app_opt.pt.torchrun_node import build_torchrun_argv as build_nvflare_argv
from torch.distributed.run import get_args_parser

from nvflare_torchrun_plugin.node.inherited_environ import clean_environ
from nvflare_torchrun_plugin.torchrun_node import (
    TORCHRUN_OPTIONS,
    TORCHRUN_SHORT_OPTIONS,
    build_torchrun_argv,
)

INTERPRETER_WORDS = [sys.executable, "-u", "-m", "torch.distributed.run"]


@pytest.fixture(scope="module", autouse=True)
def _clean_environment() -> Iterator[None]:
    """torchrun's parser takes defaults from PET_* variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - clean_environ(os.environ).keys():
            patch.delenv(name)
        yield


def spelled(name: str, shortest: str, value: str) -> st.SearchStrategy[list[str]]:
    """All that argparse takes for an option: cut short as far as it stays unique, value inside or after."""
    names = st.integers(len(shortest), len(name)).map(lambda length: name[:length])
    return st.tuples(names, st.booleans()).map(
        lambda choice: [f"{choice[0]}={value}"] if choice[1] else [choice[0], value]
    )


def numbers(low: int, high: int) -> st.SearchStrategy[str]:
    forms: list[Callable[[int], str]] = [str, "+{}".format, "0{}".format, " {} ".format, "\t{}\n".format]
    return st.builds(lambda number, form: form(number), st.integers(low, high), st.sampled_from(forms))


# Surrogates stand for bytes of a command line that are not UTF-8; NUL cannot be in one.
texts = st.text(st.characters(exclude_characters="\0"), max_size=8)
nprocs = st.one_of(numbers(1, 64), st.sampled_from(["auto", "gpu", "cpu", "xpu", "hpu"]))
options = st.one_of(
    nprocs.flatmap(lambda value: spelled("--nproc-per-node", "--n", value)),
    numbers(1, 10**6).flatmap(lambda value: spelled("--join-timeout", "--j", value)),
)
plain_scripts = st.sampled_from(["train.py", "a b.py", "-", "-5", "-1.5", "-x y.py", "naïve.py", "a=b", "x\ny"])
dashed_scripts = st.sampled_from(["-m", "--tee", "--nproc-per-node=3", "-train.py", "--help", "a.py"])
script_words = st.one_of(
    texts,
    st.sampled_from(
        [
            "--",
            "--nnodes=3",
            "--nproc-per-node",
            "7",
            "-m",
            "-h",
            "--help",
            "--join-timeout=1",
            "--tee",
            "-t3",
            "",
        ]
    ),
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    given_options = [word for option in draw(st.lists(options, max_size=3)) for word in option]
    script = draw(plain_scripts.map(lambda s: [s]) | dashed_scripts.map(lambda s: ["--", s]))
    return given_options + script + draw(st.lists(script_words, max_size=4))


@st.composite
def contracts(draw: st.DrawFn) -> dict[str, str]:
    nnodes = draw(st.none() | st.integers(1, 5))
    environ = {}
    if nnodes is not None:
        environ["NVFL_NNODES"] = draw(numbers(nnodes, nnodes))
    count = nnodes or 1
    rank = draw(st.integers(0, count - 1))
    if rank or draw(st.booleans()):
        environ["NVFL_NODE_RANK"] = draw(numbers(rank, rank))
    if count > 1 or draw(st.booleans()):
        address = st.sampled_from(["gpu-0", "node_1.example.org.", "10.0.0.1", "[::1]", "[2001:db8::7]", "größe"])
        environ["NVFL_MASTER_ADDR"] = draw(address)
        environ["NVFL_RUN_ID"] = draw(texts.filter(bool))
    if draw(st.booleans()):
        environ["NVFL_MASTER_PORT"] = str(draw(st.integers(1, 65535)))
    return environ


def understood(argv: list[str]) -> Namespace:
    assert argv[:4] == INTERPRETER_WORDS
    return get_args_parser().parse_args(argv[4:])


@settings(max_examples=400)
@given(command_lines(), contracts())
@example(["--nproc", "2", "train.py", "--epochs", "2"], {})
@example(["--n=+2", "--j", "5", "--", "--help"], {"NVFL_NNODES": "1", "NVFL_MASTER_ADDR": ""})
@example(["train.py", "--", "--nnodes=2"], {})
@example(["--", "train.py", "--", "--nnodes=2"], {})
def test_equivalent_to_nvflares_translator(argv: list[str], environ: dict[str, str]) -> None:
    assert understood(build_torchrun_argv(argv, environ)) == understood(build_nvflare_argv(argv, environ))


def test_the_table_of_options_is_the_installed_torchruns() -> None:
    """Fails when torchrun gains, loses or changes an option: then torchrun_node.py must follow."""
    actions = [action for action in get_args_parser()._actions if action.option_strings]
    longs = {name: action.nargs != 0 for action in actions for name in action.option_strings if name[:2] == "--"}
    expected = dict(TORCHRUN_OPTIONS)
    expected.update({"--" + name[2:].replace("-", "_"): taken for name, taken in TORCHRUN_OPTIONS.items()})
    assert longs == expected
    shorts = {
        name: long
        for action in actions
        for name in action.option_strings
        if name[:2] != "--"
        for long in action.option_strings
        if long[:2] == "--"
    }
    assert shorts == TORCHRUN_SHORT_OPTIONS


# The words given to us, and what torchrun would have to be given directly where that differs: it takes every
# name that is cut short for ambiguous if it has a dash, because of the spelling with underscores.
PASSED: list[tuple[list[str], list[str] | None]] = [
    (["--tee", "3"], None),
    (["--tee=3"], None),
    (["-t3"], None),
    (["-t", "0:1,1:2"], None),
    (["-r=3"], None),
    (["-r", "-5"], None),
    (["--role", "-a b"], None),
    (["--log_dir", "/a b"], None),
    (["--log-dir=/a b"], None),
    (["--log-d=/a=b"], ["--log-dir=/a=b"]),
    (["--local-r", "0"], ["--local-ranks-filter", "0"]),
    (["--duplicate-stdout_filters", "x"], ["--duplicate-stdout-filters", "x"]),
    (["--monitor=1.5"], ["--monitor-interval=1.5"]),
    (["--mod"], None),
    (["-m"], None),
    (["--no-"], ["--no-python"]),
    (["--numa-binding", "node"], None),
    (["--local-addr", "127.0.0.1"], None),
    (["--virtual", "--run_path"], ["--virtual-local-rank", "--run-path"]),
]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PASSED), max_size=4), st.lists(script_words, max_size=3), st.booleans())
def test_torchruns_own_options_arrive(
    passed: list[tuple[list[str], list[str] | None]], args: list[str], dashes: bool
) -> None:
    """torchrun understands them as if they had been written to it directly."""
    words = [word for ours, _ in passed for word in ours]
    direct = [word for ours, theirs in passed for word in theirs or ours]
    command = [*(["--"] if dashes else []), "train.py", *args]
    argv = build_torchrun_argv([*words, "--nproc-per-node=2", *command], {})
    assert argv[-len(command) :] == command
    torchrun_argv = [*INTERPRETER_WORDS, "--nproc-per-node=2", "--standalone", *direct, *command]
    assert understood(argv) == understood(torchrun_argv)
