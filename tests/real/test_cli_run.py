"""`nvflare-torchrun run` for real: two nodes on this host, and three hosts reached by ssh."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from beds.hosts import ENVIRON
from cli_runs import COMMAND, Command, command
from ssh_groups import SshGroups

from nvflare_torchrun_plugin.node import procs

pytestmark = pytest.mark.real

TRAIN = """
    import os, sys
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([10 ** dist.get_rank()])
    dist.all_reduce(total)
    print("total", total.item(), sys.argv[1:], os.environ.get("COLOUR"), flush=True)
    dist.destroy_process_group()
"""
# The other rank waits for what never comes, and would for minutes.
FAIL = """
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")
    time.sleep(600)
"""
WAIT = """
    import time
    print("waits", flush=True)
    time.sleep(600)
"""


def write(folder: Path, script: str) -> None:
    (folder / "train.py").write_text(dedent(script))


def test_two_nodes_on_this_host(tmp_path: Path) -> None:
    write(tmp_path, TRAIN)
    words = ["run", "--nodes", "2", "--nproc_per_node", "1", "--tee", "3", "--env", "COLOUR=blue"]
    ended = command([*words, "--run-dir", "logs", "train.py", "--lr", "0.1"], tmp_path)
    assert ended.code == 0, ended.err
    said = "total 11 ['--lr', '0.1'] blue"
    # torchrun's own option has been there: with --tee it prints a rank's lines itself, and the rank's name.
    assert [line for line in sorted(ended.lines()) if said in line] == [
        f"0 | [default0]:{said}",
        f"1 | [default0]:{said}",
    ]
    assert "\x1b" not in ended.out + ended.err
    assert re.search(r"^nvflare-torchrun: task group .*: training, \d+ s after", ended.err, re.MULTILINE)
    assert re.search(r"^group ok after [0-9.]+ s\nlogs and verdict: .*/logs\n$", ended.err, re.MULTILINE)
    verdict = json.loads((tmp_path / "logs/attempt-0001/verdict.json").read_text())
    assert verdict["outcome"] == "ok"
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_exception_of_a_rank_ends_it_and_is_blamed(tmp_path: Path) -> None:
    write(tmp_path, FAIL)
    ended = command(["run", "--nodes", "2", "--nproc-per-node", "1", "--json", "train.py"], tmp_path)
    assert ended.code == 1
    *lines, last = map(json.loads, ended.lines())
    assert {"node": 1, "rank": 1, "line": "ValueError: no luck"} in lines
    failure = last["verdict"]["failure"]
    assert (failure["rank"], last["exit_code"]) == (1, 1)
    assert failure["traceback"].endswith("ValueError: no luck\n")
    assert re.search(r"^group failed: node 1 \(.*\) rank 1 \(local rank 0\): ", ended.err, re.MULTILINE)
    assert "    ValueError: no luck\n" in ended.err
    assert list(Path(last["run_dir"]).parent.iterdir()) == [Path(last["run_dir"])]


def test_hosts_by_ssh_and_a_rank_that_ends_with_a_code(groups: SshGroups) -> None:
    folder = groups.folder
    write(folder, TRAIN + '    if dist.is_initialized() or os.environ["RANK"] == "1": sys.exit(7)\n')
    words = ["run", "--nodes", "h0,h1", "--nproc-per-node", "1", "train.py"]
    ended = command(words, folder, groups.bed["h0"])
    assert ended.code == 1, ended.err
    assert {"0:0 | total 11 [] None", "1:1 | total 11 [] None"} <= set(ended.lines())
    assert "group failed: node 1 (h1) rank 1 (local rank 0): exit code 7" in ended.err


def test_ctrl_c_ends_it_on_all_hosts(groups: SshGroups) -> None:
    write(groups.folder, WAIT)
    words = ["run", "--nodes", "h0,h1", "--nproc-per-node", "1", "train.py"]
    running = Command(words, groups.folder, groups.bed["h0"])
    running.wait_for("0:0 | waits", "1:1 | waits")
    assert set(groups.processes()) == {"h0", "h1"}
    running.signal(signal.SIGINT)
    ended = running.finish()
    assert ended.code == 130
    assert "group stopped after" in ended.err
    assert "got SIGINT" in ended.err
    groups.wait_until_gone()


def test_on_a_terminal_there_is_a_progress_line_and_its_ctrl_c_ends_it(tmp_path: Path) -> None:
    write(tmp_path, WAIT)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        words = ["run", "--nodes", "2", "--nproc-per-node", "1", "train.py"]
        os.execve(COMMAND[0], [*COMMAND, *words], {**os.environ, "TERM": "xterm"})  # noqa: S606
    said = b""
    with open(terminal, "rb", buffering=0) as reading:
        while not (b"training" in said and said.count(b"waits") == 2):
            said += reading.read(65536)
        started = procs.descendants(pid)
        os.write(terminal, b"\x03")
        # A terminal whose last process has ended is an error to read from.
        with contextlib.suppress(OSError):
            while data := reading.read(65536):
                said += data
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert re.search(rb"training \d:\d\d, ranks: 2  \(Ctrl-C ends it on all nodes\)", said)
    assert b"\x1b[36m0:0 |\x1b[0m waits\r\n" in said
    # The line has been taken away, and what comes last stands alone.
    assert re.search(rb"\r\x1b\[Kgroup stopped after [0-9.]+ s: got SIGINT\r\n", said)
    assert len(started) >= 4
    assert [each for each in started if procs.runs(each)] == []


def test_a_host_that_does_not_see_the_folder_gets_a_copy(groups: SshGroups) -> None:
    folder = groups.own / groups.folder.name
    groups.bed["h0"].run(["mkdir", "-p", str(folder)])
    script = "import os; from pathlib import Path; print(Path('data.txt').read_text(), os.getcwd(), flush=True)"
    for name, text in (("train.py", script), ("data.txt", "seven")):
        groups.bed["h0"].run([sys.executable, "-c", f"open({str(folder / name)!r}, 'w').write({text!r})"])
    words = ["run", "--nodes", "h0,h1", "--nproc-per-node", "1"]
    ended = command([*words, "--copy", "train.py"], folder, groups.bed["h0"])
    assert ended.code == 0, ended.err
    here, there = sorted(line for line in ended.lines() if "seven" in line)
    assert here == f"0:0 | seven {folder}"
    assert there.startswith("1:1 | seven ")
    assert str(folder) not in there
    ended = command([*words, "train.py"], folder, groups.bed["h0"])
    assert ended.code == 1
    assert f"node 1 (h1): there is no directory '{folder}', in which the ranks work" in ended.err


def test_a_reader_that_leaves_ends_it(tmp_path: Path) -> None:
    write(tmp_path, 'import time\nwhile True: print("x", flush=True); time.sleep(0.1)')
    with subprocess.Popen(
        [*COMMAND, "run", "--nproc-per-node", "1", "train.py"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0:0 | x\n"
        started = procs.descendants(process.pid)
        assert started
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(60) == 1
    assert "nobody reads its output any more" in said
    assert "Exception ignored" not in said
    assert [pid for pid in started if procs.runs(pid)] == []
