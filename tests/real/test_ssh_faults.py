"""What goes wrong with the hosts of a group: each fault names its node, ends in time and leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from beds.hosts import ENVIRON, command_pid
from simulation import Simulator
from ssh_groups import LIMIT_S, SshGroups, wait_until

import nvflare_torchrun_plugin
from nvflare_torchrun_plugin.node_agent import SWEEP_BOUND
from nvflare_torchrun_plugin.supervision.group import END_BOUND

pytestmark = [pytest.mark.real, pytest.mark.alone]

HOSTS = ("h0", "h1", "h2")
NEVER = "raise SystemExit('this must not run')"
FOREVER = """
    import time
    print("up", flush=True)
    time.sleep(600)
"""
EARLY_S = 20.0
"""Seconds in which a group ends whose ranks cannot be started, on a busy machine."""


def test_a_host_that_is_down(groups: SshGroups) -> None:
    with groups.bed.unplugged("h2"):
        ended = groups.run(NEVER, HOSTS)

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (2, "h2")
    assert what.startswith(
        "no agent could be started there, ssh ended with exit code 255: ssh: connect to host h2"
    )
    assert ended.seconds < EARLY_S


def test_a_host_that_is_cut_off_while_it_trains(groups: SshGroups) -> None:
    running = groups.start(FOREVER, HOSTS, node_timeout=3)
    running.wait_for_lines(3)
    with groups.bed.unplugged("h2"):
        cut = time.monotonic()
        # Nobody can tell it: it notices the silence, and ends its rank after a grace of 1 s.
        groups.wait_until_gone("h2", limit_s=3 + 1 + 5)
        ended = running.finish()
        assert time.monotonic() - cut < 3 + 1 + END_BOUND

    assert ended.blame() == (2, "h2", "no sign of life from it for 3 s (node_timeout)")
    assert ended.verdict["victims"] == [0, 1, 2]
    (left,) = ended.verdict["leftovers"]
    assert left.startswith("node 2 (h2): it is not confirmed that all processes there are gone: ")


# Works for ever while all three nodes are there.
TRAIN = """
    import time

    import nvflare.client as flare
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flare.init(rank=dist.get_rank())
    received = flare.receive()
    print("works", flush=True)
    if dist.get_world_size() == 3:
        time.sleep(600)
    if received:
        flare.send(flare.FLModel(params={name: value + 1 for name, value in received.params.items()}))
    dist.destroy_process_group()
