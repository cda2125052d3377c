"""Nodes that dial in where something ends, or never does: who is cut off, who is kept, and who leaves at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joining import Client
from standins import BOUND, until

from nvflare_torchrun_plugin.join_file import NAME, JoinFile
from nvflare_torchrun_plugin.joining import greeting, join_link, reception
from nvflare_torchrun_plugin.joining.greeting import Greeting
from nvflare_torchrun_plugin.joining.seats import Idle


def stranger(port: int) -> ssl.SSLSocket:
    """Somebody of whom nothing is known yet."""
    context = ssl._create_unverified_context()  # noqa: S323 - a stranger's
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), BOUND))


def said_to(connection: ssl.SSLSocket) -> tuple[str, str]:
    return greeting.read_word(connection.recv(greeting.MAX_LINE))


def mute_node(client: Client, instance: str) -> ssl.SSLSocket:
    """A node that has joined and will never answer that it has heard of the end, as TLS wants it to."""
    file = JoinFile.read(str(client.file))
    connection = stranger(client.port)
    kind, nonce = said_to(connection)
    assert kind == "nonce"
    proof = greeting.proof(file.secret, nonce, file.fingerprint)
    connection.sendall(Greeting(proof, 1, ("mute",), None, instance, 1).encode())
    assert said_to(connection)[0] == "welcome"
    return connection


def assert_cut_off(connection: ssl.SSLSocket) -> None:
    """Python would wait for the answer for 30 s, before 3.11 without a bound."""
    assert connection.recv(1000) == b""
    with socket.socket(fileno=os.dup(connection.fileno())) as below:
        below.settimeout(15)
        with contextlib.suppress(ConnectionResetError):
            assert below.recv(1000) == b""


def test_a_node_that_is_replaced_and_does_not_go_is_cut_off(client: Client) -> None:
    with mute_node(client, "first") as first, mute_node(client, "second"):
        assert said_to(first) == ("leave", "another process has come as node-rank-1: mute, process 1")
        assert_cut_off(first)


def test_a_node_whose_agent_is_needed_no_more_and_that_does_not_go_is_cut_off(client: Client) -> None:
    with mute_node(client, "it") as node:
        bridge = client.bridge("mute")
        assert said_to(node) == ("start", "")
        assert bridge.process.stdin is not None
        bridge.process.stdin.close()
        assert_cut_off(node)
        bridge.process.wait(BOUND)


def test_a_client_job_that_answers_nothing_keeps_no_node_that_is_told_to_end(tmp_path: Path, node: Any) -> None:
    with silent_client(tmp_path, backlog=1) as listening:
        waiting = node(1)
        accepted, _ = listening.accept()
        with accepted:
            waiting.process.terminate()
            assert waiting.ended() == 0


def test_a_join_file_that_cannot_be_read_for_a_moment_ends_no_connection(client: Client, node: Any) -> None:
    one = node(1)
    client.wait_for("node-rank-1 has joined")
    before = client.reception._seats[1].idle
    limits = resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE)

    resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    one.wait_for("waiting for the join file: [Errno 24] Too many open files")
    resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, limits)
    client.file.chmod(0o660)
    one.wait_for("others than its owner may write it")
    client.file.chmod(0o600)

    assert client.bridge("node-rank-1").hello().host == socket.gethostname()
    assert client.reception._seats[1].idle is not before
    assert not client.said("is not there any more")


def test_a_connection_that_is_just_ending_is_not_handed_out(client: Client, node: Any) -> None:
    """Its end is known to the kernel alone: nothing here has had the time to see it."""
    first = node(1)
    client.wait_for("node-rank-1 has joined")

    async def take() -> tuple[Idle | str, Any]:
        seat = client.reception._seats[1]
        assert seat.idle is not None
        known = select.poll()
        known.register(seat.idle.writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
        first.process.kill()
        first.process.wait()
        assert known.poll(BOUND * 1000)
        second = node(1)
        return await seat.take(BOUND, asyncio.StreamReader()), second

    taken, second = client.supervisor.ask(take(), BOUND + 5)

    assert isinstance(taken, Idle)
    assert taken.node.pid == second.process.pid
    client.supervisor.ask(taken.leave("leave", "the test is over"), BOUND)
    assert second.ended() == 0


def test_a_connection_that_has_ended_has_no_socket_to_look_after(client: Client, node: Any) -> None:
    """Asyncio's TLS forgets it, and once it is closed cannot be asked for it."""
    only = node(1)
    client.wait_for("node-rank-1 has joined")
    idle = client.reception._seats[1].idle
    assert idle is not None
    assert not join_link.has_ended(idle.writer)
    only.process.kill()
    client.wait_for("node-rank-1 is not there any more")

    assert join_link.has_ended(idle.writer)
    join_link.leave_alone(idle.writer)
    with pytest.raises(ConnectionResetError, match="the connection has ended"):
        join_link.look_after(idle.writer)


