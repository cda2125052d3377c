"""A group of two local nodes, through the real agent, translator and torchrun: what ends how, and what is left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nvflare_torchrun_plugin.description.group_choice import Wish, choose
from nvflare_torchrun_plugin.launching import planning, program
from nvflare_torchrun_plugin.node import agent_dir, procs
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Failure, Verdict

pytestmark = [pytest.mark.real, pytest.mark.alone]

ODD = "a b\n'\"$HOME é"


@dataclass
class Run:
    """One finished group."""

    verdict: Verdict
    logs: Path

    @property
    def failure(self) -> Failure:
        assert self.verdict.failure is not None
        return self.verdict.failure

    def lines(self, rank: int) -> list[str]:
        return (self.logs / f"rank-{rank}.log").read_text().splitlines()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name has blanks, quotes and other letters, with TMPDIR in it."""
    odd = tmp_path / "a 'b' \"é\n"
    (odd / "tmp").mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(odd / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return odd


def run(
    folder: Path,
    script: str,
    *,
    accepted: bool = False,
    stop_after_lines: int = 0,
    log_ranks: object = "all",
    grace: float = 1.0,
    hang_timeout: float | None = None,
    node_timeout: float = 30.0,
    announce: signal.Signals | None = None,
    nodes: object = 2,
    more_args: tuple[str, ...] = (),
) -> Run:
    """Run the script on 2 nodes with 1 process each, and see to it that nothing is left."""
    path = folder / "scr ipt.py"
    path.write_text(script, encoding="utf-8")
    group = choose(
        {},
        None,
        {"nodes": nodes},
        Wish(nproc_per_node=1),
        byoc=True,
        launch_once=False,
        script=str(path),
    )
    options = planning.Options.parse(
        torchrun_args=None,
        join_timeout=60,
        launch_timeout=120,
        node_timeout=node_timeout,
        hang_timeout=hang_timeout,
        grace=grace,
        log_ranks=log_ranks,
    )
    plan = planning.Plan(
        group,
        program.parse(str(path), None, [ODD, "--x", *more_args], {"ODD": ODD}),
        str(path),
        str(folder),
        str(folder / "logs"),
        options,
    )
    launch, reservation = planning.launch(plan, 1)
    assert reservation is not None

    async def serve() -> Verdict:
        group = Group(launch, dict(os.environ), logging.getLogger("test"), Copies())
        if accepted:
            group.accept()
        running = asyncio.create_task(group.run())
        while announce is not None and not running.done():
            # Each rank says when it is ready for it.
            if len([log for log in Path(launch.log_dir).glob("rank-*.log") if log.read_text()]) == 2:
                group.signal(announce)
                break
            await asyncio.sleep(0.05)
        while stop_after_lines and not running.done():
            if len(list(Path(launch.log_dir).glob("rank-*.log"))) >= stop_after_lines:
                group.stop("the test asked for it")
                break
            await asyncio.sleep(0.05)
        return await asyncio.wait_for(running, 90)

    try:
        verdict = asyncio.run(serve())
    finally:
        reservation.release()
    assert procs.with_variable(agent_dir.DIR_VARIABLE, launch.name) == []
    # torch keeps a cache of its own there, named after the user.
    left = [entry.name for entry in (folder / "tmp").iterdir() if not entry.name.startswith("torchinductor_")]
    assert left == []
    return Run(verdict, Path(launch.log_dir))


def test_all_well(folder: Path) -> None:
    ended = run(
        folder,
        "import os, sys\nprint(os.environ['RANK'], repr(os.environ['ODD']), sys.argv)\n"
        "print('10%', end='\\r'); print('100%', file=sys.stderr)",
        accepted=True,
    )
    assert ended.verdict.outcome == "ok"
    for rank in (0, 1):
        argv = [str(folder / "scr ipt.py"), ODD, "--x"]
        assert ended.lines(rank) == [f"{rank} {ODD!r} {argv!r}", "10%", "100%"]


def test_a_rank_that_is_killed_before_it_could_say_who_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    ended = run(folder, "import time\ntime.sleep(600)")
    failure = ended.failure
    assert (failure.node_rank, failure.rank, failure.local_rank) == (1, 1, 0)
    assert failure.what == "SIGKILL (killed from outside; memory is the usual reason)"
    assert failure.cause == "infrastructure"
    assert ended.verdict.victims == (0,)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("os._exit(7)", "exit code 7"),
        ("import sys; sys.exit(3)", "exit code 3"),
    ],
)
def test_the_exit_code_is_the_ranks_own(folder: Path, how: str, what: str) -> None:
    ended = run(
        folder, f"import os, time\nif os.environ['RANK'] == '0':\n    {how}\ntime.sleep(100)", log_ranks=[1]
    )
    assert (ended.failure.node_rank, ended.failure.rank, ended.failure.what) == (0, 0, what)


