"""Nodes that dial in, with real processes on both sides: who gets in, who does not, and what comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from joining import Client
from standins import BOUND, until

from nvflare_torchrun_plugin import join_file, transports, wire
from nvflare_torchrun_plugin.join_file import JoinFile
from nvflare_torchrun_plugin.joining import reception
from nvflare_torchrun_plugin.joining.reception import ReceptionError
from nvflare_torchrun_plugin.node import procs


def test_agents_come_by_connections_that_nodes_have_opened(client: Client, node: Any) -> None:
    first = node(1)
    client.wait_for("node-rank-1 has joined: host")
    bridge = client.bridge("node-rank-1")
    hello = bridge.hello()
    bridge.send(wire.Prepare(None, "/", "no-marker", 1.0, 30.0))
    assert bridge.frame() == wire.Ready(False, None, None, None)
    # Another one while the first is there, as for a group that is started ahead, and the next one after it.
    others = [client.bridge("node-rank-1") for _ in range(2)]
    pids = [hello.pid, *(other.hello().pid for other in others)]
    assert len(set(pids)) == 3
    assert {procs.parent(pid) for pid in pids} == {first.process.pid}
    for one in (bridge, *others):
        one.send(wire.Stop(0.0))
        code, frames, errors = one.finish()
        assert (code, errors) == (0, "")
        end = wire.decode_frame(frames[-1])
        assert isinstance(end, wire.End)
        assert (end.code, end.leftovers, end.error) == (None, (), None)
    # It may be on its way in once more, and would then learn of the end otherwise.
    until(lambda: client.reception._seats[1].idle is not None, "its next connection")
    client.end()
    assert first.ended() == 0
    assert first.said.endswith("nvfl join: leaving: the run ended\n")
    assert not client.file.exists()


def test_an_agent_that_gets_no_more_orders_ends(client: Client, node: Any) -> None:
    node(1)
    for end in ("close", "kill"):
        bridge = client.bridge("node-rank-1")
        pid = bridge.hello().pid
        if end == "kill":
            bridge.process.kill()
        else:
            assert bridge.process.stdin is not None
            bridge.process.stdin.close()
        until(lambda pid=pid: not procs.runs(pid), "the agent is gone")  # type: ignore[misc]
        bridge.process.wait(BOUND)


def test_an_agent_that_is_killed_is_a_broken_connection_and_others_are_not(client: Client, node: Any) -> None:
    first = node(1)
    lost, other = client.bridge("node-rank-1"), client.bridge("node-rank-1")
    lost_pid, other_pid = lost.hello().pid, other.hello().pid

    first.process.kill()
    assert first.ended() == -signal.SIGKILL

    for bridge, pid in ((lost, lost_pid), (other, other_pid)):
        code, _, errors = bridge.finish()
        assert (code, errors) == (1, "the connection of node node-rank-1 has broken\n")
        until(lambda pid=pid: not procs.runs(pid), "the agent is gone")  # type: ignore[misc]
    client.wait_for("node-rank-1 is not there any more")


def test_how_an_agent_ended_is_the_bridges_exit_code(client: Client, node: Any) -> None:
    node(1)
    bridge = client.bridge("node-rank-1")
    os.kill(bridge.hello().pid, signal.SIGKILL)
    code, _, errors = bridge.finish()
    assert (code, errors) == (128 + signal.SIGKILL, "")


def test_nodes_may_come_before_their_client_job(tmp_path: Path, node: Any, ended: contextlib.ExitStack) -> None:
    nodes = [node(rank) for rank in (1, 2)]
    for one in nodes:
        one.wait_for("waiting for the join file: [Errno 2]")
    client = Client(tmp_path, 3)
    ended.callback(client.end)

    group = client.meet()

    # Both are this machine, and a name that several nodes have tells nothing.
    assert [one.host for one in group.nodes] == [socket.gethostname(), "node-rank-1", "node-rank-2"]
    assert client.bridge("node-rank-2").hello().host == socket.gethostname()
    assert JoinFile.read(str(client.file)).identity is None
    assert oct(client.file.stat().st_mode & 0o777) == "0o600"


def test_a_node_that_comes_alone_is_known_by_its_name(client: Client, node: Any) -> None:
    node(2)
    client.wait_for("node-rank-2 has joined")
    client.reception._seats[0].name = "elsewhere"

    group = client.meet(0.01)

    assert [one.host for one in group.nodes][1:] == ["node-rank-1", socket.gethostname()]
    assert client.bridge(socket.gethostname()).hello().host == socket.gethostname()


def test_a_node_is_found_by_its_name_where_it_has_no_rank(
    tmp_path: Path, node: Any, ended: contextlib.ExitStack
) -> None:
    client = Client(tmp_path, 2)
    ended.callback(client.end)
    client.reception._seats[1].name = "n2.cluster"
    node(None, SLURMD_NODENAME="N2")
    other = node(None)

    client.wait_for("n2.cluster has joined")
    other.wait_for("does not say its node rank, and is none of the job's nodes")


def test_the_scheduler_tells_rank_and_address(tmp_path: Path, node: Any, ended: contextlib.ExitStack) -> None:
    client = Client(tmp_path, 4, run_id="77")
    ended.callback(client.end)
    # An address of this machine that the file does not name.
    made = replace(JoinFile.read(str(client.file)), address=None)
    made.write(str(client.file))
    contract = {"NVFL_NNODES": "4", "NVFL_NODE_RANK": "1", "NVFL_MASTER_ADDR": "127.0.0.2", "NVFL_RUN_ID": "77"}
    node(None, **contract)
    node(None, LWS_LEADER_ADDRESS="127.0.0.3", LWS_GROUP_SIZE="4", LWS_WORKER_INDEX="2")
    node(None, MASTER_ADDR="127.0.0.4", NNODES="4", JOB_COMPLETION_INDEX="3")
    lost = node(None)

    for rank in (1, 2, 3):
        client.wait_for(f"node-rank-{rank} has joined")
    lost.wait_for("neither the environment nor .nvfl-join.json tells the client job's address")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"NVFL_NNODES": "2", "NVFL_NODE_RANK": "x"}, "NVFL_NODE_RANK is 'x': must be this node's rank"),
        ({"NVFL_NODE_RANK": "x"}, "nvfl join: waiting for the join file"),
    ],
)
def test_a_wrong_variable_is_named(node: Any, environ: dict[str, str], said: str) -> None:
    """One of somebody else's tells nothing."""
    wrong = node(None, "--patience", "0.2", **environ)
    assert wrong.ended() == (2 if "must be" in said else 0)
    assert said in wrong.said


