"""A group whose agents do not do what agents do: real processes that stand in for them."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import BOUND, HELLO, LATE, READY, children, end, launch, logger, says, until
from test_wire import FRAMES, SECONDS

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node import bootstrap
from nvflare_torchrun_plugin.supervision import channel, group, progress
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.events import GROUP_FILE
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Failure, Verdict

WAITS = f"read prepare; {says(HELLO, READY)}; read next; read stop; {says(end(0, stopped=True))}"
LARGE = ("x" * 100_000,) * 10
"""Arguments that fit neither a pipe nor what asyncio keeps for one before a writer has to wait."""


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short bounds, and nothing left at the end."""
    monkeypatch.setattr(group, "_STOP_MARGIN", 0.3)
    monkeypatch.setattr(group, "_SWEEP_BOUND", 2.0)
    for name in ("KILL_BOUND", "CLOSING"):
        monkeypatch.setattr(channel, name, 0.3)
    before = children()
    yield
    until(lambda: children() <= before, "processes are left")


def run(what: Launch, environ: dict[str, str] | None = None, stop_when: Path | None = None) -> Verdict:
    """Run the group; tell it to end once the file is there."""

    async def serve() -> Verdict:
        made, _ = logger("group")
        running = Group(what, {"PATH": os.environ["PATH"], **(environ or {})}, made, Copies())
        verdict = asyncio.create_task(running.run())
        while stop_when is not None and not stop_when.exists():
            assert not verdict.done()
            await asyncio.sleep(0.01)
        if stop_when is not None:
            running.stop("the test asked for it")
        return await asyncio.wait_for(verdict, BOUND)

    return asyncio.run(serve())


def failure(verdict: Verdict) -> Failure:
    assert verdict.failure is not None
    return verdict.failure


def test_an_agent_that_cannot_be_started(tmp_path: Path) -> None:
    what = launch(tmp_path, WAITS, WAITS)
    broken = what.members[1]
    object.__setattr__(broken, "agent_argv", (str(tmp_path / "no such"),))
    verdict = run(what)
    assert failure(verdict).node_rank == 1
    assert failure(verdict).what.startswith("the agent cannot be started: [Errno 2] No such file")
    assert json.loads((tmp_path / "logs/verdict.json").read_text())["failure"]["host"] == "host-1"


def test_an_environment_that_no_process_can_have(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, WAITS), {"A": "\0"})
    assert failure(verdict).what == "the agent cannot be started: embedded null byte"


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_a_bootstrap_that_cannot_be_handed_on(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "bootstrap"
    if text is not None:
        file.write_text(text)
    verdict = run(launch(tmp_path, WAITS, WAITS), {bootstrap.FILE_VARIABLE: str(file)})
    assert failure(verdict).node_rank == 0
    assert failure(verdict).what.startswith("the group cannot be started: ")


@pytest.mark.slow
@pytest.mark.parametrize("args", [(), LARGE], ids=["small order", "large order"])
def test_an_agent_that_says_and_reads_nothing(
    tmp_path: Path, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has started nothing, so nobody waits for it to end that.
    monkeypatch.setattr(group, "_STOP_MARGIN", 2 * BOUND)
    verdict = run(launch(tmp_path, "exec sleep 1000", WAITS, args=args, join_timeout=0.3))
    assert failure(verdict).node_rank == 0
    assert failure(verdict).what == "no word from the agent within join_timeout, 0.3 s"


def test_an_agent_that_is_still_looking_for_the_master(tmp_path: Path) -> None:
    looks = f"{says(HELLO)}; read prepare; read next; {says(end(0, stopped=True))}"
    verdict = run(launch(tmp_path, WAITS, looks, join_timeout=0.3))
    assert failure(verdict).node_rank == 1
    assert failure(verdict).what == "cannot resolve master address '127.0.0.1' within join_timeout, 0.3 s"


def test_what_connects_may_greet_and_fail(tmp_path: Path) -> None:
    greeting = (
        "echo Welcome; printf 'ca\\377f\\303\\251\\n' >&2; echo '{\"kind\": \"bye\"}'; exec >&-; "
        "sleep 0.1; echo no route to host >&2; exit 3"
    )
    verdict = run(launch(tmp_path, greeting))
    assert failure(verdict).what == (
        "no agent could be started there, sh ended with exit code 3: no route to host"
    )
    assert sorted(failure(verdict).last_lines) == [
        "Welcome",
        r"ca\xff" + "f\N{LATIN SMALL LETTER E WITH ACUTE}",
        "no route to host",
        '{"kind": "bye"}',
    ]
    lines = (tmp_path / "logs/node-0.log").read_text().splitlines()
    assert lines == list(failure(verdict).last_lines)


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE", 1 << 16)
    verdict = run(launch(tmp_path, f"{says(HELLO)}; exec tr '\\0' x < /dev/zero"))
    assert failure(verdict).what.startswith("the agent sent a line of more than 65536 bytes")


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (says(end(None)), ""),
        ("true", "no agent could be started there, sh ended with exit code 0"),
        ("exec sleep 1000", "looking for what is left there took more than 2 s"),
    ],
)
def test_after_an_agent_that_was_killed_another_one_sweeps(tmp_path: Path, second: str, why: str) -> None:
    first = f"if mkdir $1/first 2>&-; then {says(HELLO)}; kill -9 $$; fi"
    agent = f'read order; echo "$order" >> $1/orders; {first}; {second}'
    verdict = run(launch(tmp_path, agent))
    assert failure(verdict).what.startswith("its agent (or sh, which connects it) ended with SIGKILL")
    unconfirmed = f"node 0 (host-0): it is not confirmed that all processes there are gone: {why}"
    assert verdict.leftovers == ((unconfirmed,) if why else ())
    prepare, sweep = (wire.decode_order(line) for line in (tmp_path / "orders").read_bytes().splitlines())
    assert isinstance(prepare, wire.Prepare)
    assert sweep == wire.Sweep("standin-0")


