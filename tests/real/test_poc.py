"""Jobs in NVFlare's POC, a real server and two real sites with certificates: who may run what, and what stays."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from poc import EXECUTOR, LIMIT_S, TRAIN, Poc, wait_until
from simulation import the_one

pytestmark = [
    pytest.mark.real,
    # Of NVFlare's session with the server.
    pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning"),
]

LEAD = "lead@nvidia.com"
SITES = ("site-1", "site-2")
SUM = 1 + 12

NODES = {
    "id": "nodes",
    "path": "nvflare_torchrun_plugin.node_group.NodeGroupProvider",
    "args": {"nodes": 4},
}


def allowed(poc: Poc) -> Path:
    return poc.folder / "allowed.py"


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def allow_our_classes(poc: Poc) -> None:
    """On site-1, as its admin would: look first, then let it be written."""
    before = files(poc.kits / "site-1")
    shown = poc.site("allow", "site-1").stdout
    assert files(poc.kits / "site-1") == before
    added = [line[1:].strip() for line in shown.splitlines() if line.startswith("+ ")]
    assert added[-1] == '"nvflare_torchrun_plugin."'
    assert poc.site("allow", "site-1", "--write").stdout.startswith(shown)
    after = files(poc.kits / "site-1")
    assert after.keys() - before.keys() == {Path("local/resources.json")}
    assert after.items() >= before.items()
    default, own = (
        json.loads((poc.local("site-1") / f"resources.json{end}").read_text()) for end in (".default", "")
    )
    default["class_allow_list"].append("nvflare_torchrun_plugin.")
    assert own == default


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Poc]:
    """On both sites ``local/node_group.yaml`` describes two nodes and allows the same script.

    site-1 allows our classes, and site-2 lets no lead bring code.
    """
    running = Poc(tmp_path_factory.mktemp("poc"), SITES)
    try:
        running.prepare()
        allowed(running).write_text(dedent(TRAIN))
        for site in SITES:
            before = files(running.kits / site)
            told = running.site("write", site, "--nodes", "2", "--transport", "local", "--allow", allowed(running))
            assert "+nodes: 2" in told.stdout
            assert files(running.kits / site).keys() - before.keys() == {Path("local/node_group.yaml")}
            assert files(running.kits / site).items() >= before.items()
        allow_our_classes(running)
        assert running.site("check", "site-1").stdout.splitlines()[-2:] == [
            f"any job may run: {allowed(running)}",
            "jobs without code of their own find our classes allowed",
        ]
        policy = json.loads((running.local("site-2") / "authorization.json.default").read_text())
        policy["permissions"]["lead"]["byoc"] = "none"
        (running.local("site-2") / "authorization.json").write_text(json.dumps(policy))
        running.start()
        yield running
    finally:
        left = running.stop()
    assert left == {}


@pytest.fixture
def poc(running: Poc) -> Iterator[Poc]:
    yield running
    ours_ended = wait_until(lambda: not running.ours(), 5)
    left = running.end_others(30)
    assert ours_ended
    assert left == {}
    # Sockets, bootstrap files and port reservations of ours go with the job.
    assert [path.name for path in running.tmp.iterdir() if path.name.startswith("nvfl")] == []


def test_job_with_code_on_the_nodes_of_each_site(poc: Poc) -> None:
    poc.write_job("byoc", "train.py", SITES, code_in="custom", rounds=2)

    job = poc.submit("byoc")
    printed = poc.nvflare("job", "monitor", job)

    assert "FINISHED:COMPLETED" in printed
    assert poc.end_of(job)["status"] == "FINISHED:COMPLETED"
    assert poc.model(job) == [2 * SUM]
    for site in SITES:
        said = poc.messages(site, job)
        file = re.escape(str(poc.local(site) / "node_group.yaml"))
        assert re.search(rf"node group of 2 \(\S+ x 1, \S+ x 1\), transport local, from site file {file}", said)
        assert said.count("node 0 rank 0 | got True on 0 of 2, node 0") == 2
        assert said.count("node 1 rank 1 | got False on 1 of 2, node 1") == 2
        assert poc.errors(site, job) == []


def test_job_without_code_runs_what_the_site_allows(poc: Poc) -> None:
    poc.write_job("allowed", str(allowed(poc)), ("site-1",))

    job = poc.submit("allowed")

    assert poc.end_of(job)["status"] == "FINISHED:COMPLETED"
    assert poc.model(job) == [SUM]
    assert poc.messages("site-1", job).count("got True on 0 of 2") == 1
    assert poc.errors("site-1", job) == []


def test_job_without_code_needs_our_class_on_the_site_s_list(poc: Poc) -> None:
    poc.write_job("unlisted", str(allowed(poc)), ("site-2",))

    job = poc.submit("unlisted")

    assert poc.end_of(job)["status"] == "FINISHED:ABNORMAL"
    refused = f"Component '{EXECUTOR}' at config path 'executors.#1.executor' is not in allow_list"
    assert any(refused in error for error in poc.errors("site-2", job))
    assert "node group of" not in poc.messages("site-2", job)


@pytest.mark.parametrize("what", ["script", "nodes"])
def test_job_without_code_gets_no_more_than_that(poc: Poc, what: str) -> None:
    # A script that lies beside the config is not in a custom folder, so NVFlare itself lets it pass.
    if what == "script":
        poc.write_job("other-script", "train.py", ("site-1",), code_in=".")
    else:
        poc.write_job("other-nodes", str(allowed(poc)), ("site-1",), components=(NODES,))

    job = poc.submit(f"other-{what}")

    assert poc.end_of(job)["status"] == "FINISHED:EXECUTION_EXCEPTION"
    site_file = poc.local("site-1") / "node_group.yaml"
    script = poc.kits / "site-1" / job / "app_site-1" / "train.py"
    refused, way_out = {
        "script": (f"run the script {script}", f"add the script to allowed_scripts in {site_file}"),
        "nodes": ("describe a node group (node_group)", f"describe the nodes in {site_file}"),
    }[what]
    sentence = (
        f"a job without the BYOC right (bring your own code) may not {refused} at this site: submit it with a"
        f" custom folder, as a user who has the right, or ask the site's admin to {way_out}"
    )
    assert any(f"task 'train' failed: {sentence}" in error for error in poc.errors("site-1", job))
    assert "got True" not in poc.messages("site-1", job)


def test_code_of_a_user_without_the_byoc_right_is_refused(poc: Poc) -> None:
    poc.write_job("lead", "train.py", SITES, code_in="custom")

    job = poc.submit("lead", "--startup-kit", str(poc.kits / LEAD))

    meta = poc.end_of(job)
    assert (meta["status"], meta["submitter_name"]) == ("FINISHED:FAILED_TO_RUN", LEAD)
    # site-1 has NVFlare's own policy, which gives leads the right.
    assert meta["job_deploy_detail"][:3] == [
        "server: OK",
        "site-1: OK",
        "site-2: NVFLARE_ERROR: BYOC not permitted",
    ]


WAITS = """
    import time

    print("here", flush=True)
    time.sleep(200)
"""


def test_a_client_job_that_is_told_to_end_takes_the_job_with_it(poc: Poc) -> None:
    """NVFlare learns it from the client job's exit code, and does not wait for the site's result."""
    poc.write_job("told-to-end", "train.py", ("site-1",), code_in="custom", code=WAITS)
    job = poc.submit("told-to-end")
    both = ("rank 0 | here", "rank 1 | here")
    assert wait_until(lambda: all(here in poc.messages_so_far("site-1", job) for here in both), LIMIT_S)
    client_job = the_one(poc.processes(), ".client.worker_process ")
    assert client_job is not None

    os.kill(client_job, signal.SIGTERM)

    # The grace is 4 s.
    assert wait_until(lambda: not poc.ours(), 5 + 4)
    assert poc.end_of(job)["status"] == "FINISHED:ABORTED"
    assert "the client job got SIGTERM: the run ends at this site" in poc.errors("site-1", job)
    aborted = r"task 'train' aborted: group stopped .*: the client job got SIGTERM"
    assert re.search(aborted, poc.messages("site-1", job))
