"""What `run` makes of its options, what it refuses, and what it shows; nothing is started here."""

from __future__ import annotations

import errno
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from nvflare_torchrun_plugin.cli import app
from nvflare_torchrun_plugin.cli.asked import GroupAsked, ProgramAsked
from nvflare_torchrun_plugin.cli.live import Screen, as_json, as_text
from nvflare_torchrun_plugin.cli.output import RefusedError
from nvflare_torchrun_plugin.launching.node_locks import NodeLocks
from nvflare_torchrun_plugin.launching.planning import Plan

HERE = socket.gethostname()


def plan(tmp_path: Path, *words: str, asked: GroupAsked | None = None, **more: Any) -> Plan:
    (tmp_path / "train.py").touch()
    group = (asked or GroupAsked()).group({"NVFL_NNODES": "nonsense of a job around"})
    return ProgramAsked(list(words), **more).plan(group, tmp_path, tmp_path / "runs")


def test_hosts_are_reached_by_ssh_unless_all_are_this_one() -> None:
    assert GroupAsked(nodes=f"{HERE}, gpu-1").group({}).transport == "ssh"
    assert GroupAsked(nodes=f"localhost,{HERE}").group({}).transport == "local"
    assert GroupAsked(nodes="2").group({}).transport == "local"
    own = GroupAsked(nodes=f"{HERE},gpu-1", transport="kubectl exec -i {host} --").group({})
    assert own.transport == ("kubectl", "exec", "-i", "{host}", "--")


def test_what_is_asked_of_a_group() -> None:
    asked = GroupAsked(
        f"{HERE},gpu-1,gpu-2", None, "1:2", "8", "ssh", "/opt/python", "10.0.0.1", forward_env=["WANDB_*"]
    )
    group = asked.group({})
    assert [node.host for node in group.nodes] == [HERE, "gpu-1"]
    assert [node.nproc_per_node for node in group.nodes] == [8, 8]
    assert (group.least, group.python, group.nodes[0].address) == (1, "/opt/python", "10.0.0.1")
    assert group.nodes[1].address is None
    assert group.forward_env[-1] == "WANDB_*"
    assert "NCCL_*" in group.forward_env


def test_the_nodes_of_a_startup_kit(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    path = tmp_path / "local/node_group.yaml"
    with pytest.raises(RefusedError, match=r"node_group\.yaml describes no nodes"):
        GroupAsked(workspace=tmp_path).group({})
    path.write_text("nodes: [{host: localhost, nproc_per_node: 4}, localhost]\non_busy: share\n")
    group = GroupAsked(workspace=tmp_path, nnodes="1").group({})
    assert [node.nproc_per_node for node in group.nodes] == [4]
    assert (group.on_busy, group.source) == ("share", f"site file {path}")


def test_options_of_torchrun_and_of_the_script_go_their_ways(tmp_path: Path) -> None:
    made = plan(tmp_path, "--tee", "3", "train.py", "--tee", "a b", env=["A=x=y"], copy=True, log_ranks="0,3")
    assert made.options.torchrun_args == ("--tee", "3")
    assert made.options.log_ranks == frozenset({0, 3})
    assert made.program.args == ("--tee", "a b")
    assert made.program.env == {"A": "x=y"}
    assert made.target == str(tmp_path / "train.py")
    assert (made.group.stage, made.folder, made.owes_result) == ("auto", ".", False)
    assert plan(tmp_path, "train.py").group.stage == "never"


def test_a_module(tmp_path: Path) -> None:
    made = plan(tmp_path, "-m", "--tee=3", "package.train", "-m")
    assert (made.program.module, made.target, made.program.args) == ("package.train", "package.train", ("-m",))
    assert made.options.torchrun_args == ("--tee=3",)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (GroupAsked(nodes="0"), "--nodes: nodes is '0': must be a number from 1"),
        (GroupAsked(nodes="nowhere,gpu-1"), "--nodes: nodes has host 'nowhere' first, but node rank 0 must be"),
        (GroupAsked(nodes="2", nnodes="3"), "the job wants 3 nodes"),
        (GroupAsked(nodes="2", nnodes="x"), "--nnodes is 'x': must be a number of nodes"),
        (GroupAsked(nodes="2", nproc_per_node="-1"), "--nproc-per-node is '-1': must be a number"),
        (GroupAsked(nodes="2", transport="'"), '--transport "\'": cannot be split into words'),
        (GroupAsked(nodes="2", transport="rsh"), "--nodes: transport is 'rsh': must be one of local, ssh, srun"),
        (GroupAsked(nodes="2", workspace=Path("kit")), "--workspace says which nodes there are"),
        (GroupAsked(nodes="auto"), "--nodes: nodes is 'auto': no scheduler's allocation is around this process"),
    ],
)
def test_a_group_that_makes_no_sense(asked: GroupAsked, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        asked.group({})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("words", "more", "message"),
    [
        ([], {}, "SCRIPT is missing"),
        (["-m"], {}, "SCRIPT is missing"),
        (["none.py"], {}, "script 'none.py' is not there; looked for"),
        (["--max-restarts=3", "train.py"], {}, "torchrun_args is ['--max-restarts=3']: option --max-restarts"),
        (["--tee", "--role", "x", "train.py"], {}, "option '--tee' has no value"),
        (["train.py"], {"env": ["A"]}, "--env A: must be NAME=VALUE"),
        (["train.py"], {"env": ["RANK=hush"]}, "--env sets RANK, which this package, torchrun or NVFlare sets"),
        (["train.py"], {"join_timeout": 0}, "join_timeout is 0: must be"),
        (["train.py"], {"log_ranks": "some"}, "log_ranks is ['some']: must be"),
    ],
)
def test_a_program_that_makes_no_sense(
    tmp_path: Path, words: list[str], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        plan(tmp_path, *words, **more)
    assert str(caught.value).startswith(message)


def test_what_makes_no_sense_ends_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(monkeypatch, tmp_path, "run", "--nodes", "2", "none.py") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"nvflare-torchrun: script 'none.py' is not there; looked for {tmp_path}/none.py\n"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def main(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> object:
    """Run the command there; return its exit code."""
    monkeypatch.chdir(folder)
    (folder / "train.py").touch()
    monkeypatch.setattr(sys, "argv", ["nvflare-torchrun", *words])
    with pytest.raises(SystemExit) as caught:
        app.main()
    return caught.value.code


def test_a_run_directory_that_has_a_run_in_it_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "logs/attempt-0001").mkdir(parents=True)
    assert main(monkeypatch, tmp_path, "run", "--run-dir", "logs", "train.py") == 2
    assert f"{tmp_path}/logs is not empty" in capsys.readouterr().err
    assert list((tmp_path / "logs/attempt-0001").iterdir()) == []


def test_nodes_that_a_job_of_the_site_uses_are_not_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "kit/local").mkdir(parents=True)
    described = f"nodes: [{HERE}, other]\ntransport: ssh\non_busy: fail\n"
    (tmp_path / "kit/local/node_group.yaml").write_text(described)
    job = NodeLocks(str(tmp_path / "kit/node_locks"), "job 4711", print)
    job.acquire(["other"], 0.0, lambda: False)
    try:
        assert main(monkeypatch, tmp_path, "run", "--workspace", "kit", "train.py") == 1
    finally:
        job.release()
    assert "nvflare-torchrun: node other is in use by job 4711" in capsys.readouterr().err
    assert not (tmp_path / "torchrun-runs").exists()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["pl"], ["plan"]),
        (["run", "--tee", "3", "--no"], ["--nodes", "--node-timeout"]),
        (["run", "--wrong", "--no"], ["--nodes", "--node-timeout"]),
    ],
)
def test_the_shell_completes_verbs_and_options(tmp_path: Path, typed: list[str], offered: list[str]) -> None:
    program = tmp_path / "nvflare-torchrun"
    program.write_text("from nvflare_torchrun_plugin.cli.app import main\nmain()\n")
    asked = {
        "_NVFLARE_TORCHRUN_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["nvflare-torchrun", *typed]),
        "COMP_CWORD": str(len(typed)),
    }
    ended = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env={**os.environ, **asked}, timeout=120
    )
    assert (ended.stdout.split(), ended.stderr) == (offered, "")