def test_the_verdict_is_decided_before_a_silent_node_has_been_seen_to(tmp_path: Path) -> None:
    first = f"if mkdir $1/first 2>&-; then {says(HELLO)}; kill -9 $$; fi"
    agent = f"{first}; read sweep; while ! [ -e $1/swept ]; do sleep 0.02; done; {says(HELLO)}; exit 3"

    async def steps(group: Group, _lines: list[str]) -> None:
        decided = await asyncio.wrap_future(group.decided)
        assert decided is not None
        assert (failure(decided).node_rank, decided.leftovers) == (1, ())
        assert group.unswept == {"host-1"}
        assert is_written(decided)
        (tmp_path / "swept").touch()

    def is_written(verdict: Verdict) -> bool:
        text = (tmp_path / "logs" / "verdict.json").read_text()
        return json.dumps(json.loads(text)) == json.dumps(verdict.as_dict())

    ends = f"read prepare; {says(HELLO, READY)}; {ENDS}"
    verdict = run_with(launch(tmp_path, ends, agent), steps)
    (left,) = verdict.leftovers
    assert left.endswith("its agent (or sh, which connects it) ended with exit code 3")
    assert is_written(verdict)
    assert [path.name for path in (tmp_path / "logs").glob("verdict*")] == ["verdict.json"]


def test_an_agent_that_closes_its_output_and_stays(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, "exec sleep 1000 >&- 2>&-", WAITS))
    assert failure(verdict).node_rank == 0
    assert "ended with SIGKILL" in failure(verdict).what


def test_something_that_keeps_the_output_of_an_agent_open(tmp_path: Path) -> None:
    """So does ssh's master process for shared connections."""
    agent = "setsid sh -c 'echo $$ > $1/keeper; exec sleep 1000' sh $1 & exec cat > /dev/null"
    try:
        verdict = run(launch(tmp_path, agent), stop_when=tmp_path / "keeper")
        assert (verdict.outcome, verdict.reason) == ("stopped", "the test asked for it")
        assert verdict.seconds < BOUND
    finally:
        until(lambda: (tmp_path / "keeper").read_text() != "", "the keeper has no id")
        os.kill(int((tmp_path / "keeper").read_text()), signal.SIGKILL)