def test_who_comes_later_takes_the_place(client: Client, node: Any) -> None:
    returned: list[str] = []
    client.reception.returned = returned.append
    first = node(1)
    client.wait_for("node-rank-1 has joined")
    running = client.bridge("node-rank-1")
    running.hello()

    second = node(1)

    client.wait_for("node-rank-1 has joined again")
    first.wait_for(f"leaving: another process has come as node-rank-1: {socket.gethostname()}, process")
    assert returned == ["node-rank-1"] * 2
    # What the first one runs, it runs to the end.
    running.send(wire.Prepare(None, "/", "no-marker", 1.0, 30.0))
    assert running.frame() == wire.Ready(False, None, None, None)
    assert first.process.poll() is None
    new = client.bridge("node-rank-1")
    assert procs.parent(new.hello().pid) == second.process.pid
    for bridge in (running, new):
        bridge.send(wire.Stop(0.0))
        assert bridge.finish()[0] == 0
    assert first.ended() == 0


@pytest.mark.slow
def test_an_absent_node_is_named_and_a_late_one_is_waited_for(
    tmp_path: Path, node: Any, ended: contextlib.ExitStack
) -> None:
    client = Client(tmp_path, 3, wait=3)
    ended.callback(client.end)
    waiting = client.bridge("node-rank-1")
    late = node(1)
    waiting.hello()
    code, frames, errors = client.bridge("node-rank-2").finish()
    assert (code, frames) == (1, [])
    assert errors.startswith("node rank 2 is absent: nobody has joined as that since ")
    late.process.kill()
    code, _, errors = waiting.finish()
    assert code == 1
    code, _, errors = client.bridge("node-rank-1").finish()
    assert (code, errors.partition(":")[0]) == (1, "node rank 1 is absent")
    assert f"ago, on host {socket.gethostname()}" in errors


