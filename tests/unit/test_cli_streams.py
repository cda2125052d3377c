"""Every verb of the built command, whatever its terminal, pipe or disk does: no traceback, a documented code."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from test_cli_help import verbs
from test_cli_timeline import a_good_task

from nvflare_torchrun_plugin.cli.verbs import app

pytestmark = pytest.mark.slow

# A verb's words and its exit code when all is well. No node can be started with this Python: so these end soon.
NO_PYTHON = ("--python", "/nonexistent/python")
VERBS: dict[str, tuple[tuple[str, ...], int]] = {
    "run": (("--json", *NO_PYTHON, "train.py"), 1),
    "plan": (("--nodes", "2", "train.py"), 0),
    "doctor": (NO_PYTHON, 1),
    "templates path": ((), 0),
    "templates list": ((), 0),
    "templates show": (("torchrun_fedavg_pt",), 0),
    "templates copy": (("torchrun_fedavg_pt", "copied"), 0),
    "site check": (("kit",), 0),
    "site write": (("kit", "--nodes", "2"), 0),
    "site allow": (("kit",), 0),
    "timeline": (("run",), 0),
}
WIDE = {"COLUMNS": "100", "LINES": "30"}


@dataclass
class Ended:
    code: int
    out: bytes
    err: bytes


def argv(verb: str) -> list[str]:
    script = shutil.which("nvflare-torchrun")
    assert script is not None
    return [script, *verb.split(), *VERBS[verb][0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, a kit and a run; its name is not ASCII."""
    folder = tmp_path / "Ordner-\N{LATIN SMALL LETTER U WITH DIAERESIS}"
    for below in ("kit/local", "kit/startup"):
        (folder / below).mkdir(parents=True)
    (folder / "train.py").touch()
    (folder / "kit/local/resources.json.default").write_text(json.dumps({"class_allow_list": ["x"]}))
    a_good_task(folder / "run")
    return folder


def environ(**more: str) -> dict[str, str]:
    """Without what the caller's terminal says."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("TERM", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LC_ALL")
    }
    return {**kept, **more}


def run(verb: str, folder: Path, shell_words: str = "", **more: str) -> Ended:
    """Run the verb by a shell, which knows how to close and to lead away its streams."""
    line = f"{shlex.join(argv(verb))} {shell_words}"
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env=environ(**more),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def on_terminal(verb: str, folder: Path, more: Mapping[str, str]) -> Ended:
    """Run the verb with stdout and stderr on a terminal."""
    master, slave = pty.openpty()
    said: list[bytes] = []

    def read() -> None:
        # A terminal whose last process has ended is an error to read from.
        with contextlib.suppress(OSError):
            while data := os.read(master, 65536):
                said.append(data)

    try:
        process = subprocess.Popen(
            argv(verb), cwd=folder, env=environ(**WIDE, **more), stdin=slave, stdout=slave, stderr=slave
        )
    finally:
        os.close(slave)
    reading = threading.Thread(target=read)
    reading.start()
    code = process.wait(120)
    reading.join(120)
    os.close(master)
    return Ended(code, b"".join(said), b"")


def test_all_verbs_are_here() -> None:
    assert {" ".join(words) for words in verbs(typer.main.get_command(app))} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_is_told_in_one_line(verb: str, folder: Path) -> None:
    ended = run(verb, folder, "> /dev/full")
    assert ended.code == 1
    assert ended.err.endswith(b"nvflare-torchrun: the output cannot be written: No space left on device\n")
    assert b"Traceback" not in ended.err
    assert b"Exception ignored" not in ended.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_has_gone_is_not_complained_of(verb: str, folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    # Python's own buffer, and none: so it is noticed at the end, and in the middle.
    for unbuffered in ("", "1"):
        with contextlib.suppress(FileNotFoundError):
            (folder / "kit/local/node_group.yaml").unlink()
        shutil.rmtree(folder / "copied", ignore_errors=True)
        done = subprocess.run(
            argv(verb),
            cwd=folder,
            env=environ(PYTHONUNBUFFERED=unbuffered),
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=120,
        )
        assert done.returncode == 1
        # What a run, and nothing else, says there is its verdict.
        assert (b"group failed" in done.stderr) == (verb == "run")
        assert b"Traceback" not in done.stderr
        assert b"Error" not in done.stderr
    os.close(writing)


@pytest.mark.parametrize("verb", VERBS)
def test_streams_that_are_closed_are_as_if_led_to_nowhere(verb: str, folder: Path) -> None:
    ended = run(verb, folder, "<&- >&- 2>&-")
    assert (ended.code, ended.out, ended.err) == (VERBS[verb][1], b"", b"")


@pytest.mark.parametrize("verb", VERBS)
def test_without_stdin_the_output_is_the_same(verb: str, folder: Path) -> None:
    ended = run(verb, folder, "<&-")
    assert ended.code == VERBS[verb][1]
    assert ended.out
    assert b"Traceback" not in ended.err


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}], ids=str)
@pytest.mark.parametrize("verb", VERBS)
def test_a_locale_without_the_signs(verb: str, folder: Path, locale: dict[str, str]) -> None:
    ended = run(verb, folder, **locale)
    assert ended.code == VERBS[verb][1], ended.err
    assert b"Traceback" not in ended.err
    if "PYTHONIOENCODING" in locale:
        assert ended.out.isascii()
        assert ended.err.isascii()
    if verb == "doctor":
        lines = ended.out.decode(errors="replace").splitlines()
        marks = {line.split()[0] for line in lines[2:]}
        assert marks <= ({"ok", "failed", "-"} if ended.out.isascii() else {"\u2713", "\u2717", "-"})


@pytest.mark.parametrize("verb", VERBS)
def test_a_dumb_terminal_gets_plain_text(verb: str, folder: Path) -> None:
    ended = on_terminal(verb, folder, {"TERM": "dumb"})
    assert ended.code == VERBS[verb][1]
    assert ended.out
    assert b"\x1b" not in ended.out


@pytest.mark.parametrize("verb", VERBS)
def test_who_wants_no_colours_gets_none(verb: str, folder: Path) -> None:
    ended = on_terminal(verb, folder, {"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert ended.code == VERBS[verb][1]
    # Bold and dim are no colours.
    numbers = {
        int(n)
        for part in ended.out.split(b"\x1b[")[1:]
        for n in part.partition(b"m")[0].split(b";")
        if n.isdigit()
    }
    assert {number for number in numbers if number >= 30} == set()


def test_ctrl_c_in_the_middle(folder: Path) -> None:
    """Its file is a pipe that says nothing: the verb is in the middle once somebody has opened the other end."""
    os.mkfifo(folder / "kit/local/node_group.yaml")
    process = subprocess.Popen(
        argv("site check"), cwd=folder, env=environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with open(folder / "kit/local/node_group.yaml", "wb"):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_ctrl_c_while_it_loads(folder: Path) -> None:
    (folder / "typer").mkdir()
    os.mkfifo(folder / "typer/pipe")
    (folder / "typer/__init__.py").write_text(f"open({str(folder / 'typer/pipe')!r}).read()\n")
    process = subprocess.Popen(
        argv("site check"),
        cwd=folder,
        env=environ(PYTHONPATH=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with open(folder / "typer/pipe", "wb"):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, b"", b"")