def test_a_node_that_reported_its_end_is_not_lost_when_it_lingers(tmp_path: Path) -> None:
    began = time.monotonic()
    verdict = run(launch(tmp_path, f"{says(HELLO, end(0))}; exec sleep 1000 >&- 2>&-"))
    assert verdict.outcome == "ok"
    assert time.monotonic() - began < BOUND


def test_a_verdict_that_cannot_be_written_is_reached_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "logs/verdict.json").mkdir(parents=True)
    assert run(launch(tmp_path, f"{says(HELLO, end(0))}")).outcome == "ok"


def test_a_full_disk_ends_no_group(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/node-0.log").symlink_to("/dev/full")
    line = wire.encode(wire.Line(None, "a line")).decode().strip()
    verdict = run(launch(tmp_path, f"{says(HELLO, *[line] * 3, end(0))}"))
    assert (verdict.outcome, verdict.leftovers) == ("ok", ())


def test_an_app_on_a_read_only_file_system_ends_no_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for change in ("touch", "unlink"):
        monkeypatch.setattr(Path, change, refuse)
    assert run(launch(tmp_path, f"{says(HELLO, end(0))}")).outcome == "ok"


STARTS = f'read prepare; {says(HELLO, READY)}; read start; echo "$start" >> $1/starts; {says(end(0))}'
MISSING = "echo no route to host >&2; exit 255"


def starts(folder: Path) -> list[wire.Start]:
    orders = [wire.decode_order(line) for line in (folder / "starts").read_bytes().splitlines()]
    return sorted((order for order in orders if isinstance(order, wire.Start)), key=lambda start: start.tag)


def test_an_elastic_group_does_without_a_node_that_cannot_be_reached(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, STARTS, MISSING, STARTS, least=2))
    assert verdict.outcome == "ok"
    why = "no agent could be started there, sh ended with exit code 255: no route to host"
    assert verdict.left_out == (("host-1", why),)
    shares = [(order.tag, order.env["NVFL_NNODES"], order.env["NVFL_NODE_RANK"]) for order in starts(tmp_path)]
    assert shares == [("standin-0", "2", "0"), ("standin-2", "2", "1")]


def test_an_elastic_group_may_shrink_to_the_client_s_own_host(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, STARTS, MISSING, MISSING, least=1))
    assert (verdict.outcome, len(verdict.left_out)) == ("ok", 2)
    (order,) = starts(tmp_path)
    assert order.env["NVFL_NNODES"] == "1"
    assert "NVFL_MASTER_ADDR" not in order.env


def test_below_the_minimum_every_node_is_named_with_its_reason(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, WAITS, MISSING, "exit 3", least=2))
    assert not (tmp_path / "starts").exists()
    assert failure(verdict).what == (
        "1 of at least 2 nodes can take part. host-1: no agent could be started there, sh ended with exit code"
        " 255: no route to host; host-2: no agent could be started there, sh ended with exit code 3"
    )
    assert (failure(verdict).cause, verdict.ranks_ran) == ("infrastructure", False)


def test_without_node_rank_0_there_is_no_group(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, MISSING, WAITS, WAITS, least=1))
    assert failure(verdict).node_rank == 0


def test_versions_that_do_not_fit_are_nothing_to_try_again(tmp_path: Path) -> None:
    other = HELLO.replace('"torch": "2.4"', '"torch": "2.5"')
    assert other != HELLO
    agent = f"read prepare; {says(other, READY)}; read stop; {says(end(0, stopped=True))}"
    verdict = run(launch(tmp_path, WAITS, agent))
    assert failure(verdict).node_rank == 1
    assert failure(verdict).cause == "configuration"
    assert failure(verdict).what.startswith("torch is 2.5 on node host-1, but 2.4 on node host-0: ")


OTHER_TORCH = HELLO.replace('"torch": "2.4"', '"torch": "2.5"')


