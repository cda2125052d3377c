"""Groups over several hosts by a real ssh: what reaches the ranks on other hosts, and how the hosts may be."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent

import pytest
from beds.hosts import ENVIRON
from simulation import Simulator, finish
from ssh_groups import DRIVER, PROFILE, TMP, Running, SshGroups, wait_until

pytestmark = pytest.mark.real

HOSTS = ("h0", "h1", "h2")
ODD = "a b\n'\"$HOME é"

# Adds up a digit of its own from every rank, and looks for the secret in every command line of its host.
ALL_REDUCE = """
    import contextlib
    import json
    import os
    import socket
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist

    words = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words.append(path.read_bytes())
    dist.init_process_group("gloo")
    total = torch.tensor([10 ** dist.get_rank()])
    dist.all_reduce(total)
    print(json.dumps({
        "host": socket.gethostname(),
        "total": total.item(),
        "args": sys.argv[1:],
        "env": dict(os.environ),
        "agents": sum(b"node_agent" in line for line in words),
        "told": sum(b"hush" in line for line in words),
    }))
    dist.destroy_process_group()
"""
WHERE = """
    import json, os, socket
    print(json.dumps([socket.gethostname(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]]))
"""

# What FedAvg's model grows by tells which ranks took part: each adds its rank + 1 and ten times its node rank.
TRAIN = """
    import os
    import sys
    import time

    import nvflare.client as flare
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flare.init(rank=dist.get_rank())
    received = flare.receive()
    while received and not os.path.exists(sys.argv[1] + str(received.current_round)):
        time.sleep(0.05)
    total = torch.tensor([dist.get_rank() + 1.0 + 10 * int(os.environ["GROUP_RANK"])])
    dist.all_reduce(total)
    print("works in", os.getcwd())
    if received:
        params = {name: value + total.item() for name, value in received.params.items()}
        flare.send(flare.FLModel(params=params))
    dist.destroy_process_group()
"""
LISTEN = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
sys.stdin.read()
"""


