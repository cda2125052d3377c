"""Orders and frames: every message survives the way, and whatever else arrives is refused and nothing worse."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin import wire

ANY_TEXT = st.text(st.characters(codec=None), max_size=40)  # lone surrogates included
INT = st.integers(-(2**70), 2**70)
SECONDS = st.floats(0, 1e9)
TEXTS = st.lists(ANY_TEXT, max_size=4).map(tuple)

ORDERS: st.SearchStrategy[wire.Order] = st.one_of(
    st.builds(
        wire.Start,
        tag=ANY_TEXT,
        argv=TEXTS,
        env=st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=4),
        cwd=ANY_TEXT,
        module=st.booleans(),
        target=ANY_TEXT,
        args=TEXTS,
        bootstrap=st.none() | ANY_TEXT,
        grace=SECONDS,
        holds=st.booleans(),
        preload=TEXTS,
    ),
    st.builds(wire.Go, st.dictionaries(ANY_TEXT, ANY_TEXT, max_size=4), st.none() | ANY_TEXT),
    st.builds(wire.Prepare, st.none() | ANY_TEXT, ANY_TEXT, ANY_TEXT, SECONDS, SECONDS),
    st.builds(wire.Stage, ANY_TEXT, ANY_TEXT),
    st.just(wire.Ping()),
    st.builds(wire.Signal, INT),
    st.builds(wire.Stop, SECONDS, st.booleans()),
    st.builds(wire.Sweep, ANY_TEXT),
)
FRAMES: st.SearchStrategy[wire.Frame] = st.one_of(
    st.builds(
        wire.Hello,
        version=ANY_TEXT,
        torch=st.none() | ANY_TEXT,
        nvflare=st.none() | ANY_TEXT,
        python=ANY_TEXT,
        host=ANY_TEXT,
        pid=INT,
        cores=INT,
        gpus=st.none() | INT,
        at=SECONDS,
    ),
    st.builds(wire.Ready, st.booleans(), *(st.none() | ANY_TEXT,) * 3),
    st.builds(wire.Staged, ANY_TEXT),
    st.just(wire.Beat()),
    st.builds(wire.RankUp, INT, INT, INT),
    st.builds(wire.Warm, INT, INT, TEXTS),
    st.builds(wire.Moment, INT, ANY_TEXT, SECONDS),
    st.builds(wire.Line, st.none() | INT, ANY_TEXT),
    st.builds(wire.RankError, INT, ANY_TEXT, SECONDS, st.booleans()),
    st.builds(wire.Halt, INT, SECONDS),
    st.builds(wire.RankEnd, INT, st.none() | INT, SECONDS, st.booleans(), INT),
    st.builds(
        wire.End,
        st.none() | INT,
        st.lists(INT, max_size=4).map(tuple),
        st.none() | ANY_TEXT,
        SECONDS,
        st.booleans(),
    ),
)
JSON: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | INT | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=6,
)
DECODERS: list[Callable[[bytes], object]] = [wire.decode_order, wire.decode_frame]


@given(ORDERS)
def test_an_order_survives_the_way(order: wire.Order) -> None:
    line = wire.encode(order)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode_order(line) == order
    with pytest.raises(wire.WireError):
        wire.decode_frame(line)


@pytest.mark.parametrize(
    ("values", "named"), [((), {}), ((1.0, True, 3.0), {}), ((1.0,), {"secret": "hidden"}), ((), {"stacks": True})]
)
def test_a_message_has_its_fields_and_no_others(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"Stop has the fields \['grace', 'stacks'\]") as raised:
        wire.Stop(*values, **named)
    assert "hidden" not in str(raised.value)


def test_messages_are_equal_by_kind_and_fields() -> None:
    assert wire.Stop(1.0) == wire.Stop(grace=1.0, stacks=False)
    assert wire.Stop(1.0) != wire.Stop(2.0)
    assert wire.Ping() != wire.Beat()


@given(FRAMES)
def test_a_frame_survives_the_way(frame: wire.Frame) -> None:
    line = wire.encode(frame)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode_frame(line) == frame
    with pytest.raises(wire.WireError):
        wire.decode_order(line)


def _accept_or_refuse(line: bytes) -> None:
    for decode in DECODERS:
        try:
            message = decode(line)
        except wire.WireError:
            continue
        assert isinstance(message, (wire.Order, wire.Frame))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(line: bytes) -> None:
    _accept_or_refuse(line)


@given(ORDERS | FRAMES, st.data())
def test_a_damaged_message_is_a_message_or_a_wire_error(
    message: wire.Order | wire.Frame, data: st.DataObject
) -> None:
    """One value replaced by something else, then one byte."""
    keys = json.loads(wire.encode(message))
    keys[data.draw(st.sampled_from(sorted(keys)))] = data.draw(JSON)
    line = bytearray(json.dumps(keys).encode())
    _accept_or_refuse(bytes(line))
    line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    _accept_or_refuse(bytes(line))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"Last login: Monday\n", "not a line of JSON"),
        (b"[" * 100_000, "not a line of JSON"),
        (b'{"kind": "stop", "grace": ' + b"9" * 5000 + b"}", "not a line of JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"grace": 1}', "kind is None, expected one of prepare, stage, ping, start, go, signal, stop, sweep"),
        (
            b'{"kind": ["stop"], "grace": 1}',
            "kind is ['stop'], expected one of prepare, stage, ping, start, go, signal, stop, sweep",
        ),
        (b'{"kind": "stop"}', "stop: grace is missing"),
        (b'{"kind": "stop", "grace": true}', "stop: grace must be float, got bool"),
        (b'{"kind": "stop", "grace": -1}', "stop: grace must be float, got int"),
        (b'{"kind": "stop", "grace": NaN}', "stop: grace must be float, got float"),
        (b'{"kind": "stop", "grace": Infinity}', "stop: grace must be float, got float"),
        (b'{"kind": "sweep", "tag": "x", "now": 1}', "sweep: unknown key 'now'"),
        (b'{"kind": "sweep", "tag": 5}', "sweep: tag must be str, got int"),
    ],
)
def test_what_is_wrong_is_named(line: bytes, message: str) -> None:
    with pytest.raises(wire.WireError) as caught:
        wire.decode_order(line)
    assert str(caught.value) == message


def test_a_grace_too_large_for_a_clock_is_refused() -> None:
    with pytest.raises(wire.WireError, match="grace must be float"):
        wire.decode_order(b'{"kind": "stop", "grace": 1' + b"0" * 400 + b"}")


def test_a_full_line_of_control_characters_fits_a_message() -> None:
    assert len(wire.encode(wire.Line(2**31, "\x01" * wire.MAX_TEXT))) <= wire.MAX_MESSAGE
