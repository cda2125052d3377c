"""What a group's agents tell: it is written as it happens, and there is a verdict whatever they say."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from group_runs import WAITS, failure, run
from hypothesis import given, settings
from hypothesis import strategies as st
from standins import BOUND, HELLO, LATE, READY, end, launch, logger, says
from test_wire import FRAMES, SECONDS

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.events import GROUP_FILE
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Verdict

pytestmark = pytest.mark.usefixtures("short_bounds")


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