LIMIT_MB = 800
"""Enough for an agent, a torchrun and a rank that imports torch."""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup below this process's own, with a limit on memory."""
    own = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    if "memory" in own:
        path, limit = Path(f"/sys/fs/cgroup/memory{own['memory']}", "nvfl-test"), "memory.limit_in_bytes"
    else:
        path, limit = Path(f"/sys/fs/cgroup{own.get('', '/')}", "nvfl-test"), "memory.max"
    try:
        path.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup can be made here: {e}")
    try:
        try:
            (path / limit).write_text(f"{LIMIT_MB << 20}")
        except OSError as e:
            pytest.skip(f"no cgroup with a limit on memory can be made here: {e}")
        yield path
    finally:
        path.rmdir()


def test_a_rank_for_which_there_is_not_enough_memory(folder: Path, cgroup: Path) -> None:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho $$ > {cgroup}/cgroup.procs\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    script = (
        "import os, signal\n"
        "held = []\n"
        "while os.environ['RANK'] == '1':\n"
        "    held.append(b'x' * (10 << 20))\n"
        "signal.pause()\n"
    )
    ended = run(folder, script, nodes=["localhost", {"host": "127.0.0.1", "python": str(python)}])
    assert (ended.failure.rank, ended.failure.cause) == (1, "infrastructure")
    assert ended.failure.what == (
        "SIGKILL (out of memory: the kernel has killed 1 of the node's processes for it)"
    )


def test_after_acceptance_rank_0_is_left_to_end_its_work(folder: Path) -> None:
    ended = run(
        folder,
        "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\n"
        "time.sleep(3)\nprint('work done')",
        accepted=True,
    )
    assert ended.lines(0) == ["work done"]
    assert (ended.failure.rank, ended.verdict.seconds < 60) == (1, True)


def test_stopping_ends_every_rank_and_blames_nobody(folder: Path) -> None:
    ended = run(folder, "import time\nprint('up', flush=True)\ntime.sleep(100)", stop_after_lines=2)
    assert (ended.verdict.outcome, ended.verdict.reason) == ("stopped", "the test asked for it")


def test_ten_megabytes_on_stderr_arrive_whole(folder: Path) -> None:
    ended = run(
        folder,
        "import os, sys\nfor n in range(100_000 * (os.environ['RANK'] == '1')):\n"
        "    print(f'{n:099}', file=sys.stderr)",
        accepted=True,
        log_ranks=[0],
    )
    assert ended.lines(1) == [f"{n:099}" for n in range(100_000)]


def test_a_script_that_is_no_python_is_blamed_with_its_line(folder: Path) -> None:
    ended = run(folder, "def broken(:\n")
    assert ended.failure.traceback is not None
    assert "SyntaxError" in ended.failure.traceback


def test_arguments_of_more_than_a_sockets_buffer_arrive(folder: Path) -> None:
    ended = run(
        folder,
        "import sys\nprint(len(sys.argv), sum(map(len, sys.argv[3:])))",
        accepted=True,
        more_args=("y" * 100_000,) * 8,
    )
    assert ended.lines(1) == ["11 800000"]


def test_a_torchrun_in_its_exit_barrier_does_not_use_up_the_grace(folder: Path) -> None:
    ended = run(folder, "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(100)", grace=40.0)
    assert ended.failure.rank == 0
    assert ended.failure.what.startswith("rank 0 ended with exit code 0, but no result was accepted")
    assert ended.verdict.seconds - ended.failure.seconds < 30


def test_a_group_that_hangs_shows_where(folder: Path) -> None:
    script = (
        "import time\n\ndef wait_for_ever():\n    time.sleep(1000)\n\n"
        "print('training', flush=True)\nwait_for_ever()\n"
    )
    ended = run(folder, script, hang_timeout=3.0)
    assert (ended.failure.rank, ended.failure.cause) == (0, "script")
    assert ended.failure.what.startswith("no rank has printed anything for ")
    assert any(line.endswith("in wait_for_ever") for line in ended.failure.last_lines)
    for rank in (0, 1):
        assert any(line.endswith("line 4 in wait_for_ever") for line in ended.lines(rank))


def test_a_rank_that_is_stopped_for_a_while_goes_on(folder: Path) -> None:
    script = (
        "import os, signal, subprocess\n"
        "if os.environ['RANK'] == '0':\n"
        "    signal.pause()\n"
        "subprocess.Popen(['sh', '-c', f'sleep 2.5; kill -CONT {os.getpid()}'])\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print('on again', flush=True)\n"
        "raise SystemExit(3)\n"
    )
    ended = run(folder, script, node_timeout=10.0)
    assert (ended.failure.rank, ended.failure.what) == (1, "exit code 3")
    assert ended.lines(1) == ["on again"]


def test_an_announcement_reaches_every_rank(folder: Path) -> None:
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit(0)))\n"
        "print('training', flush=True)\ntime.sleep(1000)\n"
    )
    ended = run(folder, script, accepted=True, announce=signal.SIGUSR1)
    assert ended.verdict.outcome == "ok"
    assert [ended.lines(rank) for rank in (0, 1)] == [["training", "saved"]] * 2
