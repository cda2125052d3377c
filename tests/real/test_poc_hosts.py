"""A real POC whose site has its nodes on real ssh hosts, and two jobs that want them at the same time."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
from poc import LIMIT_S, TRAIN, Poc, kept_model, wait_until
from ssh_groups import SshGroups

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
