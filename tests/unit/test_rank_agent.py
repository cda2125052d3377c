"""What passes between a rank and its agent: orders, output, the traceback; the script sees nothing of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import fake_agent
import pytest
from fake_agent import run_plain, run_rank
from rank_runs import same, write

pytestmark = pytest.mark.usefixtures("cold_and_warm")


def test_hello(tmp_path: Path) -> None:
    write(tmp_path, {"script.py": "print(1)"})
    rank = run_rank(["script.py"], tmp_path)
    assert rank.hello == {"rank": 3, "local_rank": 1, "pid": rank.pid}
    assert rank.messages == []


def test_long_orders(tmp_path: Path) -> None:
    write(tmp_path, {"script.py": "import sys; print(len(sys.argv), sum(map(len, sys.argv[1:])))"})
    arguments = ["x" * 1000] * 1000
    assert run_rank(["script.py"], tmp_path, answer={"args": arguments}).output == b"1001 1000000\n"


def test_long_orders_and_the_word_to_go_on_may_come_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"script.py": "import os, sys; print(len(sys.argv), os.environ['GO'])"})
    orders: dict[str, Any] = {"args": ["x" * 1000] * 1000}
    monkeypatch.setattr(fake_agent.start, "environ", {"GO": "1"})
    assert run_rank(["script.py"], tmp_path, answer=orders, preload=[], early=True).output == b"1001 1\n"


def test_much_output_is_whole(tmp_path: Path) -> None:
    source = "import sys\nfor n in range(100_000):\n    print(f'{n:099d}', file=(sys.stdout, sys.stderr)[n % 2])\n"
    write(tmp_path, {"script.py": source})
    expected = b"".join(b"%099d\n" % n for n in range(100_000))
    output = run_rank(["script.py"], tmp_path).output
    assert (len(output), hashlib.sha256(output).digest()) == (10_000_000, hashlib.sha256(expected).digest())


def test_redirected_stderr_stays(tmp_path: Path) -> None:
    write(tmp_path, {"script.py": "print('to the agent')\nraise ValueError('to the file')"})
    rank = run_rank(["script.py"], tmp_path, stderr=tmp_path / "stderr.log")
    assert (rank.output, rank.torchrun_output) == (b"to the agent\n", b"")
    assert (tmp_path / "stderr.log").read_bytes().endswith(b"ValueError: to the file\n")
    assert rank.messages == [{"traceback": (tmp_path / "stderr.log").read_text()}]


@pytest.mark.parametrize(
    "hook", ["", "sys.excepthook = lambda *a: print('hook')", "sys.excepthook = lambda *a: sys.exit(7)"]
)
def test_agent_learns_the_traceback(tmp_path: Path, hook: str) -> None:
    write(tmp_path, {"script.py": f"import sys\n{hook}\nraise ValueError('é\\udcff')"})
    write(tmp_path, {"without_hook.py": "import sys\n\nraise ValueError('é\\udcff')"})
    expected = run_plain(["without_hook.py"], tmp_path).output.decode().replace("without_hook", "script")
    (message,) = run_rank(["script.py"], tmp_path).messages
    assert list(message) == ["traceback"]
    # Python's stderr escapes what it cannot encode; the agent gets the text itself.
    assert message["traceback"].replace("\udcff", "\\udcff") == expected


def test_agent_learns_the_end_of_a_long_traceback(tmp_path: Path) -> None:
    write(tmp_path, {"script.py": "raise ValueError('漢' * 70_000 + 'the end')"})
    (message,) = run_rank(["script.py"], tmp_path).messages
    assert len(message["traceback"]) == 64 * 1024
    assert message["traceback"].endswith("漢the end\n")


def test_other_threads_print_while_the_traceback_is_taken(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "script.py": """
import sys, threading
asked, printed = threading.Event(), threading.Event()
def work():
    asked.wait()
    print("from a thread", file=sys.stderr)
    printed.set()
threading.Thread(target=work).start()
class Slow(Exception):
    def __str__(self):
        asked.set()
        printed.wait()
        return "slow"
