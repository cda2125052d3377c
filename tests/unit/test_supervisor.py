"""The supervisor's socket against real processes: its own relays, strangers, and other users."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stage import RELAY, WAITS, WORKS, Stage
from standins import BOUND, HELLO, READY, end, launch, logger, says, until
from test_relay import catches_signals, send_from_outside

from nvflare_torchrun_plugin import relay, supervisor, wire
from nvflare_torchrun_plugin.node import private_dir, procs
from nvflare_torchrun_plugin.supervision import group
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervisor import Supervisor
from nvflare_torchrun_plugin.verdict import Cause

REFUSED = "refused a connection to the supervisor's socket: "


def tell(child: subprocess.Popen[str], data: bytes, times: int = 1) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps([data.hex(), times]) + "\n")
    child.stdin.flush()
    return child.stdout.readline()


def test_a_relay_gets_its_group_and_its_exit_code(stage: Stage) -> None:
    for agent, outcome, code in ((WORKS, "ok", 0), (f"{says(HELLO, end(3))}", "failed", 1)):
        attempt = stage.supervisor.arm(launch(stage.folder, agent))
        assert stage.relay().wait(BOUND) == code
        verdict = attempt.wait(BOUND)
        assert verdict is not None
        assert verdict.outcome == outcome


def test_an_announcing_signal_goes_on_to_the_agents_and_one_to_end_ends_the_group(stage: Stage) -> None:
    agent = (
        f"read prepare; {says(HELLO, READY)}; read start; touch $1/started; "
        f'read signal; echo "$signal" > $1/signal; read stop; {says(end(0, stopped=True))}'
    )
    attempt = stage.supervisor.arm(launch(stage.folder, agent))
    process = stage.relay()
    until(lambda: stage.started and catches_signals(process), "the group was never started")
    process.send_signal(signal.SIGUSR1)
    until((stage.folder / "signal").exists, "the signal never arrived")
    until(lambda: (stage.folder / "signal").read_bytes() != b"", "the signal never arrived")
    assert wire.decode_order((stage.folder / "signal").read_bytes()) == wire.Signal(signal.SIGUSR1)
    send_from_outside(process, signal.SIGTERM)
    assert process.wait(BOUND) == 0
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("stopped", "its relay got SIGTERM, from outside")


def test_a_relay_that_nobody_waits_for_is_sent_home(stage: Stage) -> None:
    assert stage.relay().wait(BOUND) == 1
    withdrawn = stage.supervisor.arm(launch(stage.folder, WORKS))
    withdrawn.stop("the task ended")
    assert withdrawn.wait(BOUND) is None
    assert stage.relay().wait(BOUND) == 1
    assert stage.lines == ["a relay came, but no task is waiting for one"] * 2
    assert not stage.started


def test_a_process_that_is_not_our_child_is_refused(stage: Stage) -> None:
    attempt = stage.supervisor.arm(launch(stage.folder, WORKS))
    # Neither exit code nor directory may make it look as if the supervisor had gone.
    through_a_shell = subprocess.Popen(["sh", "-c", '"$@"; exit $?', "sh", *RELAY], env=stage.environ())
    assert through_a_shell.wait(BOUND) == 1
    (line,) = stage.lines
    assert line.startswith(f"{REFUSED}process ")
    assert line.endswith(" is not a child of this client job")
    stage.serves_the_real_relay(attempt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["environ", "A"]), inner),
    max_leaves=6,
)
WHOLE = b'{"environ": {"A": "b"}}\n'


def is_environ(message: object) -> bool:
    environ = message.get("environ") if isinstance(message, dict) else None
    return isinstance(environ, dict) and all(isinstance(value, str) for value in environ.values())


@pytest.mark.hypothesis
def test_what_is_no_environment_starts_nothing(stage: Stage) -> None:
    attempt = stage.supervisor.arm(launch(stage.folder, WORKS))
    with stage.child() as child:

        def refused(data: bytes, times: int = 1) -> None:
            stage.lines.clear()
            assert tell(child, data, times) == '{"exit": 1}\n'
            (line,) = stage.lines
            assert line.startswith(REFUSED)
            assert len(line) > len(REFUSED)
            assert line.isprintable()

        @settings(max_examples=60)
        @given(
            st.binary(max_size=100)
            | st.integers(0, len(WHOLE) - 1).map(lambda length: WHOLE[:length])
            | JSON.filter(lambda message: not is_environ(message)).map(lambda m: json.dumps(m).encode() + b"\n")
        )
        @example(b"")
        @example(b"\n")
        @example(WHOLE[:-1])
        @example(b'{"environ": {"A": "\xff"}}\n')
        @example(b'{"environ": {"A": 1}}\n')
        @example(b'{"environ": ["A"]}\n')
        @example(b"[" * 100_000 + b"\n")
        @example(b"9" * 5000 + b"\n")
        def any_garbage(data: bytes) -> None:
            refused(data)

        any_garbage()
        refused(b"x" * (1 << 20), 20)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(BOUND) == 0
    stage.serves_the_real_relay(attempt)


@pytest.mark.hypothesis
def test_what_is_no_signal_ends_the_group(stage: Stage) -> None:
    with stage.child() as child:

        @settings(max_examples=15)
        @given(
            st.binary(min_size=1, max_size=100)
            | JSON.map(lambda message: json.dumps({"signal": message}).encode())
            | JSON.map(lambda message: json.dumps(message).encode())
        )
        @example(b"[" * 100_000)
        @example(b"9" * 5000)
        @example(b'{"signal": 1e999}')
        @example(b'{"signal": [15]}')
        def any_garbage(data: bytes) -> None:
            attempt = stage.supervisor.arm(launch(stage.folder, WAITS))
            tell(child, WHOLE + data + b"\n")
            verdict = attempt.wait(BOUND)
            assert verdict is not None
            assert verdict.outcome == "stopped"
            assert verdict.reason is not None
            assert verdict.reason.startswith("its relay ")

        any_garbage()
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(BOUND) == 0


def test_a_child_that_says_nothing_is_refused_in_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_GREETING_BOUND", 0.3)
    attempt = stage.supervisor.arm(launch(stage.folder, WORKS))
    code = "import sys\nfrom nvflare_torchrun_plugin.node import private_dir\n"
    code += "print(private_dir.connect(sys.argv[1], 'relay').recv(100))"
    done = subprocess.run(
        [sys.executable, "-c", code, stage.supervisor.directory],
        capture_output=True,
        timeout=BOUND,
        check=True,
    )
    assert done.stdout == b"b'{\"exit\": 1}\\n'\n"
    assert stage.lines == [f"{REFUSED}no message within 0.3 s"]
    monkeypatch.undo()
    stage.serves_the_real_relay(attempt)


# Imports before the other user's turn: it may not be able to read this Python's files.
STRANGER = """
import os, socket, sys
channel = socket.socket(socket.AF_UNIX)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    channel.connect(sys.argv[1])
    print(channel.recv(100).decode(), end="")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(monkeypatch: pytest.MonkeyPatch, stage: Stage) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as reachable:  # pytest's own folders are closed to others
        Path(reachable).chmod(0o755)
        monkeypatch.setattr(tempfile, "tempdir", reachable)
        messages = stage.lines
        watched = Supervisor(stage.logger)
        socket_ = Path(watched.directory, relay.SOCKET)

        def stranger() -> str:
            command = [sys.executable, "-c", STRANGER, str(socket_)]
            return subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=True).stdout

        try:
            attempt = watched.arm(launch(stage.folder, WORKS))
            assert stranger() == "PermissionError\n"
            assert messages == []
            # Somebody has opened the door: who comes is looked at all the same.
            Path(watched.directory).chmod(0o755)
            socket_.chmod(0o777)
            assert stranger() == '{"exit": 1}\n'
            (line,) = messages
            assert line.startswith(f"{REFUSED}process ")
            assert "of user 65534 is not a child" in line
            assert not attempt.decided.done()
            assert not stage.started
        finally:
            watched.close("the test is over", BOUND)
        assert list(Path(reachable).iterdir()) == []
        assert attempt.wait(0) is None


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (signal.SIGTERM, 0, "its relay got SIGTERM, from outside"),
        (signal.SIGINT, 0, "its relay got SIGINT, from outside"),
        (signal.SIGKILL, -9, "its relay is gone"),
    ],
)
def test_the_end_of_the_relay_is_the_end_of_the_group(
    stage: Stage, number: signal.Signals, code: int, reason: str
) -> None:
    # Whatever NVFlare has last said: it was not NVFlare.
    stage.given_up = GivenUp("heartbeat timed out", "infrastructure")
    attempt = stage.supervisor.arm(launch(stage.folder, WAITS))
    process = stage.relay()
    until(lambda: stage.started, "the group was never started")
    until(lambda: catches_signals(process), "the relay never caught signals")
    send_from_outside(process, number)
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("stopped", reason)
    assert process.wait(BOUND) == code


