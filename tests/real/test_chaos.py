"""A short run of what ``make chaos`` does at length, and what its parts owe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from beds.fixtures import need
from beds.ssh import SshBed
from chaos import check, plan
from chaos.run import HOSTS, ROUND_LIMIT_S, SITES, Attempt, Chaos, Follower
from simulation import Simulator
from ssh_groups import on_bed

SEED = 27  # draws every kind
ROUNDS = 3


@pytest.mark.real
@pytest.mark.alone
@pytest.mark.timeout(ROUNDS * ROUND_LIMIT_S + 60)
def test_three_rounds_in_which_everything_is_hit(simulator: Simulator, tmp_path: Path) -> None:
    need(SshBed)
    faults = plan.draw(SEED, ROUNDS, tuple(SITES))
    with SshBed(HOSTS) as bed, on_bed(bed, tmp_path, tmp_path):
        chaos = Chaos(simulator, bed, faults, ROUNDS, print)
        chaos.run()

    print(check.report(chaos))
    assert check.wrongs(chaos) == []
    # What finds nothing to hit in the last round, which may be short, does not happen.
    assert len(chaos.pending) <= 2
    assert len({attempt.fault.kind for attempt in chaos.attempts if attempt.fault}) >= 3


def test_a_seed_draws_the_same_faults_again() -> None:
    drawn = plan.draw(1, 20, ("site-1", "site-2"))

    assert drawn == plan.draw(1, 20, ("site-1", "site-2"))
    assert drawn != plan.draw(2, 20, ("site-1", "site-2"))
    assert [fault.round for fault in drawn] == sorted(fault.round for fault in drawn)
    kinds = [fault.kind for fault in drawn]
    assert {kind: kinds[:10].count(kind) for kind in plan.KINDS} == dict.fromkeys(plan.KINDS, 2)
    for number in range(20):
        for site in ("site-1", "site-2"):
            met = [fault for fault in drawn if (fault.round, fault.site) == (number, site)]
            assert len(met) <= plan.MOST_PER_ROUND


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    log = tmp_path / "log.json"
    follower = Follower(log)
    assert follower.news() == []
    log.write_text('{"message": "one"}\n{"message": "tw')
    assert follower.news() == ["one"]
    with log.open("a") as file:
        file.write('o"}\n')
    assert follower.news() == ["two"]
    assert follower.news() == []


def attempt(folder: Path, host: str | None = None, what: str = "", **given: Any) -> Attempt:
    """One that has blamed the host, or nobody."""
    folder.mkdir(exist_ok=True)
    failure = {"host": host, "what": what} if host else None
    verdict: dict[str, Any] = {
        "outcome": "failed" if host else "ok",
        "reason": None,
        "failure": failure,
        "leftovers": [],
    }
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return Attempt(**{"site": "site-1", "round": 0, "run_id": "1-a", "directory": folder, "ended": 1.0, **given})


def test_only_what_has_happened_may_be_blamed(tmp_path: Path) -> None:
    killed = "SIGKILL (killed from outside; memory is the usual reason)"
    assert check.of_attempt(attempt(tmp_path, "h1", killed, hits={("rank", "h1")})) == []
    assert check.of_attempt(attempt(tmp_path, "h1", "no sign of life from it for 6 s", away={"h1"})) == []
    assert check.of_attempt(attempt(tmp_path, "h2", killed, hits={("rank", "h1")})) == [
        f"blames h2: {killed}; what happened: [('rank', 'h1')]"
    ]
    assert check.of_attempt(attempt(tmp_path, "h1", "exit code 1", hits={("rank", "h1")})) != []
    assert check.of_attempt(attempt(tmp_path, survivors=["a rank"])) == ["survivors: ['a rank']"]
    assert check.of_attempt(attempt(tmp_path, ended=None)) == ["it has no verdict"]


def test_a_task_has_its_result_from_its_last_attempt(tmp_path: Path) -> None:
    lost, won = attempt(tmp_path / "1", "h1", "SIGKILL"), attempt(tmp_path / "2")
    assert check.of_task("site-1", 0, [lost, won]) == []
    for attempts in ([], [lost], [won, won], [won, lost]):
        assert check.of_task("site-1", 0, attempts) != []


def test_a_host_is_back_when_it_trains_after_rounds_without_it(tmp_path: Path) -> None:
    attempts = []
    for number, hosts in enumerate(("h0 h1", "h0", "h0 h1")):
        folder = tmp_path / str(number)
        attempts.append(attempt(folder, round=number))
        for rank, host in enumerate(hosts.split()):
            (folder / f"rank-{rank}.log").write_text(f"works on {host}\n")
    assert check.came_back(attempts) == set()
    attempts[0].hits = {("cable", "h1")}
    assert check.came_back(attempts) == {"h1"}
    assert check.came_back(attempts[:2]) == set()
