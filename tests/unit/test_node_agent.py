"""The node agent as a real process, given orders that are none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from standins import BOUND, children, until

from nvflare_torchrun_plugin import node_agent, wire
from nvflare_torchrun_plugin.node import agent_dir, procs

START = wire.Start("tag", ("--help",), {}, "/", False, "script.py", (), None, 0.2, False, ())
ORDERS: list[wire.Order] = [START, wire.Stop(1), wire.Go({}, None), wire.Sweep("tag")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR; nothing may be left in it, and no process."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    before = children()
    yield tmp_path
    until(lambda: children() <= before, "processes are left")
    assert procs.with_variable(agent_dir.DIR_VARIABLE, str(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def serve(orders: bytes) -> list[wire.Frame]:
    """Return the frames of an agent that gets these bytes and then no more; it must not print anything else."""
    done = subprocess.run(
        node_agent.command(sys.executable), input=orders, capture_output=True, timeout=BOUND, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    # Whatever a login shell has left on the line before ends with it.
    assert done.stdout.startswith(b"\n")
    return [wire.decode_frame(line) for line in done.stdout.splitlines()[1:]]


def refusal(orders: bytes) -> str:
    """Return the error of an agent that must have started nothing."""
    hello, last = serve(orders)
    assert isinstance(hello, wire.Hello)
    assert isinstance(last, wire.End)
    assert last.code is None
    assert last.leftovers == ()
    assert last.error
    return last.error


def test_a_sign_of_life_is_answered_by_one(folder: Path) -> None:
    assert serve(wire.encode(wire.Ping()) * 2)[1:-1] == [wire.Beat(), wire.Beat()]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["kind", "grace", "tag"]), inner),
    max_leaves=6,
)


def is_no_order(line: bytes) -> bool:
    try:
        wire.decode_order(line)
    except wire.WireError:
        return True
    return False


@st.composite
def damaged_orders(draw: st.DrawFn) -> bytes:
    keys: dict[str, Any] = json.loads(wire.encode(draw(st.sampled_from(ORDERS))))
    keys[draw(st.sampled_from([*keys, "other"]))] = draw(JSON)
    return json.dumps(keys).encode()


LINES = st.binary(max_size=100).map(lambda data: data.replace(b"\n", b"")) | damaged_orders()


@settings(max_examples=10)
@given(LINES.filter(is_no_order), st.lists(LINES, max_size=2))
@example(b"", [])
@example(b"[" * 100_000, [])
@example(b"\xff", [wire.encode(START)[:-1]])
@example(b'{"kind": "stop", "grace": 1e999}', [])
def garbage_is_refused(first: bytes, more: list[bytes]) -> None:
    assert refusal(b"\n".join([first, *more, b""])).isprintable()


@pytest.mark.hypothesis
def test_garbage_ends_the_agent_and_starts_nothing(folder: Path) -> None:
    garbage_is_refused()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"cwd": "/no/such"}, "there is no directory '/no/such', in which the ranks work"),
        ({"cwd": "\0"}, "there is no directory '\\x00'"),
        ({"argv": ["\0"]}, "embedded null"),
        ({"argv": ["x" * (1 << 20)]}, "[Errno 7] Argument list too long"),
        ({"env": {"A=B": ""}}, "illegal environment variable name"),
        ({"env": {"A": "\ud800"}}, "surrogates not allowed"),
        ({"env": {"TMPDIR": "\0"}}, "embedded null"),
        ({"tag": "no/such"}, "No such file or directory"),
        ({"tag": "\0"}, "embedded null"),
        ({"bootstrap": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_a_start_that_cannot_be_done_is_an_error(folder: Path, change: dict[str, Any], error: str) -> None:
    keys = {**json.loads(wire.encode(START)), **change}
    assert error in refusal(json.dumps(keys).encode() + b"\n")


def test_a_word_to_go_on_before_anything_was_started_is_an_error(folder: Path) -> None:
    assert refusal(wire.encode(wire.Go({}, None))) == "go: nothing has been started"


@pytest.mark.parametrize("tag", ["\0", "\ud800", "no/such", "*", "../x"])
def test_a_sweep_of_an_odd_tag_ends_nothing_else(folder: Path, tag: str) -> None:
    bystander = folder / "nvfl-agent-1-0-x"
    bystander.mkdir()
    hello, last = serve(wire.encode(wire.Sweep(tag)))
    assert isinstance(hello, wire.Hello)
    assert isinstance(last, wire.End)
    assert bystander.is_dir()
    bystander.rmdir()


def test_a_sweep_ends_what_has_left_its_session_and_lost_its_rank(folder: Path) -> None:
    orphan, neighbour = (
        subprocess.Popen(["sleep", "100"], env={agent_dir.TAG_VARIABLE: f"nvfl-agent-1-a-{number}-"})
        for number in (1, 11)
    )
    serve(wire.encode(wire.Sweep("1-a-1")))
    assert orphan.wait(BOUND) == -9
    assert neighbour.poll() is None
    neighbour.kill()
    neighbour.wait(BOUND)


def test_a_sweep_ends_an_agent_that_was_stopped(folder: Path) -> None:
    """It hears of no end of its orders then, and nothing of its client may be left that could kill it."""
    start = wire.Start(**{**vars(START), "tag": "1-a-1", "argv": ("--join-timeout=60", __file__)})
    with subprocess.Popen(
        node_agent.command(sys.executable), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as agent:
        assert agent.stdin is not None
        agent.stdin.write(wire.encode(start))
        agent.stdin.flush()
        try:
            files = f"nvfl-agent-1-a-1-*/{agent_dir.AGENT_FILE}"
            until(lambda: [file.read_text() for file in folder.glob(files)] == [str(agent.pid)], "it is not there")
            agent.send_signal(signal.SIGSTOP)
            agent.stdin.close()
            serve(wire.encode(wire.Sweep("1-a-1")))
            assert agent.wait(BOUND) == -signal.SIGKILL
        finally:
            agent.kill()


def test_a_process_that_has_got_a_dead_agents_number_is_left_alone(folder: Path) -> None:
    directory = folder / "nvfl-agent-1-a-1-x"
    directory.mkdir()
    with subprocess.Popen(["sleep", "100"]) as neighbour:
        (directory / agent_dir.AGENT_FILE).write_text(str(neighbour.pid))
        serve(wire.encode(wire.Sweep("1-a-1")))
        assert neighbour.poll() is None
        neighbour.kill()


@pytest.mark.parametrize("orders", [b"", b'{"kind": "st', wire.encode(wire.Stop(0.1))])
def test_the_end_of_the_orders_is_the_end(folder: Path, orders: bytes) -> None:
    hello, last = serve(orders)
    assert isinstance(hello, wire.Hello)
    assert isinstance(last, wire.End)
    assert (last.code, last.leftovers, last.error, last.stopped) == (None, (), None, True)


def test_a_second_start_is_refused_and_ends_the_first(folder: Path) -> None:
    frames = serve(wire.encode(START) * 2)
    last = frames[-1]
    assert isinstance(last, wire.End)
    assert last.error == "start: an agent serves one group, and this one has had it"
    assert last.leftovers == ()


def test_a_rank_has_been_stopped_only_while_its_agent_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site may suspend all of a job; which of its processes goes on first is not known."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    told: list[tuple[float, float]] = []
    agent = node_agent.Agent(0, os.open(os.devnull, os.O_WRONLY))
    monkeypatch.setattr(
        agent, "_ranks", SimpleNamespace(look_for_halted=lambda seconds, limit: told.append((seconds, limit)))
    )
    for seconds in (0.5, 0.5, 0.9, 0.3, 600.0):
        now += seconds
        agent._look_at_ranks()
    assert told == [(1.0, 30.0), (pytest.approx(1.2), 30.0), (2.0, 30.0)]


def test_a_torchrun_that_is_stopped_once_its_ranks_have_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(node_agent.Agent, "_terminate", lambda _agent: None)
    agent = node_agent.Agent(0, os.open(os.devnull, os.O_WRONLY))
    ended = [False]
    ranks = SimpleNamespace(look_for_halted=lambda *_: None, all_ended=lambda: ended[0])
    monkeypatch.setattr(agent, "_ranks", ranks)
    torchrun = subprocess.Popen(["sleep", "1000"])
    monkeypatch.setattr(agent, "_torchrun", torchrun)

    def look(times: int) -> str | None:
        nonlocal now
        for _ in range(times):
            now += 1.0
            agent._look_at_ranks()
        return agent._error

    try:
        torchrun.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, torchrun.pid, os.WSTOPPED)
        assert look(31) is None
        ended[0] = True
        assert look(29) is None
        assert look(1) == "its torchrun was stopped (SIGSTOP) for 30 s after the end of its ranks"
        assert agent._stopping == now
    finally:
        torchrun.kill()
        torchrun.wait()


def test_an_agent_whose_reader_is_gone_ends(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(node_agent.command(sys.executable), stdin=subprocess.PIPE, stdout=writing) as agent:
        os.close(writing)
        assert agent.stdin is not None
        agent.stdin.close()
        assert agent.wait(BOUND) == 0