def test_one_noisy_host_keeps_no_other_out(client: Client, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_GREETING_BOUND", BOUND)
    monkeypatch.setattr(reception, "_MAX_STRANGERS_OF_ONE", 4)
    monkeypatch.setattr(reception, "_MAX_STRANGERS", 6)
    with contextlib.ExitStack() as held:
        for _ in range(6):
            noisy = socket.create_connection(("127.0.0.1", client.port), BOUND, ("127.0.0.9", 0))
            held.enter_context(noisy)
        client.wait_for("127.0.0.9: 4 others from there have not said who they are")
        node(1)
        client.wait_for("node-rank-1 has joined")
        # All that time.
        assert not client.said("it has not said who it is within")


@contextlib.contextmanager
def silent_client(folder: Path, backlog: int) -> Iterator[socket.socket]:
    """What looks like a client job to the outside, and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as listening:
        port = listening.getsockname()[1]
        JoinFile.make((port, port), "127.0.0.1").write(str(folder / NAME))
        yield listening


@pytest.mark.parametrize("where", ["dialling", "in TLS"])
def test_a_node_that_is_half_way_in_leaves_when_the_run_ends(tmp_path: Path, node: Any, where: str) -> None:
    """Nobody tells it: the file has gone. Its patience would be 300 s."""
    with silent_client(tmp_path, backlog=0) as listening, contextlib.ExitStack() as others:
        address = listening.getsockname()
        if where == "dialling":
            # There is room for one, whom nobody takes.
            others.enter_context(socket.create_connection(address))
        half_way = node(1)
        if where == "in TLS":
            others.enter_context(listening.accept()[0])
        else:
            until(lambda: is_dialling(half_way.process.pid, address[1]), "it dials")

        (tmp_path / NAME).unlink()

        assert half_way.ended() == 0
        assert half_way.said.endswith("nvfl join: leaving: the join file is gone\n")


def is_dialling(pid: int, port: int) -> bool:
    """Whether the kernel has a connection to the port whose other side has not answered yet (SYN_SENT)."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "02" for line in lines)


def test_whoever_is_being_greeted_when_the_run_ends_is_sent_away(client: Client) -> None:
    with stranger(client.port) as greeted:
        assert said_to(greeted)[0] == "nonce"
        client.end()
        assert said_to(greeted) == ("leave", "the run ended")
    assert not any("turned away" in line or "as they should" in line for line in client.lines)


def test_who_says_one_byte_at_a_time_is_cut_off_and_keeps_nobody_out(
    client: Client, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_GREETING_BOUND", 1.0)
    stop = threading.Event()

    def drip(connection: socket.socket, data: bytes) -> None:
        with connection, contextlib.suppress(OSError):
            for byte in data:
                if stop.wait(0.05):
                    return
                connection.sendall(bytes([byte]))

    # The head of a TLS record that announces 16 KiB, and a greeting.
    slow = [
        (socket.create_connection(("127.0.0.1", client.port)), b"\x16\x03\x01\x3f\xff" + b"x" * 4000),
        (stranger(client.port), b'{"proof": "' + b"x" * 4000),
    ]
    threads = [threading.Thread(target=drip, args=given) for given in slow]
    for thread in threads:
        thread.start()
    try:
        node(1)
        client.wait_for("node-rank-1 has joined")
        cut_off = "turned away a connection from ::ffff:127.0.0.1: it has not said who it is within 1 s"
        until(lambda: client.lines.count(cut_off) >= 2, f"{cut_off!r} twice in {client.lines}")
        # Each has 200 s to say, and hears of the end at once.
        for thread in threads:
            thread.join(BOUND)
            assert not thread.is_alive()
    finally:
        stop.set()


CLIENT_JOB = """
import signal, sys
from pathlib import Path
from joining import Client
client = Client(Path(sys.argv[1]), 2)
print("open", flush=True)
client.wait_for("node-rank-1 has joined")
print("joined", flush=True)
signal.pause()
"""


def test_a_node_whose_client_job_is_killed_leaves_when_its_patience_ends(tmp_path: Path, node: Any) -> None:
    """The client job has left its file, so one might come back."""
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT_JOB, str(tmp_path)],
        cwd=Path(__file__).parent,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as client_job:
        assert client_job.stdout is not None
        assert client_job.stdout.readline() == "open\n"
        waiting = node(1, "--patience", "2")
        assert client_job.stdout.readline() == "joined\n"
        client_job.kill()

    assert waiting.ended() == 0
    assert waiting.said.endswith("nvfl join: leaving: no client job for 2 s\n")
    assert (tmp_path / NAME).exists()


def test_jobs_with_the_same_ports_have_one_each_and_their_own_nodes(
    tmp_path: Path, node: Any, ended: contextlib.ExitStack
) -> None:
    clients = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        clients.append(Client(tmp_path / name, 2, ports=[29100, 29109]))
        ended.callback(clients[-1].end)
    one, two = clients
    assert one.port != two.port
    # A node of the first one's that goes to the second one's port, and the right ones.
    file = JoinFile.read(str(one.file))
    lost_file = JoinFile(file.fingerprint, file.secret, (two.port, two.port), file.address)
    lost_file.write(str(tmp_path / "lost"))
    lost = node(1, "--file", str(tmp_path / "lost"))
    right = [node(1, "--file", str(client.file)) for client in clients]

    for client, its_own in zip(clients, right, strict=True):
        client.wait_for(f"process {its_own.process.pid}")
    lost.wait_for("who listens there is not the client job of the join file: another certificate")
    assert not any(str(lost.process.pid) in line for client in clients for line in client.lines)