@pytest.mark.parametrize(
    "agent",
    [
        f"read prepare; {says(OTHER_TORCH, READY)}; read order; {says(end(None, stopped=True))}",
        f"read prepare; {says(OTHER_TORCH, READY)}; exec sleep 1000",
        "exec sleep 1000",
    ],
    ids=["reads its orders", "hangs", "has never greeted"],
)
def test_a_node_that_the_group_does_without_does_not_keep_it_from_its_end(tmp_path: Path, agent: str) -> None:
    verdict = run(launch(tmp_path, STARTS, agent, least=1, join_timeout=0.5))
    assert (verdict.outcome, [host for host, _ in verdict.left_out]) == ("ok", ["host-1"])


def test_the_late_end_of_a_node_that_the_group_does_without_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_SETTLE", 0.0)
    works = (
        f"read prepare; {says(HELLO, READY)}; read start; while ! [ -e $1/late ]; do sleep 0.01; done; "
        f"timeout 1 cat > $1/stop; {says(end(0))}"
    )
    late = f"read prepare; {says(OTHER_TORCH, READY)}; read stop; {says(end(3, 'a mistake'))}; > $1/late; exit 255"
    verdict = run(launch(tmp_path, works, late, least=1))
    assert verdict.outcome == "ok"
    assert (tmp_path / "stop").read_bytes() == b""


@pytest.mark.parametrize(
    "agent",
    [
        f"read prepare; {says(HELLO, end(None, stopped=True))}",
        f"read prepare; {says(HELLO, READY, end(None, stopped=True))}",
        f"read prepare; {says(HELLO, READY)}; read start; {says(end(-15, stopped=True))}",
    ],
    ids=["before it has answered", "before it has started", "while it runs"],
)
def test_an_agent_that_somebody_else_ends_is_a_lost_node(tmp_path: Path, agent: str) -> None:
    verdict = run(launch(tmp_path, WAITS, agent))
    assert (failure(verdict).node_rank, failure(verdict).cause) == (1, "infrastructure")
    assert failure(verdict).what == (
        "its agent got a signal to end there, or heard nothing for 60 s (node_timeout)"
    )


def test_an_agent_that_somebody_else_ends_is_blamed_though_a_peer_of_its_rank_fails_first(tmp_path: Path) -> None:
    def rank(number: int, *ends: wire.Frame) -> str:
        return says(*(wire.encode(frame).decode().strip() for frame in (wire.RankUp(number, 0, 1), *ends)))

    lost = wire.RankError(0, "RuntimeError: Connection closed by peer", 1.0, False)
    peer = (
        f"read prepare; {says(HELLO, READY)}; read start; while ! [ -e $1/gone ]; do sleep 0.01; done; "
        f"{rank(0, lost, wire.RankEnd(0, 1, 1.0, False, 0))}; read stop; {says(end(1, stopped=True))}"
    )
    ended = (
        f"read prepare; {says(HELLO, READY)}; read start; {rank(1, wire.RankEnd(1, -15, 1.0, True, 0))}; "
        f"> $1/gone; read stop; {says(end(-15, stopped=True, at=1.0))}"
    )
    verdict = run(launch(tmp_path, peer, ended))
    assert (failure(verdict).node_rank, failure(verdict).rank, failure(verdict).cause) == (
        1,
        None,
        "infrastructure",
    )
    assert failure(verdict).what.startswith("its agent got a signal to end there, or heard nothing for ")


def test_an_elastic_group_does_without_a_node_whose_agent_somebody_else_ends(tmp_path: Path) -> None:
    verdict = run(launch(tmp_path, STARTS, f"read prepare; {says(HELLO, end(None, stopped=True))}", least=1))
    assert (verdict.outcome, [host for host, _ in verdict.left_out]) == ("ok", ["host-1"])


def test_a_rank_0_that_left_without_a_result_is_blamed_though_nvflare_noticed_first(tmp_path: Path) -> None:
    up = wire.encode(wire.RankUp(0, 0, 1)).decode().strip()
    left = wire.encode(wire.RankEnd(0, 0, 1.5, False, 0)).decode().strip()
    agent = (
        f"read prepare; {says(HELLO, READY)}; read start; {says(up, left)}; touch $1/left; read stop;"
        f" {says(end(0, stopped=True))}"
    )
    verdict = run(launch(tmp_path, agent), stop_when=tmp_path / "left")
    assert (verdict.outcome, failure(verdict).rank) == ("failed", 0)
    assert failure(verdict).what.startswith("rank 0 ended with exit code 0, but no result was accepted")