sys.excepthook = lambda *a: None
raise Slow
"""
        },
    )
    rank = run_rank(["script.py"], tmp_path)
    assert rank.output == b"from a thread\n"
    (message,) = rank.messages
    assert message["traceback"].endswith("Slow: slow\n")


@pytest.mark.parametrize("stay", [True, False], ids=["agent stays", "agent goes"])
def test_descriptors_and_signals_of_the_script_are_its_own(tmp_path: Path, stay: bool) -> None:
    write(
        tmp_path,
        {
            "script.py": """
import atexit, os, signal, socket, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
if "close" in sys.argv:
    os.closerange(3, 100)
    pairs = [socket.socketpair() for _ in range(5)]
    def check():
        for pair in pairs:
            for end in pair:
                end.setblocking(False)
                try:
                    print("stray bytes", end.recv(100))
                except BlockingIOError:
                    pass
    atexit.register(check)
1 / 0
"""
        },
    )
    assert same(["script.py", "close"], tmp_path, stay=stay).messages == []
    assert len(same(["script.py"], tmp_path, stay=stay).messages) == (1 if stay else 0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"raw_answer": b"", "pipes": 0}, "went away before it gave orders"),
        ({"raw_answer": b'{"args": ["s3cr3t'}, "ended after 17 bytes of its answer"),
        ({"raw_answer": b"s3cr3t\n"}, "is not JSON"),
        ({"raw_answer": b"\xff\n"}, "is not JSON"),
        ({"raw_answer": b'["s3cr3t"]\n'}, "is a list, not an object"),
        ({"pipes": 0}, "sent 0 descriptors"),
        ({"pipes": 2}, "sent 2 descriptors"),
        ({"answer": {"module": 1}}, "'module' of the node agent's answer is a int, not a bool"),
        ({"answer": {"target": None}}, "'target' of the node agent's answer is a NoneType, not a str"),
        ({"answer": {"args": "s3cr3t"}}, "'args' of the node agent's answer is a str, not a list"),
        ({"answer": {"args": ["s3cr3t", 1]}}, "'args' of the node agent's answer is not a list of str"),
        ({"answer": {"output": [1]}}, "'output' of the node agent's answer is [1], not [st_dev, st_ino]"),
        ({"answer": {"output": [1, "2"]}}, "not [st_dev, st_ino]"),
    ],
)
def test_answer_that_is_not_valid(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    write(tmp_path, {"script.py": "print('ran')"})
    rank = run_rank(["script.py"], tmp_path, **given)
    assert (rank.code, rank.output) == (2, b"")
    (line,) = rank.torchrun_output.decode().splitlines()
    assert line.startswith("rank 3: ")
    assert reason in line
    assert "s3cr3t" not in line


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"NVFL_AGENT_DIR": "{}"}, "rank 3: cannot reach the node agent in '{}': "),
        ({"NVFL_AGENT_DIR": "/not/there"}, "rank 3: cannot reach the node agent in '/not/there': "),
        ({"NVFL_AGENT_DIR": ""}, "rank 3: NVFL_AGENT_DIR is not set"),
        ({"RANK": ""}, "rank ?: RANK is '' in the environment"),
        ({"RANK": "x"}, "rank x: RANK is 'x' in the environment"),
        ({"LOCAL_RANK": "-1"}, "rank 3: LOCAL_RANK is '-1' in the environment"),
        ({"LOCAL_WORLD_SIZE": "two"}, "rank 3: LOCAL_WORLD_SIZE is 'two' in the environment"),
    ],
)
def test_agent_that_cannot_be_reached(tmp_path: Path, environ: dict[str, str], line: str) -> None:
    environ = {name: value.format(tmp_path) for name, value in environ.items()}
    done = run_plain(["-m", "nvflare_torchrun_plugin.rank", "script.py"], tmp_path, environ)
    (output,) = done.output.decode().splitlines()
    assert done.code == 2
    assert output.startswith(line.format(tmp_path))
