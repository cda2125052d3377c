"""A group whose agents do not do what agents do: real processes that stand in for them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
from group_runs import ENDS, LARGE, WAITS, failure, run, run_with
from standins import BOUND, HELLO, READY, end, launch, says, until

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.node import bootstrap
from nvflare_torchrun_plugin.supervision import group
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Verdict

pytestmark = pytest.mark.usefixtures("short_bounds")


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