UP = wire.encode(wire.RankUp(0, 0, 1)).decode().strip()
ENDS = f"read stop; {says(end(0, stopped=True))}"
TRAINS = (
    f"read prepare; {says(HELLO, READY)}; read start; while [ ! -e $1/up ]; do sleep 0.02; done; {says(UP)};"
    f" {ENDS}"
)


def run_with(what: Launch, steps: Callable[[Group, list[str]], Awaitable[None]]) -> Verdict:
    """Run the group; the steps get it and the lines of its log while it lasts."""

    async def serve() -> Verdict:
        made, lines = logger("group")
        running = Group(what, {"PATH": os.environ["PATH"]}, made, Copies())
        verdict = asyncio.create_task(running.run())
        await asyncio.wait_for(steps(running, lines), BOUND)
        return await asyncio.wait_for(verdict, BOUND)

    return asyncio.run(serve())


async def said(lines: list[str], phase: str) -> None:
    while not any(line.startswith(f"task group standin: {phase}, ") for line in lines):
        await asyncio.sleep(0.01)


HALT = wire.encode(wire.Halt(0, LATE)).decode().strip()
NEWS = wire.encode(wire.Line(0, "still there")).decode().strip()


def test_a_silent_node_that_cannot_be_seen_to_for_want_of_descriptors_is_told_of(tmp_path: Path) -> None:
    dies = "while ! [ -e $1/die ]; do sleep 0.02; done; kill -9 $$"
    agent = f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; {dies}"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def steps(group: Group, lines: list[str]) -> None:
        await said(lines, "training")
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        (tmp_path / "die").mkdir()
        await asyncio.wrap_future(group.decided)

    try:
        verdict = run_with(launch(tmp_path, agent), steps)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert verdict.leftovers == (
        "node 0 (host-0): it is not confirmed that all processes there are gone: no agent could be started for"
        " that: [Errno 24] Too many open files",
    )


def test_a_rank_that_is_stopped_for_too_long_fails_its_group(tmp_path: Path) -> None:
    agent = f"read prepare; {says(HELLO, READY)}; read start; {says(UP, HALT)}; {ENDS}"
    verdict = run(launch(tmp_path, agent))
    assert (failure(verdict).rank, failure(verdict).cause) == (0, "infrastructure")
    assert failure(verdict).what == "stopped (SIGSTOP) for 60 s (node_timeout)"


def test_once_the_result_is_there_a_rank_may_be_stopped_until_the_next_task(tmp_path: Path) -> None:
    accepted, resumed = (f"while [ ! -e $1/{name} ]; do sleep 0.02; done" for name in ("accepted", "resumed"))
    agent = (
        f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; {accepted}; {says(HALT, NEWS)};"
        f" {resumed}; {says(HALT)}; {ENDS}"
    )

    async def accept_and_resume(group: Group, lines: list[str]) -> None:
        await said(lines, "training")
        group.accept()
        (tmp_path / "accepted").touch()
        while not any("still there" in line for line in lines):
            await asyncio.sleep(0.01)
        assert group.well
        group.resume()
        assert group.well
        (tmp_path / "resumed").touch()

    verdict = run_with(launch(tmp_path, agent), accept_and_resume)
    assert failure(verdict).what == "stopped (SIGSTOP) for 60 s (node_timeout)"


def test_the_log_tells_each_phase_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK", 0.01)

    async def steps(running: Group, lines: list[str]) -> None:
        for phase in ("starting", "joining", "training", "finishing"):
            await said(lines, phase)
            if phase == "joining":
                (tmp_path / "up").touch()
            elif phase == "training":
                running.accept()
        running.stop("the test asked for it")
        found.extend(line.partition(", ")[0] for line in lines if line.startswith("task group "))

    found: list[str] = []
    run_with(launch(tmp_path, TRAINS), steps)
    phases = ("starting", "joining", "training", "finishing")
    assert found == [f"task group standin: {phase}" for phase in phases]


