"""Groups whose other nodes dial in, over hosts of their own: when they come, who else comes, and what is left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from beds.hosts import ENVIRON, command_pid
from ssh_groups import LIMIT_S, TMP, SshGroups, wait_until

from nvflare_torchrun_plugin import join_file
from nvflare_torchrun_plugin.join_file import NAME, JoinFile

pytestmark = pytest.mark.real

NODES = ("h0", "h1", "h2")
JOIN = {"transport": "join", "join": {"wait": 90}}
# No torch in the ranks: three torchruns at a time are enough for a small machine.
SHOW = """
    import json, os, socket
    print(json.dumps([socket.gethostname(), os.environ["MASTER_ADDR"], int(os.environ["WORLD_SIZE"])]))
"""
# Everything that somebody who looks for open ports may do, at the one port that is there.
SCAN = """
import socket, ssl, sys
held = [socket.create_connection(("h0", int(sys.argv[1]))) for _ in range(40)]
for noise in (b"", b"\\0" * 1000, b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\x16\\x03\\x01\\xff\\xff" + b"x" * 70000):
    with socket.create_connection(("h0", int(sys.argv[1]))) as one:
        try:
            one.sendall(noise)
        except OSError:
            pass
context = ssl._create_unverified_context()
with context.wrap_socket(socket.create_connection(("h0", int(sys.argv[1])))) as stranger:
    stranger.recv(1000)
    stranger.sendall(b'{"kind": "stop", "grace": 0, "stacks": false}\\n')
print("scanned", flush=True)
sys.stdin.read()
"""


class Dialler:
    """A node that dials in."""

    def __init__(self, groups: SshGroups, host: str, *options: str) -> None:
        self._log = groups.folder / f"{host}-{len(list(groups.folder.glob('*.err')))}.err"
        app = groups.app_dir()
        app.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "nvflare_torchrun_plugin.node_agent", "--join", *options]
        with self._log.open("w") as log:
            self.process = groups.bed[host].popen(
                command, cwd=app, env={**ENVIRON, "HOME": "/root", "TMPDIR": TMP}, stderr=log
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        wait_until(text, lambda: text in self.said)

    def ended(self) -> int:
        return self.process.wait(LIMIT_S)


@pytest.fixture
def dial(groups: SshGroups) -> Iterator[Callable[..., Dialler]]:
    started: list[Dialler] = []

    def start(host: str, *options: str) -> Dialler:
        started.append(Dialler(groups, host, *options))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None and (pid := command_pid(one.process)):
            subprocess.run(["kill", str(pid)], check=False)
        one.ended()


def test_nodes_that_come_early_late_and_twice_make_the_group(
    groups: SshGroups, dial: Callable[..., Dialler]
) -> None:
    early = dial("h1")
    twice = dial("h1")
    running = groups.start(SHOW, NODES, group=JOIN, attempts=2, meet=1)
    file = groups.app_dir() / NAME
    wait_until("the join file", file.exists)
    with scanner(groups, JoinFile.read(str(file)).ports[0]):
        wrong = {"secret": b"0" * 32, "fingerprint": "0" * 64}
        for what, value in wrong.items():
            changed = JoinFile.read(str(file)).__dict__ | {what: value}
            JoinFile(**changed).write(str(groups.folder / what))
        bad = [dial("h2", "--file", str(groups.folder / what)) for what in wrong]
        bad[0].wait_for("it turns this node away: its secret is not the one of this client job")
        bad[1].wait_for("who listens there is not the client job of the join file: another certificate")
        # Nobody can take them for the node.
        late = dial("h2")
        ended = running.finish()

    ended.assert_ok()
    for attempt in (1, 2):
        assert [ended.said(rank, attempt) for rank in range(3)] == [[host, "h0", 3] for host in NODES]
    # Of the two on h1, the later one was the node to the end; both leave as if all were well.
    assert sorted([early.ended(), twice.ended(), late.ended()]) == [0, 0, 0]
    said = sorted([early.said.splitlines()[-1], twice.said.splitlines()[-1]])
    assert said[0].startswith("nvfl join: leaving: another process has come as h1: h1, process")
    assert said[1] == "nvfl join: leaving: the run ended"
    assert ended.log.count("h2 has joined") == 1
    assert "turned away a connection from" in ended.log
    secret = JoinFile.read(str(groups.folder / "fingerprint")).secret.hex()
    assert secret not in ended.log + early.said + twice.said + late.said
    assert not file.exists()


def scanner(groups: SshGroups, port: int) -> Any:
    """Somebody on h2 who has looked at the port, and keeps half-open connections to it."""
    process = groups.bed["h2"].popen(
        [sys.executable, "-c", SCAN, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "scanned\n"

    class Until:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            process.communicate("", timeout=10)

    return Until()


def test_an_absent_node_is_named(groups: SshGroups, dial: Callable[..., Dialler]) -> None:
    dial("h1")

    ended = groups.run(SHOW, NODES, group={"transport": "join", "join": {"wait": 5}}, meet=1)

    node_rank, host, what = ended.blame()
    assert (node_rank, host) == (2, "h2")
    assert what.startswith(
        "no agent could be started there, join ended with exit code 1: node rank 2 is absent: nobody has joined as"
        " that since 5 s ago; does 'python -m nvflare_torchrun_plugin.node_agent --join' run there"
    )


def test_nodes_without_a_common_folder_get_a_copy_and_have_a_file_made_beforehand(
    groups: SshGroups, dial: Callable[..., Dialler]
) -> None:
    script = """
        import json, os
        import helper
        print(json.dumps([os.getcwd(), helper.__file__]))
    """
    (keys := groups.folder / "keys").mkdir()
    assert join_file.main([str(keys), "--ports", "30500", "30500"]) == 0
    node = dial("h1", "--file", str(keys / join_file.NODES_FILE), "--address", "h0-6", "--stay")
    group = {"transport": "join", "join": {"file": str(keys / join_file.CLIENT_FILE)}}

    ended = groups.run(script, NODES[:2], group=group, private=True, files={"helper.py": ""}, attempts=2)

    ended.assert_ok()
    said = [ended.said(1, attempt) for attempt in (1, 2)]
    assert said[0] == said[1]
    cwd, helper = said[0]
    assert cwd.startswith(f"{TMP}/nvfl-agent-")
    assert helper == f"{cwd}/custom/helper.py"
    # It is there for the next job.
    node.wait_for("a client job ends: the run ended")
    assert node.process.poll() is None


@pytest.mark.alone
def test_a_node_whose_cable_is_cut_is_lost_and_comes_back(groups: SshGroups, dial: Callable[..., Dialler]) -> None:
    stay = """
        import json, os, signal, socket, sys
        print(json.dumps(socket.gethostname()), flush=True)
        if not os.path.exists(sys.argv[1]):
            signal.pause()
    """
    node = dial("h1")
    go = groups.folder / "go"
    running = groups.start(stay, NODES[:2], group=JOIN, node_timeout=4, attempts=2, args=[str(go)])
    running.wait_for_lines(2)

    with groups.bed.unplugged("h1"):
        first = running.logs / "attempt-0001" / "verdict.json"
        wait_until("the first attempt has ended", first.exists)
        # Nobody on h1 has heard of the end: its ranks end by themselves.
        groups.bed.wait_for("no rank on h1", lambda: not ranks(groups, "h1"))
        go.touch()
    ended = running.finish()

    ended.assert_ok()
    assert [ended.said(rank, 2) for rank in range(2)] == ["h0", "h1"]
    failure = json.loads(first.read_text())["failure"]
    assert (failure["node_rank"], failure["host"]) == (1, "h1")
    assert failure["what"] == "no sign of life from it for 4 s (node_timeout)"
    assert node.ended() == 0


def ranks(groups: SshGroups, host: str) -> list[str]:
    return [line for line in groups.processes(host).get(host, []) if "nvflare_torchrun_plugin.rank" in line]


# A fake: it stands where the translator finds torchrun, and tells as which rank it was called.
TORCHRUN = """
import os, subprocess, sys
given = [word for word in sys.argv if "node_rank" in word or "nnodes" in word]
print("called as", given, flush=True)
environ = {**os.environ, "RANK": given[1].partition("=")[2], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
sys.exit(subprocess.run([sys.executable, "-u", "-m", "nvflare_torchrun_plugin.rank"], env=environ).returncode)
"""


@pytest.mark.alone
def test_64_nodes_at_once(groups: SshGroups, dial: Callable[..., Dialler]) -> None:
    stand_in = groups.app_dir() / "custom" / "torch" / "distributed"
    stand_in.mkdir(parents=True)
    for package in (stand_in, stand_in.parent):
        (package / "__init__.py").touch()
    (stand_in / "run.py").write_text(TORCHRUN)
    diallers = [dial(NODES[rank % 3], "--node-rank", str(rank)) for rank in range(1, 65)]

    ended = groups.run("", group={**JOIN, "nodes": 65})

    ended.assert_ok()
    for rank in range(65):
        assert f"called as ['--nnodes=65', '--node_rank={rank}']" in ended.node_log(rank)
    assert [one.ended() for one in diallers] == [0] * 64