class Slow(StringIO):
    """A reader that takes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.let = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.let.wait(60)
        return super().write(text)


class Broken(StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_lines_have_their_node_and_rank_in_front() -> None:
    out = StringIO()
    screen = Screen(out, None, as_text(coloured=False), lambda _: None)
    screen.show(1, 3, "loss 0.5")
    screen.show(0, None, "torchrun says")
    screen.progress("not on a terminal")
    screen.close()
    assert out.getvalue() == "1:3 | loss 0.5\n0 | torchrun says\n"
    assert json.loads(as_json(1, 3, "a\tb")) == {"node": 1, "rank": 3, "line": "a\tb"}
    assert as_text(coloured=True)(0, 1, "x") == "\x1b[36m0:1 |\x1b[0m x\n"


def test_the_progress_goes_before_a_line_and_at_the_end() -> None:
    out = Slow()
    terminal = StringIO()
    screen = Screen(out, terminal, as_text(coloured=False), lambda _: None)
    screen.progress("training")
    screen.show(0, 0, "a")
    assert out.reached.wait(60)
    out.let.set()
    screen.close()
    assert out.getvalue() == "0:0 | a\n"
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert terminal.getvalue().replace("\r\x1b[K", "").replace("training", "") == ""


def test_a_slow_reader_stops_nobody_and_is_told_what_it_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvflare_torchrun_plugin.cli.live._MOST", 2)
    out = Slow()
    screen = Screen(out, None, as_text(coloured=False), lambda _: None)
    screen.show(0, 0, "first")
    assert out.reached.wait(60)
    for text in ("a", "b", "c", "d"):
        screen.show(0, 0, text)
    out.let.set()
    screen.close()
    assert out.getvalue() == "0:0 | first\n0:0 | a\n0:0 | b\n0 | (2 lines are only in the ranks' files)\n"


def test_a_reader_that_is_gone_is_told_once() -> None:
    told: queue.Queue[str] = queue.Queue()
    screen = Screen(Broken(), None, as_text(coloured=False), told.put)
    screen.show(0, 0, "a")
    assert told.get(timeout=60) == "nobody reads its output any more"
    screen.show(0, 0, "b")
    screen.close()
    assert told.empty()


def test_a_run_directory_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert main(monkeypatch, tmp_path, "run", "--run-dir", "train.py", "train.py") == 2
    assert f"{tmp_path}/train.py cannot be used: Not a directory" in capsys.readouterr().err


def test_a_rank_of_more_digits_than_python_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(RefusedError, match=r"log_ranks is \['9999"):
        plan(tmp_path, "train.py", log_ranks=5000 * "9")