def test_a_phase_that_lasts_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    monkeypatch.setattr(progress, "_TELL_AGAIN", 0.05)

    async def steps(running: Group, lines: list[str]) -> None:
        while sum(line.startswith("task group standin: joining, ") for line in lines) < 3:
            await asyncio.sleep(0.01)
        (tmp_path / "up").touch()
        running.stop("the test asked for it")

    run_with(launch(tmp_path, TRAINS), steps)


def test_a_torchrun_that_starts_no_rank_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped torchrun on node 0, which would open the port, keeps the others for longer than their bound."""
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    monkeypatch.setattr(progress, "_JOIN_MARGIN", 0.2)
    joins = f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; read stop; {says(end(0, stopped=True))}"
    hangs = f"read prepare; {says(HELLO, READY)}; read start; read stop; {says(end(0, stopped=True))}"
    verdict = run(launch(tmp_path, joins, hangs, join_timeout=2))
    assert failure(verdict).node_rank == 1
    assert failure(verdict).what == "its torchrun has started no rank within join_timeout, 2 s"
    assert failure(verdict).cause == "infrastructure"
    assert 2.2 <= failure(verdict).seconds < 4


SILENT = GivenUp("heartbeat timed out", "infrastructure")


def test_nvflare_gives_up_on_a_rank_0_that_another_node_has_kept_from_starting(tmp_path: Path) -> None:
    joins = f"read prepare; {says(HELLO, READY)}; read start; {says(UP)}; read stop; {says(end(0, stopped=True))}"
    hangs = f"read prepare; {says(HELLO, READY)}; read start; > $1/on; read stop; {says(end(0, stopped=True))}"

    async def steps(running: Group, lines: list[str]) -> None:
        while not (tmp_path / "on").exists():
            await asyncio.sleep(0.01)
        running.give_up(SILENT)

    verdict = run_with(launch(tmp_path, joins, hangs), steps)
    assert (failure(verdict).node_rank, failure(verdict).rank, failure(verdict).cause) == (
        1,
        None,
        "infrastructure",
    )
    assert failure(verdict).what == ("it has started no rank, and NVFlare gave up on rank 0: heartbeat timed out")


def test_nvflare_gives_up_before_it_is_known_which_nodes_make_the_group(tmp_path: Path) -> None:
    async def steps(running: Group, lines: list[str]) -> None:
        while not all(
            file.exists() and file.read_text() for file in (tmp_path / "on", tmp_path / "logs/node-0.log")
        ):
            await asyncio.sleep(0.01)
        running.give_up(SILENT)

    # Its line comes after its answer, and is in its file when that has been read.
    line = wire.encode(wire.Line(None, "ready")).decode().strip()
    ready = f"read prepare; {says(HELLO, READY, line)}; read stop; {says(end(0, stopped=True))}"
    silent = "read prepare; echo > $1/on; exec sleep 1000"
    verdict = run_with(launch(tmp_path, ready, silent, least=1), steps)
    assert (failure(verdict).node_rank, verdict.ranks_ran) == (1, False)
    assert failure(verdict).what.startswith("it has started no rank, and NVFlare gave up on rank 0: ")


def test_nvflare_gives_up_on_a_group_that_has_failed_already(tmp_path: Path) -> None:
    async def steps(running: Group, lines: list[str]) -> None:
        while running.well:
            await asyncio.sleep(0.01)
        running.give_up(SILENT)

    died = wire.encode(wire.RankEnd(0, 3, 1.0, False, 0)).decode().strip()
    agent = f"read prepare; {says(HELLO, READY)}; read start; {says(UP, died)}; read stop; {says(end(1))}"
    verdict = run_with(launch(tmp_path, agent), steps)
    assert (failure(verdict).rank, failure(verdict).what) == (0, "exit code 3")


@pytest.mark.parametrize("first", [True, False], ids=["its first task", "the next task"])
def test_a_group_that_waits_for_a_task_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Only from the task on is a group that serves a whole job expected to say something."""
    monkeypatch.setattr(progress, "_LOOK", 0.01)
    monkeypatch.setattr(group, "_SETTLE", 0.0)
    limit = 0.3

    async def steps(running: Group, lines: list[str]) -> None:
        await said(lines, "training")
        if not first:
            running.resume()
            running.accept()
        # It is silent for so long, and nothing comes of it.
        await asyncio.sleep(3 * limit)
        began.append(running._roster.now())
        running.resume()

    began: list[float] = []
    (tmp_path / "up").touch()
    what = dataclasses.replace(launch(tmp_path, TRAINS), hang_timeout=limit, serves_job=True)
    verdict = run_with(what, steps)
    assert failure(verdict).what.startswith("no rank has printed anything for ")
    assert failure(verdict).seconds > began[0] + limit


