"""A site started in the foreground, as a batch script does it: it runs jobs, and stays until it is shut down."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from poc import LIMIT_S, Poc

pytestmark = [
    pytest.mark.real,
    # Of NVFlare's session with the server.
    pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning"),
]

# As README shows it, in a shell that becomes it.
COMMAND = "exec {kit}/startup/sub_start.sh --once"


def test_it_runs_a_job_and_ends_when_it_is_shut_down(tmp_path: Path) -> None:
    poc = Poc(tmp_path, ("site-1",))
    poc.prepare()
    poc.site("write", "site-1", "--nodes", "2")
    poc.write_job("job", "train.py", ("site-1",), code_in="custom")
    try:
        poc.start_server()
        line = COMMAND.format(kit=shlex.quote(str(poc.kits / "site-1")))
        with (tmp_path / "said.txt").open("wb") as said:
            site = subprocess.Popen(
                ["sh", "-c", line], env=poc.environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        poc.services = poc.processes()
        job = poc.submit("job")
        assert poc.end_of(job)["status"] == "FINISHED:COMPLETED"
        assert poc.model(job) == [13]
        assert site.poll() is None
        poc.session.shutdown("client", ["site-1"], wait=False)
        assert site.wait(LIMIT_S) == 0
    finally:
        left = poc.stop()
    assert left == {}