def test_who_is_no_node_of_the_job_is_sent_away_for_good(client: Client, node: Any) -> None:
    assert node(3).ended() == 0
    stays = node(4, "--stay")
    stays.wait_for("a client job ends: ")
    assert stays.process.poll() is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"secret": b"x" * 32}, "it turns this node away: its secret is not the one of this client job"),
        (
            {"fingerprint": "0" * 64},
            "who listens there is not the client job of the join file: another certificate",
        ),
    ],
    ids=["secret", "fingerprint"],
)
def test_without_both_proofs_nothing_is_said(client: Client, node: Any, change: dict[str, Any], said: str) -> None:
    wrong = client.folder / "wrong"
    replace(JoinFile.read(str(client.file)), **change).write(str(wrong))

    refused = node(1, "--file", str(wrong), "--patience", "2")

    refused.wait_for(said)
    client.wait_for("turned away a connection from")
    assert client.bridge("node-rank-1").process.poll() is None
    assert refused.ended() == 0
    assert refused.said.endswith("leaving: no client job for 2 s\n")
    assert not client.said("has joined")
    secret = JoinFile.read(str(client.file)).secret.hex()
    assert all(secret not in line for line in (*client.lines, refused.said))


def test_a_node_of_another_job_is_told_so(tmp_path: Path, node: Any, ended: contextlib.ExitStack) -> None:
    client = Client(tmp_path, 2, run_id="77")
    ended.callback(client.end)

    other = node(1, NVFL_RUN_ID="78")

    other.wait_for(f"it turns this node away: {socket.gethostname()} (process {other.process.pid}) belongs to the")
    assert "job 78, this is the client job of 77" in other.said