TRAINS = (
    f"read prepare; {says(HELLO, READY)}; read start; {says(wire.encode(wire.RankUp(0, 0, 1)).decode().strip())}; "
    f"touch $1/started; read stop; while [ -e $1/stay ]; do sleep 0.02; done; {says(end(0, stopped=True))}"
)


def test_what_nvflare_ends_because_it_was_told_to_is_stopped(stage: Stage) -> None:
    attempt = stage.supervisor.arm(launch(stage.folder, TRAINS))
    process = stage.relay()
    until(lambda: stage.started, "the group was never started")
    process.send_signal(signal.SIGTERM)
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("stopped", "NVFlare has ended its relay")
    assert process.wait(BOUND) == 0


@pytest.mark.parametrize("cause", ["script", "infrastructure"])
def test_when_nvflare_gives_up_rank_0_is_to_blame(stage: Stage, cause: Cause) -> None:
    stage.given_up = GivenUp("trainer heartbeat timed out after 8.0s", cause)
    attempt = stage.supervisor.arm(launch(stage.folder, TRAINS))
    process = stage.relay()
    until(lambda: stage.started, "the group was never started")
    until(lambda: attempt.trains.done(), "the group never trained")
    assert not attempt.ends
    (stage.folder / "stay").touch()
    process.send_signal(signal.SIGTERM)
    until(lambda: attempt.ends, "the group did not notice")
    assert not attempt.decided.done()
    (stage.folder / "stay").unlink()
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert verdict.failure is not None
    assert verdict.ranks_ran
    failure = verdict.failure
    assert (failure.node_rank, failure.host, failure.rank, failure.cause) == (0, "host-0", 0, cause)
    assert failure.what == "NVFlare gave up on it: trainer heartbeat timed out after 8.0s"
    assert failure.log == str(stage.folder / "logs/rank-0.log")
    assert process.wait(BOUND) == 1


