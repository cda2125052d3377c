"""Bytes into lines: how they arrive must not matter, and characters stay whole."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin.node.lines import LineCutter


def cut(chunks: list[bytes], limit: int) -> list[str]:
    cutter = LineCutter(limit)
    lines = [line for chunk in chunks for line in cutter.feed(chunk)]
    return [*lines, *cutter.flush()]


STREAM = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bc", "é€😀".encode(), b"\xff", b"\x80\x80\x80"])
    | st.binary(max_size=8)
).map(b"".join)


@given(STREAM, st.lists(st.integers(0, 60)), st.integers(4, 12))
def test_chunks_do_not_change_the_lines(stream: bytes, cuts: list[int], limit: int) -> None:
    places = [0, *sorted(place for place in cuts if place <= len(stream)), len(stream)]
    chunks = [stream[start:end] for start, end in pairwise(places)]
    assert b"".join(chunks) == stream
    assert cut(chunks, limit) == cut([stream], limit)


@given(st.text(st.characters(codec="utf-8")), st.integers(4, 12))
def test_text_arrives_whole_in_pieces_within_the_limit(text: str, limit: int) -> None:
    lines = cut([text.encode()], limit)
    assert "".join(lines) == re.sub("[\r\n]", "", text)
    assert all(0 < len(line.encode()) <= limit for line in lines)


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"10%\r20%\rdone\n", ["10%", "20%", "done"]),
        (b"\n\n\r\n\r", []),
        (b"no end", ["no end"]),
        (b"bad \xff byte\n", ["bad \\xff byte"]),
        (b"form\x0cfeed \xc2\x85 \xe2\x80\xa8\n", ["form\x0cfeed \x85 \u2028"]),
    ],
)
def test_line_ends(stream: bytes, lines: list[str]) -> None:
    assert cut([stream], 100) == lines
    assert cut([stream[i : i + 1] for i in range(len(stream))], 100) == lines


def test_a_line_is_given_back_as_soon_as_it_is_whole() -> None:
    cutter = LineCutter(8)
    assert cutter.feed(b"one\ntwo") == ["one"]
    assert cutter.feed(b" more!!!") == ["two more"]
    assert cutter.feed(b"\n") == ["!!!"]
    assert cutter.flush() == []


@pytest.mark.parametrize("char", ["é", "€", "😀"])
@pytest.mark.parametrize("lead", range(4))
def test_the_limit_splits_no_character(char: str, lead: int) -> None:
    text = "a" * lead + char * 8
    assert "\\x" not in "".join(cut([text.encode()], 7))
    assert "".join(cut([text.encode()], 7)) == text


def test_bytes_that_are_no_characters_come_in_pieces_too() -> None:
    assert cut([b"\x80" * 10], 4) == ["\\x80"] * 6 + ["\\x80" * 4]
