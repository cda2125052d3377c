"""A real POC whose site has its nodes on real ssh hosts, and two jobs that want them at the same time."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import job_log
import pytest
from poc import LIMIT_S, TRAIN, Poc, kept_model, wait_until
from ssh_groups import GONE_S, SshGroups

pytestmark = pytest.mark.real

SITE = "site-1"
# Holds its nodes until the file is there.
HOLD = """
    import pathlib
    import socket
    import sys
    import time

    deadline = time.monotonic() + 200
    print("here on", socket.gethostname(), flush=True)
    while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
"""


# Does not end by itself, nor for SIGTERM.
DEAF = """
    import signal
    import time

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(600)
"""
NVFLARE_S = 10.0
"""Seconds from an abort to the moment at which NVFlare kills the client job's process group."""
GRACE_S = 20.0
"""Longer than that: the client job is killed while its nodes still end their ranks."""


def test_when_nvflare_kills_an_aborted_client_job_its_nodes_end_by_themselves(
    groups: SshGroups, tmp_path: Path
) -> None:
    poc = Poc(tmp_path, (SITE,), groups.bed["h0"])
    try:
        poc.prepare()
        (poc.local(SITE) / "node_group.yaml").write_text("nodes: [h0, h1]\ntransport: ssh\n")
        poc.start()
        poc.write_job("deaf", "train.py", (SITE,), code_in="custom", code=DEAF, stop_grace_period=GRACE_S)
        job = poc.submit("deaf")
        both = ("rank 0 | deaf", "rank 1 | deaf")
        assert wait_until(lambda: all(rank in poc.messages_so_far(SITE, job) for rank in both), LIMIT_S)

        def client_jobs() -> list[int]:
            return [pid for pid, command in poc.processes().items() if ".client.worker_process " in command]

        assert len(client_jobs()) == 1
        poc.nvflare("job", "abort", job, "--force")
        assert wait_until(lambda: client_jobs() == [], NVFLARE_S + LIMIT_S)
        left = groups.processes()
        groups.wait_until_gone(limit_s=GRACE_S - NVFLARE_S + 2 * GONE_S)
    finally:
        left_of_poc = poc.stop()
    assert left_of_poc == {}
    # Each node had work left.
    assert set(left) == {"h0", "h1"}
    said = job_log.entries(poc.kits / SITE / "log.json")
    assert f"run ({job}): child worker process terminated" in [entry["message"] for entry in said]
    assert [path.name for path in poc.tmp.iterdir() if path.name.startswith("nvfl")] == []


def test_two_jobs_of_a_site_take_turns_on_its_nodes(groups: SshGroups, tmp_path: Path) -> None:
    poc = Poc(tmp_path, (SITE,), groups.bed["h0"])
    released = tmp_path / "released"
    try:
        poc.prepare()
        (poc.local(SITE) / "node_group.yaml").write_text("nodes: [h0, h1]\ntransport: ssh\n")
        poc.start()
        for name in ("one", "two"):
            code = dedent(HOLD) + dedent(TRAIN)
            poc.write_job(name, "train.py", (SITE,), code_in="custom", code=code, args=(str(released),))
        jobs = [poc.submit(name) for name in ("one", "two")]

        def first() -> str | None:
            """The job that has the nodes."""
            there = [job for job in jobs if "rank 1 | here on h1" in poc.messages_so_far(SITE, job)]
            return there[0] if there else None

        assert wait_until(lambda: first() is not None, LIMIT_S)
        (second,) = set(jobs) - {first()}
        told = rf"node h0 is in use by job {first()} \(process [0-9]+\): waiting up to [0-9]+ s \(on_busy\)"
        assert wait_until(lambda: re.search(told, poc.messages_so_far(SITE, second)) is not None, LIMIT_S)
        assert "| here" not in poc.messages(SITE, second)
        released.touch()
        ends = [poc.nvflare("job", "monitor", job) for job in jobs]
        for job in jobs:
            poc.nvflare("job", "download", job)
    finally:
        released.touch()
        left = poc.stop()
    assert left == {}
    for job, end in zip(jobs, ends, strict=True):
        assert "FINISHED:COMPLETED" in end
        assert kept_model(tmp_path / job) == [1 + 12]
        assert poc.errors(SITE, job) == []
        for rank, host in enumerate(("h0", "h1")):
            assert poc.messages(SITE, job).count(f"node {rank} rank {rank} | here on {host}") == 1
    assert [path.name for path in poc.tmp.iterdir() if path.name.startswith("nvfl")] == []
