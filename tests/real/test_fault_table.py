"""The fault table, row by row: who is blamed, within how many seconds, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import controller, inflict, pump, table, train
from faults.inflict import Row
from simulation import Simulator, finish, in_folder, processes
from slurm_groups import SlurmDriver
from ssh_groups import SshGroups

from nvflare_torchrun_plugin.description.group_choice import Wish, choose
from nvflare_torchrun_plugin.launching import planning, program
from nvflare_torchrun_plugin.node import procs
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Verdict

pytestmark = [pytest.mark.real, pytest.mark.alone]

GRACE, NODE_TIMEOUT, SHORT_JOIN = 1.0, 4.0, 8
QUIET = 1.5
"""Processes that may want each core before a bound, which is that of a quiet machine, is widened."""
LIMIT_S, JOB_LIMIT_S = 300.0, 2400.0
"""Seconds after which a fault that has not come does not come any more; the last one of the job."""
GROUP, JOB, CLIENT_JOB = table.parse(table.GROUP), table.parse(table.NVFLARE), table.parse(table.CLIENT_JOB)
SSH, SLURM = table.parse(table.SSH), table.parse(table.SLURM)
ROWS = [*GROUP, *JOB, *CLIENT_JOB]
HOSTS = ("localhost", "127.0.0.1")


def name(row: Row) -> str:
    return f"{row.what}-{row.where}-{row.when}-{row.how}".replace(" ", "-")


def blame(verdict: dict[str, Any]) -> str:
    """The verdict's first words."""
    failure = verdict["failure"]
    if failure is None:
        return str(verdict["reason"] or verdict["outcome"])
    rank = "" if failure["rank"] is None else f" rank {failure['rank']}"
    # On a busy machine a rank is ended before it has got from its exception to its exit code.
    what = failure["what"].replace("uncaught exception", "exit code 1")
    return f"node {failure['node_rank']}{rank}: {what}"


def allowed(row: Row) -> float:
    """Return the row's bound on this machine, as busy as it is."""
    return row.bound * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)) / QUIET)


