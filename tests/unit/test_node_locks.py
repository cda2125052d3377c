"""Locks of nodes that several jobs of one site want."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvflare_torchrun_plugin.launching.node_locks import BusyError, NodeLocks

HOLDER = (
    "import sys\nfrom nvflare_torchrun_plugin.launching.node_locks import NodeLocks\n"
    "locks = NodeLocks(sys.argv[1], 'job A', print)\n"
    "locks.acquire(sys.argv[2:], 0, lambda: False)\n"
    "print('held', flush=True)\ninput()\n"
)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    return str(tmp_path / "locks")


@pytest.fixture
def holder(directory: str) -> Iterator[subprocess.Popen[str]]:
    """Another client job that holds two nodes."""
    command = [sys.executable, "-c", HOLDER, directory, "gpu-1", "gpu-0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def acquire(directory: str, hosts: list[str], timeout: float = 0.0, cancelled: bool = False) -> NodeLocks:
    locks = NodeLocks(directory, "job B", print)
    locks.acquire(hosts, timeout, lambda: cancelled)
    return locks


def test_a_busy_node_is_named_with_its_user(directory: str, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(BusyError) as caught:
        acquire(directory, ["free", "gpu-0"])
    assert str(caught.value) == (
        f"node gpu-0 is in use by job A (process {holder.pid}): wait for its end, or set on_busy and busy_timeout"
        " of the node group otherwise"
    )
    # What was locked before the busy one is free again.
    acquire(directory, ["free"]).release()


def test_a_killed_holder_leaves_no_lock(directory: str, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    acquire(directory, ["gpu-0", "gpu-1"]).release()


def test_waiting_is_told_once_and_ends_when_the_node_is_free(
    directory: str, holder: subprocess.Popen[str]
) -> None:
    said: list[str] = []

    def on_wait(sentence: str) -> None:
        said.append(sentence)
        holder.communicate("\n")

    locks = NodeLocks(directory, "job B", on_wait)
    locks.acquire(["gpu-0", "gpu-1"], 60.0, lambda: False)
    locks.release()
    assert len(said) == 1
    assert said[0].startswith(f"node gpu-0 is in use by job A (process {holder.pid}): waiting up to ")


def test_waiting_can_be_cancelled(directory: str, holder: subprocess.Popen[str]) -> None:
    assert holder.poll() is None
    with pytest.raises(BusyError, match="in use by job A"):
        acquire(directory, ["gpu-1"], 3600.0, cancelled=True)


def test_hosts_of_any_name_have_locks_of_their_own(directory: str) -> None:
    names = ["a/b", "a_b", "a:b", "é", "x" * 300, "x" * 301]
    locks = [acquire(directory, [name, name]) for name in names]
    files = list(Path(directory).iterdir())
    assert len(files) == len(names)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    for held in locks:
        held.release()


def test_two_attempts_of_one_job_share_its_locks(directory: str) -> None:
    locks = acquire(directory, ["gpu-0"])
    locks.acquire(["gpu-0"], 0.0, lambda: False)
    locks.release()
    with pytest.raises(BusyError, match="node gpu-0 is in use by job B"):
        acquire(directory, ["gpu-0"])
    locks.release()
    acquire(directory, ["gpu-0"]).release()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BusyError, match=r"cannot lock the nodes in .*/file/locks: .* Not a directory"):
        acquire(str(tmp_path / "file" / "locks"), ["gpu-0"])
