"""The translator for real: torchrun processes on this host, found by the run id in their environment."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvflare_torchrun_plugin.contract import Contract
from nvflare_torchrun_plugin.node.cores import allotted_cores
from nvflare_torchrun_plugin.node.inherited_environ import clean_environ

pytestmark = pytest.mark.real

LIMIT_S = 120.0

# Each rank adds (global rank + 1) to a sum over all ranks, and says what it sees.
ALL_REDUCE = """
import json, os, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
with open(os.path.join(sys.argv[1], f"{dist.get_rank()}.json"), "w") as file:
    json.dump({**os.environ, "sum": total.item(), "args": sys.argv[2:]}, file)
dist.destroy_process_group()
"""


class Nodes:
    """Starts translators that all carry one marker, so that whatever is left of them can be found."""

    def __init__(self) -> None:
        self.run_id = f"two-nodes-{uuid.uuid4().hex}"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, words: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "nvflare_torchrun_plugin.torchrun_node", *words],
            env={**without_contract(), "TEST_MARKER": self.run_id, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def survivors(self) -> list[int]:
        """Process ids whose environment has the marker; zombies have none."""
        marker = f"TEST_MARKER={self.run_id}".encode()
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                environ = (directory / "environ").read_bytes()
            except OSError:
                continue
            if marker in environ.split(b"\0"):
                found.append(int(directory.name))
        return found

    def wait_until_none_is_left(self, limit_s: float) -> list[int]:
        deadline = time.monotonic() + limit_s
        while (left := self.survivors()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def end(self) -> None:
        for pid in self.survivors():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._started:
            process.communicate(timeout=10.0)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    group = Nodes()
    try:
        yield group
        assert group.wait_until_none_is_left(5.0) == []
    finally:
        group.end()


def without_contract() -> dict[str, str]:
    environ = clean_environ(os.environ)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("NVFL_") and name not in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Return (exit code, output) of each, in order; TimeoutExpired if they take too long together."""
    deadline = time.monotonic() + LIMIT_S
    ended = []
    for process in processes:
        output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        ended.append((process.returncode, output))
    return ended


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "all reduce.py"
    path.write_text(ALL_REDUCE)
    return str(path)


def read_ranks(directory: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]


@pytest.mark.parametrize("inherited", [{}, {"PET_STANDALONE": "1", "PET_NNODES": "1"}], ids=["plain", "PET"])
def test_node_rank_r_holds_the_rth_block_of_global_ranks(
    nodes: Nodes, script: str, tmp_path: Path, inherited: dict[str, str]
) -> None:
    misleading = {
        "RANK": "7",
        "WORLD_SIZE": "9",
        "MASTER_ADDR": "nowhere.invalid",
        "MASTER_PORT": "1",
        "SLURM_PROCID": "5",
        "SLURM_JOB_ID": "4711",
    }
    port = free_port()

    def start(node_rank: int) -> subprocess.Popen[str]:
        contract = Contract(2, node_rank, "127.0.0.1", port, nodes.run_id)
        words = ["--nproc-per-node=2", "--join-timeout", "60", script, str(tmp_path), "--nnodes=3", "a b"]
        return nodes.start(words, {**misleading, **inherited, **contract.to_environ()})

    # The last node starts first: ranks follow the contract, not the order of arrival.
    second = start(1)
    first = start(0)
    for code, output in finish([first, second]):
        assert code == 0, output

    ranks = read_ranks(tmp_path)
    names = ("RANK", "NVFL_NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
    assert [tuple(rank[name] for name in names) for rank in ranks] == [
        ("0", "0", "0", "0"),
        ("1", "0", "0", "1"),
        ("2", "1", "1", "0"),
        ("3", "1", "1", "1"),
    ]
    for rank in ranks:
        assert rank["WORLD_SIZE"] == "4"
        assert rank["sum"] == 1 + 2 + 3 + 4
        assert rank["args"] == ["--nnodes=3", "a b"]
        assert rank["OMP_NUM_THREADS"] == str(max(1, allotted_cores() // 2))
        assert "SLURM_PROCID" not in rank
        assert rank["SLURM_JOB_ID"] == "4711"


def test_one_node_without_contract(nodes: Nodes, script: str, tmp_path: Path) -> None:
    [(code, output)] = finish([nodes.start(["--n", "2", script, str(tmp_path)], {})])
    assert code == 0, output
    ranks = read_ranks(tmp_path)
    assert [(rank["RANK"], rank["WORLD_SIZE"], rank["sum"]) for rank in ranks] == [
        ("0", "2", 3),
        ("1", "2", 3),
    ]


def test_modules_and_torchruns_options(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text('import os; print("rank", os.environ["RANK"], __name__, flush=True)\n')
    words = [
        "--local-ranks-filter=1",
        "--tee",
        "3",
        "--log-dir",
        str(tmp_path / "logs"),
        "--n=2",
        "-m",
        "trainer",
    ]
    [(code, output)] = finish([nodes.start(words, {"PYTHONPATH": str(tmp_path)})])
    assert code == 0, output
    assert "rank 1 __main__" in output
    assert "rank 0 __main__" not in output
    logs = sorted(path.read_text() for path in (tmp_path / "logs").rglob("stdout.log"))
    assert logs == ["rank 0 __main__\n", "rank 1 __main__\n"]


def test_exit_code_of_a_failing_script_is_torchruns(nodes: Nodes, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit(7)\n")
    [(code, output)] = finish([nodes.start(["--nproc-per-node=1", str(script)], {})])
    assert code == 1
    assert "exitcode  : 7" in output


def test_a_signal_reaches_torchrun(nodes: Nodes, tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import signal, socket, sys\nsocket.create_connection(('127.0.0.1', int(sys.argv[1])))\nsignal.pause()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LIMIT_S)
        process = nodes.start(["--nproc-per-node=1", str(script), str(server.getsockname()[1])], {})
        connection, _ = server.accept()
        connection.close()
    process.send_signal(signal.SIGTERM)
    [(code, output)] = finish([process])
    assert code == 1
    assert "got signal: 15" in output


def test_bad_input_starts_nothing(nodes: Nodes, script: str, tmp_path: Path) -> None:
    contract = {
        "NVFL_NNODES": "2",
        "NVFL_MASTER_ADDR": "127.0.0.1",
        "NVFL_MASTER_PORT": "0",
        "NVFL_RUN_ID": "r",
    }
    [(code, output)] = finish([nodes.start([script, str(tmp_path)], contract)])
    assert code == 2
    assert output.startswith("torchrun_node: NVFL_MASTER_PORT is 0: ")
    assert output.count("\n") == 1
    assert nodes.survivors() == []
    assert read_ranks(tmp_path) == []