def described(row: Row, folder: Path) -> dict[str, Any]:
    """Two nodes on this host, whose interpreters know their node rank."""
    nodes = []
    for number, host in enumerate(HOSTS):
        python = folder / f"node-{number}"
        python.write_text(f'#!/bin/sh\nexport {inflict.NODE}={number}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        nodes.append({"host": host, "python": str(python)})
    transport = [sys.executable, pump.__file__, "{host}"] if row.what == "transport" else "local"
    return {"nodes": nodes, "transport": transport}


def run_group(row: Row, folder: Path, environ: dict[str, str]) -> Verdict:
    chosen = choose(
        {},
        None,
        described(row, folder),
        Wish(nproc_per_node=1),
        byoc=True,
        launch_once=False,
        script=train.__file__,
    )
    late = row.how == "SIGSTOP" and row.when in ("at start", "before join")
    options = planning.Options.parse(
        torchrun_args=None,
        join_timeout=SHORT_JOIN if late else 60,
        launch_timeout=None,
        node_timeout=NODE_TIMEOUT,
        hang_timeout=None,
        grace=GRACE,
        log_ranks="all",
    )
    ranks = program.parse(train.__file__, None, ["plain"], {})
    plan = planning.Plan(
        chosen, ranks, train.__file__, str(folder), str(folder / "logs"), options, owes_result=not row.spares
    )
    launch, reservation = planning.launch(plan, 1)
    assert reservation is not None

    async def serve() -> Verdict:
        group = Group(launch, {**os.environ, **environ}, logging.getLogger("test"), Copies())
        return await asyncio.wait_for(group.run(), LIMIT_S)

    try:
        return asyncio.run(serve())
    finally:
        reservation.release()


def test_every_combination_is_a_row_or_left_out_for_a_reason() -> None:
    rows = {(row.what, row.where, row.when, row.how) for row in ROWS}
    reasons = table.left_out()
    missing = set(itertools.product(table.WHAT, table.WHERE, table.WHEN, table.HOW)) - rows
    assert missing - {each for _, combinations in reasons for each in combinations} == set()
    assert [why for why, combinations in reasons if not missing & set(combinations)] == []
    assert len(rows) == len(ROWS)


def test_a_row_may_have_two_right_answers() -> None:
    row = Row("rank", 0, "in training", "closed channel", "ok: NVFlare or node 0", 1)
    assert [row.agrees(said) for said in ("NVFlare gave up", "node 0 rank 0", "node 1")] == [True, True, False]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def files_left(tmp: Path) -> list[str]:
    """torch keeps a cache of its own there, named after the user."""
    return [path.name for path in tmp.iterdir() if not path.name.startswith("torchinductor_")]


def check_details(row: Row, verdict: Verdict) -> None:
    """What else the verdict says when a rank has failed."""
    failure = verdict.failure
    assert failure is not None
    assert failure.rank is not None
    assert verdict.victims == (1 - failure.rank,)
    if row.how == "exception":
        assert failure.traceback is not None
        assert failure.traceback.endswith("RuntimeError: inflicted\n")
        assert failure.last_lines[0] == "up"


@pytest.mark.parametrize("row", [pytest.param(row, id=name(row)) for row in GROUP])
def test_group(row: Row, folder: Path) -> None:
    environ = inflict.write([row], folder)
    try:
        verdict = run_group(row, folder, environ)
        ended = time.monotonic()
        left = procs.with_variable(inflict.FOLDER, str(folder))
    finally:
        procs.send_signal(procs.with_variable(inflict.FOLDER, str(folder)), signal.SIGKILL)

    struck = inflict.inflicted(folder, 1)
    assert struck is not None, verdict.text()
    assert row.agrees(blame(verdict.as_dict())), verdict.text()
    if row.what == "rank" and not row.spares:
        check_details(row, verdict)
    assert verdict.leftovers == ()
    assert left == []
    assert files_left(folder / "tmp") == []
    assert ended - struck < allowed(row)


@pytest.mark.parametrize("row", [pytest.param(row, id=name(row)) for row in CLIENT_JOB])
def test_client_job(row: Row, folder: Path) -> None:
    """The driver stands for the client job. One that was killed says no more; one that was stopped goes on."""
    environ = inflict.write([row], folder)
    given = {
        "script": Path(train.__file__).read_text(),
        "args": ["plain"],
        "app_dir": str(folder / "app"),
        "logs": str(folder / "logs"),
        "group": described(row, folder),
        "environ": environ,
        "node_timeout": NODE_TIMEOUT,
    }
    driver = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("group_driver.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert driver.stdin is not None
        driver.stdin.write(json.dumps(given))
        driver.stdin.close()
        driver.stdin = None
        struck = wait_for_fault(folder, 1, lambda: driver.poll() is None)
        while left := procs.with_variable(inflict.FOLDER, str(folder)):
            assert time.monotonic() - struck < allowed(row), left
            time.sleep(0.02)
        driver.send_signal(signal.SIGCONT)
        output, _ = driver.communicate(timeout=30)
    finally:
        procs.send_signal(procs.with_variable(inflict.FOLDER, str(folder)), signal.SIGKILL)
        driver.kill()
    assert row.agrees(blame(json.loads(output)) if output else "nobody")
    assert files_left(folder / "tmp") == []


def wait_for_fault(folder: Path, number: int, may_come: Callable[[], bool], limit_s: float = LIMIT_S) -> float:
    """Wait until the row's fault has come, and return when."""
    deadline = time.monotonic() + limit_s
    while True:
        # In this order: it may come, and all be over, while the other is found out.
        may = may_come()
        if (struck := inflict.inflicted(folder, number)) is not None:
            return struck
        assert may
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_of_the_last(simulator: Simulator) -> list[int]:
    """Processes that are left of the row that has killed the client job; agents are the last ones to go."""
    running = processes(simulator.tmp).items()
    agents = [pid for pid, command in running if "nvflare_torchrun_plugin" in command]
    return agents + controller.left_of(simulator.job.parent, str(simulator.tmp), len(JOB))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    """The simulator after one job in which each row had a task; the last row has killed the client job."""
    folder = tmp_path_factory.mktemp("job")
    with in_folder(folder) as simulator:
        simulator.sites = ("site-1",)
        simulator.environ |= inflict.write(JOB, folder)
        simulator.write_site_file(f"nodes: [{', '.join(HOSTS)}]\n")
        simulator.write_files(
            {"readme.txt": ""},
            script=train.__file__,
            script_args="nvflare",
            retry_on="never",
            node_timeout=NODE_TIMEOUT,
            stop_grace_period=GRACE,
            heartbeat_interval=1,
            heartbeat_timeout=8,
        )
        config = simulator.job / "app" / "config" / "config_fed_server.json"
        path = f"{controller.__name__}.{controller.OneTaskForEachRow.__name__}"
        workflow = {"id": "table", "path": path, "args": {}}
        config.write_text(json.dumps({"format_version": 2, "workflows": [workflow], "components": []}))
        process = simulator.start()
        try:
            wait_for_fault(folder, len(JOB), lambda: process.poll() is None, JOB_LIMIT_S)
            deadline = time.monotonic() + 20
            while (left := left_of_the_last(simulator)) and time.monotonic() < deadline:
                time.sleep(0.05)
            reply = {"gone": time.monotonic(), "left": left}
            (inflict.marks(folder, len(JOB)) / "reply.json").write_text(json.dumps(reply))
        finally:
            for pid in processes(simulator.tmp):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            (folder / "output").write_text(finish(process))
        yield simulator


@pytest.mark.timeout(2 * JOB_LIMIT_S)  # one of these waits for the whole job
@pytest.mark.parametrize("number", [pytest.param(n, id=name(row)) for n, row in enumerate(JOB, 1)])
def test_task(job: Simulator, number: int) -> None:
    row, folder = JOB[number - 1], job.job.parent
    struck = inflict.inflicted(folder, number)
    assert struck is not None
    reply = json.loads((inflict.marks(folder, number) / "reply.json").read_text())
    files = list(job.workspace.rglob(f"torchrun/attempt-{number:04d}/verdict.json"))
    said = blame(json.loads(files[0].read_text())) if files else "nobody"
    assert row.agrees(said), said
    assert (reply.get("code") == "OK") == row.spares
    assert reply["left"] == []
    assert max(reply.get("at", struck), reply["gone"]) - struck < allowed(row)


def variables(environ: dict[str, str]) -> dict[str, Any]:
    """The rows' variables, for a driver and for the nodes of its group on other hosts."""
    names = (inflict.ROWS, inflict.FOLDER)
    return {"environ": environ, "node_timeout": NODE_TIMEOUT, "env": {name: environ[name] for name in names}}


@pytest.mark.parametrize("row", [pytest.param(row, id=name(row)) for row in SSH])
def test_over_ssh(row: Row, groups: SshGroups) -> None:
    """On two hosts; that no process and no file is left on any is what the fixture asserts."""
    given = variables(inflict.write([row], groups.folder))
    running = groups.start(
        Path(train.__file__).read_text(),
        group={"env": given.pop("env")},
        private=row.what == "CJ",
        args=["plain"],
        **given,
    )
    struck = wait_for_fault(groups.folder, 1, lambda: running.process.poll() is None)
    ended = running.finish()
    assert time.monotonic() - struck < allowed(row), ended.log
    assert row.agrees(blame(ended.verdict) if ended.verdict else "nobody"), ended.log
    assert ended.verdict.get("leftovers", []) == []
    groups.wait_until_gone(limit_s=max(0.0, struck + allowed(row) - time.monotonic()))


@pytest.mark.parametrize("row", [pytest.param(row, id=name(row)) for row in SLURM])
def test_over_slurm(row: Row, driver: SlurmDriver) -> None:
    """On two nodes of an allocation; that nothing is left is what the fixture asserts."""
    given = variables(inflict.write([row], driver.folder))
    group = {"nodes": "auto", "env": given.pop("env")}
    code = Path(train.__file__).read_text()
    job = driver.submit(code, "--nodes=2", nproc_per_node=1, group=group, args=["plain"], **given)
    struck = wait_for_fault(driver.folder, 1, lambda: driver.bed.job(job)["JobState"] in ("PENDING", "RUNNING"))
    driver.bed.end(job)
    seconds = time.monotonic() - struck
    verdict = {} if row.what == "CJ" else driver.verdict()
    assert row.agrees(blame(verdict) if verdict else "nobody"), driver.log
    assert verdict.get("leftovers", []) == []
    assert seconds < allowed(row)