def test_what_nvflare_ends_after_the_result_costs_nothing(stage: Stage) -> None:
    stage.given_up = GivenUp("trainer heartbeat timed out after 8.0s", "infrastructure")
    attempt = stage.supervisor.arm(launch(stage.folder, TRAINS))
    process = stage.relay()
    until(lambda: stage.started, "the group was never started")
    attempt.accept()
    process.send_signal(signal.SIGTERM)
    verdict = attempt.wait(BOUND)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("stopped", "NVFlare has ended its relay")
    assert process.wait(BOUND) == 0


def test_closing_ends_groups_and_those_that_never_began(stage: Stage) -> None:
    running = stage.supervisor.arm(launch(stage.folder, WAITS))
    process = stage.relay()
    until(lambda: stage.started, "the group was never started")
    armed = stage.supervisor.arm(launch(stage.folder, WORKS))
    stage.supervisor.close("the run ended", BOUND)
    verdict = running.wait(0)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("stopped", "the run ended")
    assert armed.wait(0) is None
    assert process.wait(BOUND) == 0
    assert not Path(stage.supervisor.directory).exists()
    stage.supervisor = Supervisor(stage.logger)  # for the fixture to close


def test_closing_lets_a_late_result_be_fetched_first(stage: Stage) -> None:
    serves = f"touch $1/started; {says(HELLO)}; while [ ! -e $1/fetched ]; do sleep 0.02; done; {says(end(0))}"
    attempt = stage.supervisor.arm(launch(stage.folder, serves))
    process = stage.relay()
    until(lambda: stage.started, "the group was never started")
    attempt.accept()
    closing = threading.Thread(target=stage.supervisor.close, args=("the run ended", BOUND))
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    (stage.folder / "fetched").touch()
    closing.join(BOUND)
    verdict = attempt.wait(0)
    assert verdict is not None
    assert (verdict.outcome, verdict.reason) == ("ok", None)
    assert process.wait(BOUND) == 0
    stage.supervisor = Supervisor(stage.logger)  # for the fixture to close