"""


def test_a_task_goes_on_while_a_host_that_is_cut_off_is_still_looked_for(
    groups: SshGroups, simulator: Simulator
) -> None:
    simulator.sites = ("site-1",)
    # Until the cleanup there is given up; the bed's own clients give up earlier.
    ssh = ["ssh", "-o", "ConnectTimeout=100", "{host}", "{command}"]
    simulator.write_site_file(json.dumps({"nodes": HOSTS, "transport": ssh}))
    simulator.write_job(TRAIN, nnodes="2:3", max_task_attempts=2, node_timeout=3, stop_grace_period=1)
    with (groups.folder / "output.txt").open("w") as output:
        running = groups.bed["h0"].popen(
            simulator.command(), cwd=groups.folder, env=simulator.environ, stdout=output, stderr=output
        )
    try:
        for rank in range(3):
            simulator.wait_for_message("site-1", f"rank {rank} | works")
        with groups.bed.unplugged("h2"):
            assert running.wait(LIMIT_S) == 0
    finally:
        running.kill()

    assert simulator.model() == [1.0]
    said = simulator.messages("site-1")
    failed = said.index("task 'train' failed: group failed: node 2 (h2): no sign of life from it for 3 s")
    began = said.index("task group 2-")
    left = said.index("LEFT OVER: node 2 (h2): it is not confirmed that all processes there are gone: ")
    assert failed < began < left
    seconds = simulator.seconds_between("site-1", "group failed: node 2", "task group 2-")
    assert seconds < SWEEP_BOUND
    assert "node h2 sits out for " in said
    (file,) = simulator.workspace.rglob("torchrun/attempt-0001/verdict.json")
    assert json.loads(file.read_text())["leftovers"] == [said[left:].partition(": ")[2].partition("\n")[0]]


def test_a_host_that_refuses_the_key(groups: SshGroups) -> None:
    with groups.bed.key_refused("h1"):
        ended = groups.run(NEVER, HOSTS)

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (1, "h1")
    assert what.startswith("no agent could be started there, ssh ended with exit code 255: ")
    assert "Permission denied (publickey)" in what
    assert ended.seconds < EARLY_S


def test_a_host_with_another_key(groups: SshGroups) -> None:
    with groups.bed.host_key_changed("h1"):
        ended = groups.run(NEVER, HOSTS)

    assert ended.blame() == (
        1,
        "h1",
        "no agent could be started there, ssh ended with exit code 255: Host key verification failed.",
    )
    assert any("IDENTIFICATION HAS CHANGED" in line for line in ended.verdict["failure"]["last_lines"])
    assert ended.seconds < EARLY_S


def test_no_ssh_client(groups: SshGroups) -> None:
    ended = groups.run(NEVER, environ={"PATH": "/no/such"})

    assert ended.blame() == (
        1,
        "h1",
        "the agent cannot be started: [Errno 2] No such file or directory: 'ssh'",
    )
    assert ended.seconds < EARLY_S


def test_no_python(groups: SshGroups) -> None:
    ended = groups.run(NEVER, ["h0", "h1", {"host": "h2", "python": "/no/such/python"}])

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (2, "h2")
    assert what.startswith("no agent could be started there, ssh ended with exit code 127: ")
    assert "/no/such/python" in what
    assert ended.seconds < EARLY_S


def test_another_torch(groups: SshGroups) -> None:
    """The other torch is a fake: metadata alone, earlier in the search path."""
    fake = groups.folder / "site"
    (fake / "torch-2.4.0.dist-info").mkdir(parents=True)
    python = groups.python("python-with-other-torch", f"export PYTHONPATH={fake}")

    ended = groups.run(NEVER, ["h0", {"host": "h1", "python": python}])

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (1, "h1")
    assert what.startswith("torch is 2.4.0 on node h1, but 2.")
    assert " on node h0: install the same version on both" in what
    assert ended.seconds < EARLY_S


def test_another_version_of_the_plugin(groups: SshGroups) -> None:
    package = Path(nvflare_torchrun_plugin.__file__).parent
    fake = groups.folder / "site" / package.name
    shutil.copytree(package, fake, ignore=shutil.ignore_patterns("__pycache__"))
    with (fake / "__init__.py").open("a") as file:
        file.write("__version__ = '0.0.7'\n")
    python = groups.python("python-with-other-plugin", f"export PYTHONPATH={fake.parent}")

    ended = groups.run(NEVER, ["h0", {"host": "h1", "python": python}])

    assert ended.blame() == (
        1,
        "h1",
        f"nvflare-torchrun-plugin is 0.0.7 on node h1, but {nvflare_torchrun_plugin.__version__} on node h0:"
        " install the same version on both, or name another interpreter (python)",
    )
    assert ended.seconds < EARLY_S


def test_another_nvflare_is_only_worth_a_warning(groups: SshGroups) -> None:
    fake = groups.folder / "site"
    (fake / "nvflare-2.8.1.dist-info").mkdir(parents=True)
    python = groups.python("python-with-other-nvflare", f"export PYTHONPATH={fake}")

    ended = groups.run("", ["h0", {"host": "h1", "python": python}])

    ended.assert_ok()
    (warning,) = [line for line in ended.log.splitlines() if "nvflare" in line]
    assert warning.startswith("node 1 (h1) has nvflare 2.8.1, node 0 (h0) has 2.")


def test_no_gpu_where_one_is_wanted(groups: SshGroups) -> None:
    if list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine, and so each host of the bed, has a GPU")

    ended = groups.run(NEVER, ["h0", {"host": "h1", "nproc_per_node": "gpu"}], nproc_per_node=None)

    assert ended.blame() == (1, "h1", "nproc_per_node is 'gpu', but no GPU is in sight there")
    assert ended.seconds < EARLY_S


def test_a_master_name_that_is_loopback_on_another_host(groups: SshGroups) -> None:
    with groups.bed.own_hosts("h1", "127.0.1.1 h0"):
        ended = groups.run(NEVER)

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (1, "h1")
    assert what.startswith("the master address means 127.0.1.1 there, the node's own loopback: ")
    assert ended.seconds < EARLY_S


def test_a_master_name_that_a_host_does_not_know(groups: SshGroups) -> None:
    bed = groups.bed
    line = f"{bed['h0'].address} head.pod"
    with bed.own_hosts("h0", line), bed.own_hosts("h2", line):
        ended = groups.run(NEVER, [{"host": "h0", "address": "head.pod"}, "h1", "h2"], join_timeout=4)

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (1, "h1")
    # Its own answer, with the reason, or ours: both give up at the same time.
    assert what.startswith("cannot resolve master address 'head.pod'")
    assert ended.seconds < EARLY_S


def _inside(pid: int) -> str:
    """The process's id in its own namespace."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[-1] for line in status if line.startswith("NSpid:"))


def test_a_stale_torchrun_of_an_earlier_attempt_is_refused(groups: SshGroups) -> None:
    """It knows the new port, but not the new run id; and it is there before the real node 1 is."""
    port = 29511
    free, mark = groups.folder / "free", groups.folder / "stale"
    stale_script = groups.folder / "stale.py"
    stale_script.write_text(f"open({str(mark)!r}, 'w')")
    contract = {
        "NVFL_NNODES": "2",
        "NVFL_NODE_RANK": "1",
        "NVFL_MASTER_ADDR": "h0",
        "NVFL_MASTER_PORT": str(port),
        "NVFL_RUN_ID": "1-0123456789abcdef",
    }
    translator = [sys.executable, "-m", "nvflare_torchrun_plugin.torchrun_node", "--nproc-per-node=1"]
    stale = groups.bed["h1"].popen(
        [*translator, str(stale_script)],
        env={**ENVIRON, **contract, "HOME": "/root", "TMPDIR": str(groups.folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    running = groups.start(
        f"""
        import json, os, socket, time
        while not os.path.exists({str(free)!r}):
            time.sleep(0.05)
        print(json.dumps([socket.gethostname(), os.environ["WORLD_SIZE"]]))
        """,
        group={"master_port_range": [port, port]},
    )

    def has_come() -> bool:
        pid = command_pid(stale)
        return (
            pid is not None
            and f"pid={_inside(pid)}," in groups.bed["h1"].run(["ss", "-Htnp", f"dport = :{port}"]).stdout
        )

    try:
        wait_until("the stale torchrun has reached the new group's port", has_come)
        free.touch()
        ended = running.finish()
    finally:
        stale_pid = command_pid(stale)
        if stale_pid is not None:
            os.kill(stale_pid, signal.SIGKILL)
        stale.wait(10)

    ended.assert_ok()
    assert [ended.said(rank) for rank in (0, 1)] == [["h0", "2"], ["h1", "2"]]
    assert not mark.exists()