@contextmanager
def listening(groups: SshGroups, port: int) -> Iterator[None]:
    """Something on h0 has the port."""
    process = groups.bed["h0"].popen(
        [sys.executable, "-c", LISTEN, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    try:
        yield
    finally:
        process.communicate("", timeout=10)


def test_six_ranks_on_three_hosts(groups: SshGroups) -> None:
    ended = groups.run(
        ALL_REDUCE,
        HOSTS,
        nproc_per_node=2,
        args=[ODD, "--token=${secret:SITE_TOKEN}"],
        secrets={"SITE_TOKEN": "hush-1"},
        environ={"NCCL_X": f"hush-2{ODD}", "MY_VALUE": "hush-3", "OTHER": "stays"},
        group={
            "env": {"SITE_VALUE": f"hush-4{ODD}", "NCCL_SOCKET_IFNAME": "mine"},
            "forward_env": ["NCCL_*", "MY_*", "PYTHONPATH"],
        },
    )

    ended.assert_ok()
    said = [ended.said(rank) for rank in range(6)]
    assert [one["host"] for one in said] == ["h0", "h0", "h1", "h1", "h2", "h2"]
    assert {one["total"] for one in said} == {111111}
    for rank, one in enumerate(said):
        env = one["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) == (str(rank), str(rank % 2), str(rank // 2))
        assert one["args"] == [ODD, "--token=hush-1"]
        assert env["NCCL_X"] == f"hush-2{ODD}"
        assert env["MY_VALUE"] == "hush-3"
        assert env["SITE_VALUE"] == f"hush-4{ODD}"
        assert env["GLOO_SOCKET_IFNAME"] == "eth0"
        assert env["NCCL_SOCKET_IFNAME"] == "mine"
        # Node 0 is the client job's own host; what is not forwarded is not on another one.
        assert env.get("OTHER") == ("stays" if rank < 2 else None)
        assert one["agents"] > 0
        assert one["told"] == 0


def test_a_host_that_does_not_share_the_folder_gets_one_copy(groups: SshGroups) -> None:
    script = """
        import json
        import os
        from pathlib import Path

        import helper

        print(json.dumps([os.getcwd(), __file__, helper.__file__, helper.WORD]))
        if os.environ["RANK"] == "0":
            attempts = Path("attempts")
            with attempts.open("a") as file:
                file.write("x")
            if attempts.read_text() == "xx":
                Path(helper.__file__).write_text("WORD = 'changed'")
    """

    ended = groups.run(script, private=True, files={"helper.py": "WORD = 'first'"}, attempts=3)

    ended.assert_ok()
    app = str(groups.app_dir(private=True))
    for rank in range(2):
        said = [ended.said(rank, attempt) for attempt in (1, 2, 3)]
        for cwd, script_file, helper_file, _ in said:
            assert (script_file, helper_file) == (f"{cwd}/custom/train.py", f"{cwd}/custom/helper.py")
        assert [word for _, _, _, word in said] == ["first", "first", "changed"]
        first, second, third = (cwd for cwd, _, _, _ in said)
        if rank == 0:
            assert (first, second, third) == (app, app, app)
        else:
            assert first.startswith(f"{TMP}/nvfl-agent-")
            assert second == first
            assert third.startswith(f"{TMP}/nvfl-agent-")
            assert third != first


def test_a_host_that_shares_the_folder_works_in_its_copy_when_told_to(groups: SshGroups) -> None:
    script = """
        import json, os
        import helper
        path = os.environ["PYTHONPATH"]
        print(json.dumps([os.getcwd(), os.path.exists("shared"), __file__, helper.__file__, path]))
    """
    app = str(groups.app_dir())
    groups.app_dir().mkdir()
    (groups.app_dir() / "shared").touch()

    ended = groups.run(script, group={"stage": "always"}, files={"helper.py": ""})

    ended.assert_ok()
    said = [ended.said(rank) for rank in range(2)]
    copy = said[1][0]
    assert copy.startswith(f"{TMP}/nvfl-agent-")
    for (cwd, sees_all, *files), folder in zip(said, (app, copy), strict=True):
        assert (cwd, sees_all) == (folder, folder == app)
        assert files == [f"{folder}/custom/train.py", f"{folder}/custom/helper.py", f"{folder}/custom"]


def test_a_folder_that_is_not_shared_and_must_not_be_sent(groups: SshGroups) -> None:
    ended = groups.run(WHERE, private=True, group={"stage": "never"})

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (1, "h1")
    assert what == (
        f"there is no directory '{groups.app_dir(private=True)}', in which the ranks work: let the node have a"
        " copy of it (stage: auto, --copy), or share it"
    )


def test_a_login_shell_that_talks(groups: SshGroups) -> None:
    noise = f"{PROFILE}\necho welcome\necho grumble >&2\nprintf 'a word without an end'"
    with groups.bed.login_shell("h1", noise):
        ended = groups.run(WHERE)

    ended.assert_ok()
    assert ended.said(1)[0] == "h1"
    for text in ("welcome", "grumble", "a word without an end"):
        assert text in ended.node_log(1).splitlines()


def test_a_host_whose_own_name_is_loopback_on_it(groups: SshGroups) -> None:
    """Debian's way: 127.0.1.1 for the host's own name, so the master address must be another one."""
    with groups.bed.own_hosts("h0", "127.0.1.1 h0"):
        ended = groups.run(ALL_REDUCE)

    ended.assert_ok()
    for rank in range(2):
        said = ended.said(rank)
        assert said["total"] == 11
        assert said["env"]["MASTER_ADDR"] == groups.bed["h0"].address


def test_a_master_name_that_is_known_late(groups: SshGroups) -> None:
    bed = groups.bed
    line = f"{bed['h0'].address} head.pod"
    with bed.own_hosts("h0", line):
        running = groups.start(WHERE, [{"host": "h0", "address": "head.pod"}, "h1"])
        wait_until("h1 has an agent", lambda: bool(groups.processes("h1")))
        with bed.own_hosts("h1", line):
            ended = running.finish()

    ended.assert_ok()
    assert ended.said(1)[:2] == ["h1", "head.pod"]


def test_a_busy_master_port(groups: SshGroups) -> None:
    with listening(groups, 29500):
        ended = groups.run(WHERE, group={"master_port_range": [29500, 29501]})

        ended.assert_ok()
        assert [ended.said(rank)[2] for rank in (0, 1)] == ["29501", "29501"]

        refused = groups.run(WHERE, group={"master_port_range": [29500, 29500]})

    assert refused.log.splitlines()[-1].endswith(
        "PlanError: no free port in master_port_range 29500..29500 on this host; widen the range"
    )


def test_a_sites_own_transport(groups: SshGroups) -> None:
    """Once with the agent's command as one word, and once through a program that takes its words."""
    enter = groups.folder / "enter"
    enter.write_text(
        f"#!{sys.executable}\nimport os, shlex, sys\n"
        "os.execvp('ssh', ['ssh', '-T', sys.argv[1], shlex.join(sys.argv[2:])])\n"
    )
    enter.chmod(0o755)
    odd = groups.python("py 'thon\"", "")
    for transport in (["ssh", "-o", "BatchMode=yes", "{host}", "--", "{command}"], [str(enter), "{host}"]):
        ended = groups.run(WHERE, ["h0", {"host": "h1", "python": odd}], group={"transport": transport})

        ended.assert_ok()
        assert [ended.said(rank)[0] for rank in (0, 1)] == ["h0", "h1"]
        shutil.rmtree(ended.logs)


def test_a_command_that_enters_namespaces_and_different_process_counts(groups: SshGroups) -> None:
    """The client job has h0's network and name, but sees this machine's processes, so that it may enter h1."""
    entries = "; ".join(f'[ "$1" != {name} ] || pid={groups.bed[name].space.pid}' for name in ("h1", "h2"))
    enter = groups.folder / "enter"
    enter.write_text(
        f'#!/bin/sh\n{entries}\nshift\nexec nsenter -t "$pid" -m -u -i -n -p --wdns=/ env TMPDIR={TMP} "$@"\n'
    )
    enter.chmod(0o755)
    temporary = groups.folder / "tmp"
    temporary.mkdir()
    spec = {
        "script": dedent(ALL_REDUCE),
        "app_dir": str(groups.app_dir()),
        "logs": str(groups.folder / "logs"),
        "group": {
            "nodes": [
                {"host": "h0", "address": groups.bed["h0"].address, "nproc_per_node": 1},
                {"host": "h1", "nproc_per_node": 2},
            ],
            "transport": [str(enter), "{host}"],
        },
        "nproc_per_node": None,
    }
    process = subprocess.Popen(
        ["nsenter", "-t", str(groups.bed["h0"].space.pid), "-n", "-u", sys.executable, str(DRIVER)],
        env={**ENVIRON, "HOME": "/root", "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    ended = Running(process, spec).finish()

    ended.assert_ok()
    said = [ended.said(rank) for rank in range(3)]
    assert [(each["host"], each["total"]) for each in said] == [("h0", 111), ("h1", 111), ("h1", 111)]
    assert {each["env"]["MASTER_ADDR"] for each in said} == {groups.bed["h0"].address}
    assert list(temporary.glob("nvfl*")) == []


def waits(simulator: Simulator, number: int) -> bool:
    """Whether the group of this number waits for its task."""
    log = simulator.workspace / "site-1" / "log.txt"
    return log.exists() and re.search(f"task group {number}-[0-9a-f]+: waiting", log.read_text()) is not None


def stop_agent(groups: SshGroups, host: str, group: int) -> None:
    """SIGSTOP for the host's agent of a group, which has a directory of that name open."""
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (directory / "cmdline").read_bytes()
            open_files = [str(file.readlink()) for file in (directory / "fd").iterdir()]
            if (
                (directory / "ns" / "pid").readlink() == groups.bed[host].space.ids["pid"]
                and words.endswith(b"nvflare_torchrun_plugin.node_agent\0")
                and any(file.startswith(f"{TMP}/nvfl-agent-{group}-") for file in open_files)
            ):
                os.kill(int(directory.name), signal.SIGSTOP)
                return
    raise AssertionError(f"there is no agent of group {group} on {host}")


def test_three_rounds_in_the_simulator_the_second_warm_and_the_last_without_a_host_that_fell_silent(
    groups: SshGroups, simulator: Simulator
) -> None:
    simulator.sites = ("site-1",)
    may_end = str(simulator.job.parent / "may end ")
    simulator.write_job(TRAIN, rounds=3, launch_once=False, nnodes="1:3", warm_start=True, script_args=[may_end])
    simulator.write_site_file("nodes: [h0, h1, h2]\ntransport: ssh\nstage: always\n")

    process = groups.bed["h0"].popen(
        simulator.command(),
        cwd=simulator.job.parent,
        env=simulator.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until("the second group waits", lambda: waits(simulator, 2))
        Path(f"{may_end}0").touch()
        wait_until("the third group waits", lambda: waits(simulator, 3))
        stop_agent(groups, "h2", 3)
    finally:
        for number in range(3):
            Path(f"{may_end}{number}").touch()
        output = finish(process)

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    assert simulator.model() == [2 * (1 + 12 + 23) + (1 + 12)]
    said = simulator.messages("site-1")
    assert re.search("task group 2-[0-9a-f]+: warm, all ranks were waiting", said)
    silent = "nodes of the group started ahead are silent: h2: no answer from its agent within 2 s"
    assert f"the task starts cold: {silent}" in said
    assert "node h2 sits out for " in said
    for rank, rounds in ((1, 3), (2, 2)):
        copies = re.findall(rf"node {rank} rank {rank} \| works in (.*)", said)
        assert len(copies) == rounds
        # One copy serves all rounds.
        assert len(set(copies)) == 1
        assert copies[0].startswith(f"{TMP}/nvfl-agent-")
