"""What is said before the first order: whatever else arrives is told apart, and nothing of it is believed."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvflare_torchrun_plugin.joining import greeting
from nvflare_torchrun_plugin.joining.greeting import Greeting, GreetingError

NODE = Greeting(proof="ab" * 32, node_rank=1, names=("n2", "n2.cluster"), run_id="77", instance="i-1", pid=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=9), inner, max_size=6),
    max_leaves=8,
)


@pytest.mark.parametrize("node", [NODE, replace(NODE, node_rank=None, run_id=None, names=("n",))])
def test_what_a_node_says_is_what_arrives(node: Greeting) -> None:
    assert Greeting.decode(node.encode()) == node


@given(st.binary(max_size=200))
@example(b"")
@example(b"\n")
@example(b"GET / HTTP/1.1\r\n")
@example(b"[" * 4000 + b"\n")
@example(b"{}\n")
@example(NODE.encode()[:-1])
@example(NODE.encode().replace(b" ", b" " * 4096, 1))
def test_noise_is_no_greeting_and_no_word(line: bytes) -> None:
    with pytest.raises(GreetingError):
        Greeting.decode(line)
    with pytest.raises(GreetingError):
        greeting.read_word(line)


@given(st.sampled_from(sorted(asdict(NODE))), VALUES)
@example("names", [])
@example("names", ["a"] * 5)
@example("names", ["\n"])
@example("node_rank", True)
@example("node_rank", -1)
@example("pid", None)
@example("proof", "")
@example("run_id", "x" * 257)
def test_a_field_is_right_or_refused(field: str, value: Any) -> None:
    line = json.dumps({**asdict(NODE), field: value}).encode() + b"\n"
    try:
        node = Greeting.decode(line)
    except GreetingError:
        return
    # What got in is one line of a log, a small number, or nothing.
    said = getattr(node, field)
    for text in said if field == "names" else (said,):
        assert text is None or isinstance(text, int) or (text.isprintable() and 0 < len(text) <= 256)
    assert Greeting.decode(node.encode()) == node


@pytest.mark.parametrize("field", sorted(asdict(NODE)))
def test_no_field_may_be_missing_and_none_may_be_more(field: str) -> None:
    said = asdict(NODE)
    del said[field]
    for changed in (said, {**asdict(NODE), "more": 1}):
        with pytest.raises(GreetingError):
            Greeting.decode(json.dumps(changed).encode() + b"\n")


@pytest.mark.parametrize("kind", greeting.WORDS)
def test_words(kind: str) -> None:
    assert greeting.read_word(greeting.word(kind, "text é")) == (kind, "text é")


@pytest.mark.parametrize("said", [{}, {"go": ""}, {"start": 1}, {"start": "", "leave": ""}, [], "start"])
def test_what_is_no_word(said: object) -> None:
    with pytest.raises(GreetingError):
        greeting.read_word(json.dumps(said).encode() + b"\n")


def test_a_proof_is_for_one_nonce_one_certificate_and_one_secret() -> None:
    proofs = {greeting.proof(s, n, f) for s in (b"1", b"2") for n in ("n", "m") for f in ("f", "g")}
    assert len(proofs) == 8


def test_the_end_is_in_no_frame() -> None:
    assert greeting.END not in json.dumps("".join(map(chr, range(0x300)))).encode()