# Of few ranks, so that frames are about the same ones.
RANK = st.integers(-1, 2) | st.integers(-(2**70), 2**70)


def test_what_happened_when_is_written_as_it_happens(tmp_path: Path) -> None:
    frames: list[wire.Frame] = [
        wire.RankUp(0, 0, 1),
        wire.Moment(0, "receive", LATE),
        wire.Moment(0, "verdict", LATE),  # no moment
        wire.RankEnd(0, 3, LATE, False, 0),
    ]
    ups = says(*(wire.encode(frame).decode().strip() for frame in frames))
    fails = f"read prepare; {says(HELLO, READY)}; read next; {ups}; {says(end(1))}"
    began = time.time()
    verdict = run(launch(tmp_path, WAITS, fails))
    events = [json.loads(line) for line in (tmp_path / "logs" / GROUP_FILE).read_text().splitlines()]
    assert began <= events[0]["at"] <= events[-1]["at"] <= time.time()
    assert events[0] == {
        "event": "group",
        "at": events[0]["at"],
        "name": "standin",
        "hosts": ["host-0", "host-1"],
        "ahead": False,
        "serves_job": False,
    }
    of_node = [event["event"] for event in events if event.get("place") == 1]
    assert of_node == ["agent", "ready", "rank", "receive", "rank_end", "end"]
    of_group = [event["event"] for event in events if "place" not in event]
    assert of_group == ["group", "chosen", "started", "stop", "failure", "verdict"]
    (failed,) = (event for event in events if event["event"] == "failure")
    assert (failed["node_rank"], failed["host"], failed["rank"], failed["what"]) == (1, "host-1", 0, "exit code 3")
    assert abs(failed["at"] - events[0]["at"] - failure(verdict).seconds) < 0.5
    assert events[-1]["outcome"] == "failed"


def test_a_place_without_room_costs_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "logs" / GROUP_FILE).mkdir(parents=True)
    assert run(launch(tmp_path, WAITS), stop_when=tmp_path).outcome == "stopped"


ABOUT_RANKS = st.one_of(
    st.builds(wire.RankUp, RANK, RANK, RANK),
    st.builds(wire.Line, st.none() | RANK, st.text(max_size=5)),
    st.builds(wire.RankError, RANK, st.text(max_size=5), SECONDS, st.booleans()),
    st.builds(wire.Halt, RANK, SECONDS),
    st.builds(wire.RankEnd, RANK, st.none() | RANK, SECONDS, st.booleans(), RANK),
)
SAID = st.lists(
    (FRAMES | ABOUT_RANKS).map(wire.encode) | st.binary(max_size=60).map(lambda data: data + b"\n"), max_size=8
)


@pytest.mark.hypothesis
def test_whatever_an_agent_says_there_is_a_verdict(tmp_path: Path) -> None:
    """In any order, of ranks that never were, in any words, with its end or without."""

    @settings(max_examples=25)
    @given(SAID)
    def anything(said: list[bytes]) -> None:
        (tmp_path / "said").write_bytes(b"".join(said))
        complaints: list[str] = []

        async def serve() -> Verdict:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, told: complaints.append(str(told)))
            made, lines = logger("group")
            what = launch(tmp_path, "cat $1/said")
            running = Group(what, {"PATH": os.environ["PATH"]}, made, Copies()).run()
            verdict = await asyncio.wait_for(running, BOUND)
            complaints.extend(line for line in lines if "Traceback" in line)
            return verdict

        verdict = asyncio.run(serve())
        assert complaints == []
        assert verdict.text()
        assert json.loads((tmp_path / "logs/verdict.json").read_text())["outcome"] == verdict.outcome

    anything()