# asyncio's transport of the agent that was given up complains when it is collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_does_not_wait_for_ever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_STOP_MARGIN", BOUND)
    attempt = stage.supervisor.arm(launch(stage.folder, f"{says(HELLO)}; touch $1/started; exec sed d"))
    process = stage.relay()
    until(lambda: stage.started, "the group was never started")
    stage.supervisor.close("the run ended", 0.2)
    assert stage.lines[-1] == "the group standin has not ended within 0.2 s"
    # Nobody gives it orders any more, which ends an agent (here: sed), and the relay gets its word.
    assert process.wait(BOUND) == 1
    assert attempt.ended.done()
    assert not Path(stage.supervisor.directory).exists()
    stage.supervisor = Supervisor(stage.logger)
    gc.collect()


def test_a_group_that_cannot_be_run_sends_its_relay_home(stage: Stage) -> None:
    (stage.folder / "logs").touch()
    attempt = stage.supervisor.arm(launch(stage.folder, WORKS))
    assert stage.relay().wait(BOUND) == 1
    assert attempt.wait(BOUND) is None
    (line,) = stage.lines
    assert line.startswith("the group standin cannot be run: ")
    assert not stage.started


CLIENT_JOB = """
import logging, os, pathlib, subprocess, sys
sys.path.insert(0, sys.argv[2])
from standins import launch
from stage import RELAY, WAITS
from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.supervisor import Supervisor
supervisor = Supervisor(logging.getLogger())
supervisor.arm(launch(pathlib.Path(sys.argv[1]), WAITS))
started = subprocess.Popen(RELAY, env={**os.environ, relay.DIR_VARIABLE: supervisor.directory})
print(started.pid, supervisor.directory, sep="\\n", flush=True)
sys.stdin.read()
"""


def test_a_client_job_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    words = [str(tmp_path), str(Path(__file__).parent)]
    environ = {**os.environ, "TMPDIR": str(tmp_path), "TEST_MARKER": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT_JOB, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as job:
        assert job.stdout is not None
        pid, directory = int(job.stdout.readline()), job.stdout.readline().rstrip("\n")
        until((tmp_path / "started").exists, "the group was never started")
        assert Path(directory).is_dir()
        job.kill()
    until(lambda: not Path(directory).exists(), "the directory is left")
    until(
        lambda: procs.with_variable("TEST_MARKER", str(tmp_path)) == [], f"processes are left, the relay is {pid}"
    )


def test_without_its_socket_there_is_no_supervisor_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_directory: str, _name: str) -> None:
        raise PermissionError(errno.EPERM, "a file system without sockets")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(private_dir, "listen", refuse)
    threads = threading.active_count()
    with pytest.raises(PermissionError, match="without sockets"):
        Supervisor(logger("supervisor")[0])
    assert (list(tmp_path.iterdir()), threading.active_count()) == ([], threads)


def test_copies_that_cannot_be_removed_leave_no_directory_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_copies: Copies) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Copies, "close", fail)
    threads = threading.active_count()
    made = Supervisor(logger("supervisor")[0])
    with pytest.raises(OSError, match="too many open files"):
        made.close("the test is over", BOUND)
    assert (list(tmp_path.iterdir()), threading.active_count()) == ([], threads)