def test_noise_and_half_open_connections_keep_nobody_out(
    client: Client, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_GREETING_BOUND", 1.0)
    monkeypatch.setattr(reception, "_MAX_STRANGERS", 8)
    with contextlib.ExitStack() as open_ones:
        silent = [open_ones.enter_context(socket.create_connection(("::1", client.port))) for _ in range(12)]
        client.wait_for("8 others have not said who they are")
        for one in silent:
            one.settimeout(BOUND)
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""
    client.wait_for("it has not said who it is within 1 s")
    with socket.create_connection(("127.0.0.1", client.port)) as noisy:
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while noisy.recv(1000):
                pass
    context = ssl._create_unverified_context()  # noqa: S323 - a stranger's
    with context.wrap_socket(socket.create_connection(("127.0.0.1", client.port))) as stranger:
        assert set(json.loads(stranger.recv(1000))) == {"nonce"}
        stranger.sendall(b'{"start": ""}\n')
        with contextlib.suppress(OSError):
            assert stranger.recv(1000) == b""
    client.wait_for("it is no greeting")
    node(1)
    client.wait_for("node-rank-1 has joined")
    # Each is told of, up to a number.
    assert sum("turned away" in line for line in client.lines) == 14


def test_a_node_without_a_client_job_leaves(tmp_path: Path, node: Any) -> None:
    lonely = node(1, "--patience", "0.5")

    assert lonely.ended() == 0
    assert lonely.said.endswith("nvfl join: leaving: no client job for 0.5 s\n")


def test_a_node_whose_client_job_has_ended_unseen_leaves_at_once(client: Client, node: Any) -> None:
    unseen = node(1)
    client.wait_for("node-rank-1 has joined")
    os.kill(unseen.process.pid, signal.SIGSTOP)
    client.end()
    os.kill(unseen.process.pid, signal.SIGCONT)

    assert unseen.ended() == 0


def test_a_node_ends_its_agents_when_it_is_told_to_end(client: Client, node: Any) -> None:
    told = node(1)
    bridge = client.bridge("node-rank-1")
    pid = bridge.hello().pid
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        told.process.send_signal(number)

    told.process.terminate()

    assert told.ended() == 0
    assert told.said.endswith("nvfl join: leaving: got SIGTERM\n")
    assert not procs.runs(pid)
    assert bridge.finish()[0] == 1


@pytest.mark.slow
def test_a_file_made_beforehand_serves_many_jobs_at_a_time(
    tmp_path: Path, node: Any, ended: contextlib.ExitStack
) -> None:
    """One connection to each; and with --stay one job after another."""
    with socket.create_server(("", 0)) as probe:
        first = probe.getsockname()[1]
    assert join_file.main([str(tmp_path), "--ports", str(first), str(first + 1), "--address", "localhost"]) == 0
    nodes_file = tmp_path / join_file.NODES_FILE
    stays = node(1, "--file", str(nodes_file), "--stay")
    clients = [Client(tmp_path, 2, file=str(tmp_path / join_file.CLIENT_FILE)) for _ in range(2)]
    for client in clients:
        client.wait_for("node-rank-1 has joined")
        assert client.bridge("node-rank-1").hello().host == socket.gethostname()
    with pytest.raises(ReceptionError, match=f"no port from {first} to {first + 1} is free"):
        Client(tmp_path, 2, file=str(tmp_path / join_file.CLIENT_FILE))
    clients[0].end()
    stays.wait_for("a client job ends: the run ended")
    third = Client(tmp_path, 2, file=str(tmp_path / join_file.CLIENT_FILE))
    third.wait_for("node-rank-1 has joined")
    assert clients[1].bridge("node-rank-1").hello().host == socket.gethostname()
    for client in (clients[1], third):
        client.end()
    assert stays.process.poll() is None
    # Nobody has made the file for a job, and nobody removes it.
    assert nodes_file.exists()


def test_the_nodes_file_is_not_the_clients(tmp_path: Path) -> None:
    assert join_file.main([str(tmp_path)]) == 0

    with pytest.raises(ReceptionError, match=r"has no identity: give the client\.json"):
        Client(tmp_path, 2, file=str(tmp_path / join_file.NODES_FILE))


def test_only_the_client_jobs_own_bridges_get_a_connection(client: Client, node: Any) -> None:
    node(1)
    client.wait_for("node-rank-1 has joined")
    argv = transports.argv(client.meet(0).transport, "node-rank-1", [])

    # A shell between the two makes it a grandchild.
    done = subprocess.run(["sh", "-c", '"$@"; exit', "sh", *argv], capture_output=True, text=True, timeout=BOUND)

    assert (done.returncode, done.stdout) == (1, "")
    client.wait_for("refused a connection to the socket for nodes that have joined: process ")


def test_who_is_turned_away_and_does_not_go_is_cut_off(client: Client) -> None:
    greeting = {"proof": "0", "node_rank": 1, "names": ["a"], "run_id": None, "instance": "0", "pid": 1}
    context = ssl._create_unverified_context()  # noqa: S323 - a stranger's
    with context.wrap_socket(socket.create_connection(("127.0.0.1", client.port))) as stranger:
        assert set(json.loads(stranger.recv(1000))) == {"nonce"}
        stranger.sendall(json.dumps(greeting).encode() + b"\n")
        assert set(json.loads(stranger.recv(1000))) == {"refused"}
        # It has been told of the end, and does not answer that it has heard. TLS would be waited for 30 s.
        assert stranger.recv(1000) == b""
        with socket.socket(fileno=os.dup(stranger.fileno())) as below:
            below.settimeout(15)
            assert below.recv(1000) == b""
    client.wait_for("its secret is not the one of this client job")


def test_a_node_that_can_say_nothing_leaves_with_0_all_the_same(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "nvflare_torchrun_plugin.node_agent", "--join", "--patience", "0.1"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, cwd=tmp_path, stderr=full, timeout=BOUND)
    assert done.returncode == 0
