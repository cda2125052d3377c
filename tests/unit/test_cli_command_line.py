"""Which words after a verb are its own, which are torchrun's, and where the script begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin import torchrun_node
from nvflare_torchrun_plugin.cli.command_line import split

OURS = {"--nodes": True, "--nproc-per-node": True, "--copy": False}

MINE = st.sampled_from([["--nodes", "a,b"], ["--nodes=--x"], ["--nproc-per-node", "-1"], ["--copy"]])
THEIRS = st.sampled_from(
    [["--tee", "3"], ["-m"], ["--log-dir=x"], ["-t", "3"], ["-t3"], ["--local-ranks-filter", "0"]]
)
OPTIONS = st.lists(st.one_of(st.tuples(st.just(True), MINE), st.tuples(st.just(False), THEIRS)))
COMMAND = st.lists(st.sampled_from(["train.py", "--nodes", "--copy", "-m", "--", "a b", ""])).map(
    lambda words: ["train.py", *words]
)


@given(OPTIONS, COMMAND, st.booleans())
def test_options_in_any_order_are_told_apart(
    options: list[tuple[bool, list[str]]], command: list[str], marked: bool
) -> None:
    command = ["--", *command] if marked else command
    words = [word for _, option in options for word in option] + command
    mine, theirs = split(words, OURS)
    assert mine == [word for ours, option in options for word in option if ours]
    assert theirs == [word for ours, option in options for word in option if not ours] + command


def test_torchruns_underscores_are_understood() -> None:
    assert split(["--nproc_per_node=2", "--log_dir", "x", "a_b.py", "--lr_x"], OURS) == (
        ["--nproc-per-node=2"],
        ["--log_dir", "x", "a_b.py", "--lr_x"],
    )


def test_an_option_of_neither_is_named() -> None:
    with pytest.raises(torchrun_node.UsageError, match=r"option '--wrong' is not known"):
        split(["--copy", "--wrong", "train.py"], OURS)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--nproc-pernode", ", did you mean --nproc-per-node?"),  # the verb's own
        ("--copie", ", did you mean --copy?"),
        ("--log_dirs=x", ", did you mean --log-dir?"),  # torchrun's
        ("--wrong", ""),
        ("-y", ""),
    ],
)
def test_who_has_misspelt_an_option_is_told_which_one_looks_like_it(word: str, meant: str) -> None:
    with pytest.raises(torchrun_node.UsageError) as caught:
        split([word, "2", "train.py"], OURS)
    assert str(caught.value).startswith(f"option {word!r} is not known here or to torchrun{meant}: see --help")


@given(st.lists(st.text(alphabet="-=amtn_ 1", max_size=6)))
def test_no_word_is_lost_or_made_up(words: list[str]) -> None:
    try:
        mine, theirs = split(words, OURS)
    except torchrun_node.UsageError:
        return
    assert sorted("".join(mine + theirs)) == sorted("".join(words).replace("_", "-")) or "_" in "".join(words)
    assert len(mine) + len(theirs) == len(words)
