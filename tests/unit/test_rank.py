"""A script must not be able to tell that a rank runs it: tests compare it with ``python -u``, one by one.

The agent is a stand-in (fake_agent); everything else is real: interpreters, pipes, sockets, children, signals.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_agent
import pytest
from fake_agent import Ended, RankEnded, rank_environ, run_plain, run_rank

from nvflare_torchrun_plugin import script_imports

IDENTITY = """
import __main__, builtins, json, os, sys
facts = dict(
    same_module=__main__ is sys.modules["__main__"] and vars(__main__) is globals(),
    names=list(globals()), dir=dir(__main__), name=__name__, file=__file__, doc=__doc__, package=__package__,
    cached=__cached__, annotations=__annotations__, builtins=__builtins__ is builtins,
    loader=[type(__loader__).__name__, getattr(__loader__, "name", 0), getattr(__loader__, "path", 0)],
    spec=__spec__ and [__spec__.name, __spec__.origin, __spec__.has_location],
    argv=sys.argv, path=sys.path, flags=repr(sys.flags), warn=sys.warnoptions,
    orig_argv=sys.orig_argv, cwd=os.getcwd(), environ=dict(os.environ), limit=sys.getrecursionlimit(),
    hooks=[sys.excepthook is sys.__excepthook__, hasattr(sys, "last_type")],
    streams=[repr(sys.stdin), repr(sys.stdout), repr(sys.stderr), sys.stdout.write_through],
    code=[sys._getframe().f_code.co_filename, sys._getframe().f_code.co_flags, sys._getframe().f_code.co_name],
)
print(json.dumps(facts, indent=1, sort_keys=True))
"""


# What scripts here import, and more: parents and children, and what Python has loaded at its start in part.
PRELOAD = (
    "json",
    "random",
    "xml.etree:ElementTree",
    "importlib.metadata",
    "concurrent.futures:ThreadPoolExecutor",
    "multiprocessing.pool",
    "no.such:module",
    "logging.handlers",
)


@pytest.fixture(
    autouse=True, params=[pytest.param(None, id="cold"), pytest.param(PRELOAD, id="warm", marks=pytest.mark.slow)]
)
def _start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test for a rank that becomes its script at once, and for one that has imported and waited before."""
    monkeypatch.setattr(fake_agent.start, "preload", request.param)


def both(words: list[str], cwd: Path, **given: Any) -> tuple[Ended, RankEnded]:
    """Run the same words plainly and as a rank; nothing may have gone to the pipe that torchrun inherited."""
    plain = run_plain(words, cwd, given.get("environ"), given.get("options", ()))
    rank = run_rank(words, cwd, **given)
    assert rank.torchrun_output == b""
    return plain, rank


def same(words: list[str], cwd: Path, **given: Any) -> RankEnded:
    """Compare what a script prints and how it ends; return how the rank ended."""
    plain, rank = both(words, cwd, **given)
    # Line by line: so a failure shows the line that differs.
    assert [*rank.output.splitlines(keepends=True), rank.code] == [
        *plain.output.splitlines(keepends=True),
        plain.code,
    ]
    return rank


def write(cwd: Path, files: Mapping[str, str | bytes]) -> None:
    for name, text in files.items():
        path = cwd / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)


# ------------------------------------------------------------------------------------------------ what it finds


@pytest.mark.parametrize(
    "target",
    [
        "job/script.py",
        "./job/script.py",
        "job/../job//script.py",
        "relative_link.py",
        "absolute_link.py",
        "link_to_folder/script.py",
        "a b'c\"d\n$é漢.py",
        os.fsdecode(b"not-utf8-\xff.py"),
        "no_extension",
        "ABSOLUTE",
        "archive.zip",
        "folder",
        "./folder/",
        "compiled.pyc",
    ],
)
def test_main_module_is_the_script(tmp_path: Path, target: str) -> None:
    write(tmp_path, {"job/script.py": IDENTITY, "folder/__main__.py": IDENTITY, "no_extension": IDENTITY})
    (tmp_path / "relative_link.py").symlink_to("job/script.py")
    (tmp_path / "absolute_link.py").symlink_to(tmp_path / "relative_link.py")
    (tmp_path / "link_to_folder").symlink_to("job")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", IDENTITY)
    if target == "ABSOLUTE":
        target = str(tmp_path / "job/script.py")
    elif target == "compiled.pyc":
        make = "import py_compile, sys; py_compile.compile('job/script.py', 'compiled.pyc', doraise=True)"
        subprocess.run([sys.executable, "-c", make], cwd=tmp_path, check=True)
    elif not (tmp_path / target).exists():
        (tmp_path / target).write_text(IDENTITY)
    rank = same([target, "--lr", "0.1", "a b'c\"d\n$é", ""], tmp_path)
    assert rank.code == 0
    facts = json.loads(rank.output)
    assert (facts["name"], facts["argv"][1:]) == ("__main__", ["--lr", "0.1", "a b'c\"d\n$é", ""])
    assert "NVFL_AGENT_DIR" not in facts["environ"]


@pytest.mark.parametrize("target", ["mod", "package", "package.inner"])
def test_main_module_is_the_module(tmp_path: Path, target: str) -> None:
    packages = {"package/__init__.py": "import sys; print(sys.argv, __name__)", "package/inner.py": IDENTITY}
    write(tmp_path, {"mod.py": IDENTITY, "package/__main__.py": IDENTITY, **packages})
    rank = same(["-m", target, "-m", "x y"], tmp_path)
    assert rank.code == 0
    assert b'"__main__"' in rank.output


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
@pytest.mark.parametrize(
    ("environ", "options"),
    [
        ({"PYTHONSAFEPATH": "1"}, []),
        ({}, ["-I"]),
        ({}, ["-X", "dev"]),
        ({}, ["-O", "-W", "error"]),
        ({"PYTHONPATH": "here:/there"}, []),
    ],
)
def test_interpreter_options(
    tmp_path: Path, words: list[str], environ: dict[str, str], options: list[str]
) -> None:
    if "-I" in options and "PYTHONPATH" in os.environ:
        pytest.skip("the package is found by PYTHONPATH only, which -I ignores")
    if "PYTHONPATH" in environ and "PYTHONPATH" in os.environ:
        environ = {"PYTHONPATH": f"{environ['PYTHONPATH']}:{os.environ['PYTHONPATH']}"}
    write(tmp_path, {"script.py": IDENTITY})
    same(words, tmp_path, environ=environ, options=options)


def test_working_directory_that_is_gone(tmp_path: Path) -> None:
    write(tmp_path, {"script.py": "import sys; print(__file__, sys.path)"})
    into = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); "
    into += "os.execv(sys.executable, sys.argv[1:])"
    words = [sys.executable, "-u", str(tmp_path / "script.py")]
    plain = subprocess.run(
        [sys.executable, "-c", into, *words],
        cwd=tmp_path,
        capture_output=True,
        env=rank_environ(),
        check=True,
    )
    rank = run_rank([words[2]], tmp_path, prefix=[sys.executable, "-c", into])
    assert (rank.code, rank.output) == (0, plain.stdout)


def test_script_finds_its_own_modules_before_the_standard_library(tmp_path: Path) -> None:
    names = ["json", "socket", "tempfile", "random", "pathlib", "shutil", "selectors", "bisect"]
    write(tmp_path, {f"job/{name}.py": "" for name in names})
    write(tmp_path, {f"{name}.py": "print('of the working directory', __name__)" for name in names})
    write(tmp_path, {"job/script.py": f"for n in {names}: print(__import__(n).__file__)"})
    same(["job/script.py"], tmp_path)


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]])
def test_modules_that_are_loaded(tmp_path: Path, words: list[str]) -> None:
    write(tmp_path, {"script.py": "import sys\nprint('\\n'.join(sys.modules))\n"})
    write(tmp_path, {"with_runpy.py": "import runpy, sys\nprint('\\n'.join(sys.modules))\n"})
    rank = run_rank(words, tmp_path).output.split()
    plain = run_plain(words, tmp_path).output.split()
    # Python itself has loaded runpy for us; it can't be taken back without harm.
    with_runpy = run_plain(["with_runpy.py"], tmp_path).output.split()
    assert set(plain) <= set(rank)
    assert set(rank) - set(plain) <= set(with_runpy)
    if words[0] == "-m":
        assert rank == plain


def test_descriptors(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "script.py": """
import os
for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
    try:
        print(fd, os.readlink(f"/proc/self/fd/{fd}").split("[")[0], os.get_inheritable(fd))
    except OSError:
        pass
print(os.fstat(1) == os.fstat(2))
"""
        },
    )
    plain, rank = both(["script.py"], tmp_path)
    lines, expected = rank.output.decode().splitlines(), plain.output.decode().splitlines()
    sockets = [line for line in lines if "socket:" in line]
    assert len(sockets) == 1
    assert sockets[0].endswith("False")  # the connection to the agent, not for the script's own children
    assert [line for line in lines if line not in sockets] == expected


# ------------------------------------------------------------------------------------------------- how it ends

ENDINGS: dict[str, str | bytes] = {
    "returns": "print('done')",
    "exit none": "import sys; sys.exit()",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit text": "import sys; sys.exit('no data in é')",
    "exit object": "import sys; sys.exit([1, 2])",
    "exit big": "import sys; sys.exit(2**80)",
    "raise SystemExit class": "raise SystemExit",
    "os._exit": "import os; print('x'); os._exit(5)",
    "sigterm": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "sigkill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupt": "import atexit; atexit.register(print, 'exit handler'); raise KeyboardInterrupt",
    "sigint": "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "raises": "def f(x):\n    return 1 / x\n\nf(0)",
    "raises in a class body": "class A:\n    x = 1\n    y = undefined_name\n",
    "chained": "try:\n    {}['é']\nexcept KeyError as e:\n    raise RuntimeError('first') from e",
    "context": "try:\n    {}['é']\nexcept KeyError:\n    int('x')",
    "in a module": "import helper\nhelper.f()",
    "at a module's import": "import broken_helper",
    "syntax error in a module": "import bad_helper",
    "non-ascii": "größe = '漢'\ndef fü(größe):\n    raise ValueError(größe)  # é\nfü(größe)",
    "latin-1": "# -*- coding: latin-1 -*-\nx = 'é'\nraise ValueError(x)".encode("latin-1"),
    "bom": b"\xef\xbb\xbfraise ValueError(1)\n",
    "crlf": b"x = 1\r\nif x:\r\n    raise ValueError(x)\r\n",
    "notes": "e = ValueError(1)\nif hasattr(e, 'add_note'): e.add_note('a note')\nraise e",
    "own hook": "import sys\ndef hook(*a): print('hook', a[0], sys.exc_info(), sys.last_value)\n"
    "sys.excepthook = hook\n1/0",
    "own hook fails": "import sys\ndef hook(*a): int('x')\nsys.excepthook = hook\n1/0",
    "own hook exits": "import sys\nsys.excepthook = lambda *a: sys.exit(7)\n1/0",
    "hook deleted": "import sys\ndel sys.excepthook\n1/0",
    "last exception": "import atexit, sys\n"
    "atexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback.tb_lineno))\n1/0",
    "group": "try:\n    raise ExceptionGroup('g', [ValueError(1)])\nexcept NameError as e:\n    raise e from None",
    "stdout of its own": "import sys\nsys.stdout = open(1, 'w', 4096, closefd=False)\nprint('first')\n1/0",
    "no names": "for name in list(globals()): del globals()[name]\nnone",
    "no stderr": "import sys\nsys.stderr = None\n1/0",
    "str that raises": "class E(Exception):\n    def __str__(self): raise ValueError\nraise E(1)",
    "warns": "import warnings\nwarnings.warn('careful')\nx = '\\d'",
}


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
def test_output_and_exit_code(tmp_path: Path, how: str, module: bool) -> None:
    helpers = {
        "helper.py": "def f():\n    g()\ndef g():\n    raise OSError(5, 'é')\n",
        "broken_helper.py": "import helper\nhelper.g()\n",
        "bad_helper.py": "def f(:\n",
    }
    write(tmp_path, {"script.py": ENDINGS[how], **helpers})
    same(["-m", "script"] if module else ["script.py"], tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        b"def f(:\n",
        b"x = (1,\ny = 2\n",
        b"if 1:\n    x = 1\n  y = 2\n",
        b"if 1:\n    x = 1\nif x:",
        b"def f():\n\treturn 1\n        return 2\n",
        b's = """abc\nfoo\n',
        b'x = "abc\n',
        b"x = 1 \\\n",
        b"return 3\n",
        b'print "a"',
        'x = "éé" $ 3\n'.encode(),
        b"x = 1\r\ny = = 2\r\n",
        b"\xef\xbb\xbfx = 1\ny = = 2\n",
        b'x = 1\ns = "caf\xe9"\n',
        b"x = 1\n# caf\xe9\n",
        b"\xff\xfex\n",
        b"# -*- coding: nonsense -*-\nx = 1\n",
        b'# -*- coding: latin-1 -*-\nx = "\xe9" $ 3\n',
        b'x = 1\ny = "a\x00b"\n',
        b"def f():\n    global a\n    x = a\n    nonlocal q\n",
        b"",
        b"# only a comment",
        b"from __future__ import nonsense\n",
        b"x: int = 1\nprint(__annotations__)\n",
    ],
)
def test_source_that_is_odd(tmp_path: Path, source: bytes) -> None:
    write(tmp_path, {"script.py": source})
    rank = same(["script.py"], tmp_path)
    assert [message["traceback"] for message in rank.messages] == ([rank.output.decode()] if rank.code else [])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["missing.py"], 2),
        (["missing 'é'\n/x.py"], 2),
        (["unreadable.py"], 2),
        (["empty"], 1),
        (["-m", "missing"], 1),
        (["-m", "missing.inner"], 1),
        (["-m", "package"], 1),
        (["-m", "bad"], 1),
    ],
)
def test_target_that_is_not_there(tmp_path: Path, words: list[str], code: int) -> None:
    write(tmp_path, {"package/__init__.py": "", "bad.py": "def f(:\n"})
    (tmp_path / "unreadable.py").symlink_to("unreadable.py")
    (tmp_path / "empty").mkdir()
    assert same(words, tmp_path).code == code


@pytest.mark.parametrize("hook", ["sys.excepthook = None", "del sys.excepthook", "pass"])
def test_exit_code_without_hook_and_stderr(tmp_path: Path, hook: str) -> None:
    write(tmp_path, {"script.py": f"import sys\n{hook}\ndel sys.stderr\n1/0"})
    plain, rank = both(["script.py"], tmp_path)  # what Python prints then has addresses of objects in it
    assert rank.code == plain.code == 1
    assert rank.messages[0]["traceback"].endswith("ZeroDivisionError: division by zero\n")


ORDER = """
import atexit, gc, os, sys, threading, weakref
class Told:
    def __init__(self, name): self.name = name
    def __del__(self): print("gone", self.name)
def late(name):
    print(name, threading.current_thread().name, [n in globals() for n in ("__file__", "__cached__")])
def work():
    main.join()
    late("thread")
main = threading.main_thread()
atexit.register(late, "first registered")
threading.Thread(target=work).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
atexit.register(late, "last registered")
kept = Told("global")
def end():
    local = Told("local")
    {}
end()
"""


@pytest.mark.parametrize("module", [False, True], ids=["script", "module"])
@pytest.mark.parametrize("end", ["pass", "sys.exit(4)", "1 / 0", "raise KeyboardInterrupt", "os._exit(5)"])
def test_order_of_the_end(tmp_path: Path, end: str, module: bool) -> None:
    write(tmp_path, {"script.py": ORDER.replace("{}", end)})
    same(["-m", "script"] if module else ["script.py"], tmp_path)


# -------------------------------------------------------------------------------------- pickles and processes

CHILDREN = """
import functools, inspect, json, multiprocessing, os, pickle, sys
print("top level of", __name__) if __name__ != "__main__" else None
class Sample:
    def __init__(self, value): self.value = value
    def __reduce__(self): return (Sample, (self.value,))
def collate(samples, scale):
    found = __name__, sys.argv, sys.path[0], Sample.__module__, sorted(globals())
    return [s.value * scale for s in samples], *found
if __name__ == "__main__":
    with multiprocessing.get_context(METHOD).Pool(1) as pool:
        batches = [[Sample(1)], [Sample(3), Sample(4)]]
        print(json.dumps(pool.map(functools.partial(collate, scale=2), batches)))
        pool.close(), pool.join()  # a SIGTERM at its end would hit coverage at work
    print(pickle.loads(pickle.dumps(collate)) is collate, pickle.loads(pickle.dumps(Sample(5))).value)
    print(inspect.getsource(collate), inspect.getsourcefile(Sample))
    print(len(inspect.getsource(sys.modules["__main__"])))
"""


@pytest.mark.parametrize("words", [["my job/script.py"], ["-m", "script"]], ids=["script", "module"])
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_worker_processes(tmp_path: Path, words: list[str], method: str) -> None:
    source = CHILDREN.replace("METHOD", repr(method))
    write(tmp_path, {"my job/script.py": source, "script.py": source})
    rank = same([*words, "--epochs", "2"], tmp_path)
    assert rank.code == 0
    assert b"[[[2], " in rank.output


@pytest.mark.parametrize("end", ["pass", "sys.exit(7)", "1 / 0"])
def test_a_forked_child_that_comes_back_does_not_speak_for_the_rank(tmp_path: Path, end: str) -> None:
    write(
        tmp_path,
        {
            "nvflare/__init__.py": "",
            "nvflare/client/__init__.py": "import os\n"
            "def shutdown(): print('left by child', os.getpid() != parent)",
            "nvflare/client/api.py": "default_context = object()",
            "script.py": f"""
import os, sys, nvflare.client.api
nvflare.client.parent = os.getpid()
if os.fork():
    print(os.wait()[1])
else:
    {end}
""",
        },
    )
    plain, rank = both(["script.py"], tmp_path)
    assert rank.output == plain.output + b"left by child False\n"
    assert rank.messages == []


# ------------------------------------------------------------------------------------------- output and agent


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


# ------------------------------------------------------------------------------------------------ NVFlare's API

# The real API with a context of ours in place of a session: one non-daemon thread, as NVFlare's own, that only
# its shutdown ends.
NVFLARE = """
import sys, threading, types
import nvflare.client as flare
import nvflare.client.api
left = threading.Event()
class Api:
    def get_config(self):
        return CONFIG
    def receive(self, timeout):
        print("received", timeout, flush=True)
        RECEIVES
    def shutdown(self):
        print("left the API", flush=True)
        left.set()
        FAILS
nvflare.client.api.default_context = types.SimpleNamespace(api=Api())
threading.Thread(target=left.wait).start()
END
"""


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs nvflare")
@pytest.mark.parametrize(
    ("end", "fails", "code", "output"),
    [
        ("pass", "", 0, ["left the API"]),
        ("sys.exit(3)", "", 3, ["left the API"]),
        ("raise ValueError('bad')", "", 1, ["ValueError: bad", "left the API"]),
        ("raise KeyboardInterrupt", "", -2, ["KeyboardInterrupt", "left the API"]),
        ("flare.shutdown()", "", 0, ["left the API", "left the API"]),
        (
            "sys.exit(3)",
            "raise OSError('gone')",
            3,
            ["left the API", "leaving NVFlare's Client API failed: OSError: gone"],
        ),
        ("pass", "sys.exit(9)", 0, ["left the API", "leaving NVFlare's Client API failed: SystemExit: 9"]),
    ],
)
def test_nvflare_is_left_after_the_traceback(
    tmp_path: Path, end: str, fails: str, code: int, output: list[str]
) -> None:
    assert run_on_nvflare(tmp_path, END=end, FAILS=fails) == (code, output)


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs nvflare")
@pytest.mark.parametrize(
    ("config", "receives", "output"),
    [
        ("{'TASK_EXCHANGE': {'launch_once': False}}", "", ["received 10.0", "left the API"]),
        ("{'TASK_EXCHANGE': {'launch_once': True}}", "", ["left the API"]),
        ("{'TASK_EXCHANGE': {'launch_once': False}}", "raise OSError('gone')", ["received 10.0", "left the API"]),
    ],
)
def test_the_task_of_a_launch_arrives_before_nvflare_is_left(
    tmp_path: Path, config: str, receives: str, output: list[str]
) -> None:
    assert run_on_nvflare(tmp_path, CONFIG=config, RECEIVES=receives) == (0, output)


def run_on_nvflare(cwd: Path, **given: str) -> tuple[int, list[str]]:
    """Return the exit code of a script on NVFLARE, and its lines but those of tracebacks."""
    source = NVFLARE
    for word in ("CONFIG", "RECEIVES", "FAILS", "END"):
        source = source.replace(word, given.get(word, "{}" if word == "CONFIG" else ""))
    write(cwd, {"script.py": source})
    rank = run_rank(["script.py"], cwd)
    return rank.code, [line for line in rank.output.decode().splitlines() if line[0] not in " T"]


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs nvflare")
def test_nvflare_that_the_script_never_joined_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, {"script.py": "import nvflare.client as flare\nprint(flare.__name__)"})
    assert same(["script.py"], tmp_path).output == b"nvflare.client\n"


# ---------------------------------------------------------------------------------------------- imported ahead

# Changes whatever an import can change, on two levels; what it prints is a part of what a cold rank prints.
MEDDLERS = {
    "library/meddler.py": """
import json, os, signal, sys, warnings
import deeper.inner
print("imported", __name__)
os.environ["MEDDLER"] = "was here"
os.environ["HOME"] = "/nowhere"
os.environ.pop("TO_GO", None)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: None)
warnings.filterwarnings("ignore", message="meddler")
sys.path.append("/of/the/meddler")
sys.excepthook = lambda *a: print("hook", a[0].__name__)
os.chdir("library")
""",
    "library/deeper/__init__.py": "import os\nos.environ['DEEPER'] = 'yes'\nvalue = 5\n",
    "library/deeper/inner.py": "from deeper import value\n",
    "other/deeper.py": "value = 6\n",
    "library/logs.py": """
import logging, sys
logging.basicConfig(level=7, format='logs %(message)s', stream=sys.stdout)
""",
    "library/shouts.py": """
import sys
class Shouts:
    def write(self, text, write=sys.stdout.write):
        write(text.upper())
    flush = sys.stdout.flush
sys.stdout = Shouts()
sys.displayhook = sys.unraisablehook = print
""",
}
LOOK = """
def look(when):
    import sys
    import _signal, _warnings, os
    names = ("MEDDLER", "HOME", "TO_GO", "DEEPER", "GO", "MINE")
    print(when, {name: os.environ.get(name) for name in names})
    print([str(_signal.getsignal(n))[:12] for n in (_signal.SIGUSR1, _signal.SIGTERM, _signal.SIGINT)])
    print(len(_warnings.filters), sys.path[1:], os.path.basename(os.getcwd()))
    print(sys.excepthook is sys.__excepthook__)
    names = ("meddler", "deeper", "deeper.inner", "json", "signal", "xml", "xml.etree")
    print([name for name in names if name in sys.modules])
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import meddler",
        "import deeper\nlook('between')\nimport meddler",
        "import deeper.inner\nlook('between')\nfrom meddler import json",
        "import json",
        "import sys\nprint(sys.displayhook, sys.unraisablehook)\nimport shouts\nprint(sys.displayhook)",
        "import logging\nprint(logging.root.level, logging.root.handlers)\nimport logs\nlogging.log(7, 'text')",
        "import logging, sys\nlogging.basicConfig(format='mine %(message)s', stream=sys.stdout)\n"
        "import logs\nlogging.warning('text')\nprint(logging.root.level)",
        "import logs, logging\nlogging.log(7, 'text')",
        "import sys\nsys.path.insert(0, 'other')\nimport deeper\nprint(deeper.value)",
        "import os\nos.environ['HOME'] = os.environ['MINE'] = 'my own'\nimport meddler",
        "import signal\nsignal.signal(signal.SIGTERM, print)\nprint(signal.getsignal(signal.SIGTERM))",
        "import importlib.util\nprint(importlib.util.find_spec('meddler').origin)\nlook('found')\nimport meddler",
        "import importlib.util, deeper\nprint(importlib.util.find_spec('deeper').loader.get_source('deeper'))",
        "import meddler, importlib, deeper\nprint(importlib.reload(deeper).__spec__.name, meddler.__spec__.name)",
        "import pickle, deeper\nprint(pickle.loads(pickle.dumps(deeper.__loader__.__class__)))",
        "pass",
    ],
)
def test_what_importing_changes_is_not_seen_before_the_script_imports_it(
    tmp_path: Path, imports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = str(tmp_path / "library")
    environ = {
        "PYTHONPATH": os.pathsep.join([library, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TO_GO": "1",
    }
    write(tmp_path, {**MEDDLERS, "script.py": f"{LOOK}\nlook('first')\n{imports}\nlook('last')\n1 / 0\n"})
    preload = None
    if fake_agent.start.preload is not None:
        named = script_imports.ahead_of(str(tmp_path / "script.py"), module=False, folders=[])
        assert named[0] in ("torch" if imports == "pass" else imports)
        # A library that the script does not import stays hidden.
        preload = [*(name for name in named if name != "torch"), "xml.etree"]
        monkeypatch.setattr(fake_agent.start, "environ", {"GO": "1"})
    plain = run_plain(["script.py"], tmp_path, {**environ, **fake_agent.start.environ})
    rank = run_rank(["script.py"], tmp_path, environ=environ, preload=preload)
    assert rank.failed == []
    printed = rank.output.decode().splitlines(keepends=True)
    expected = plain.output.decode().splitlines(keepends=True)
    if preload is not None and "imported meddler\n" in printed:
        # The one thing that comes early is what the module prints.
        line = "imported meddler\n"
        assert (printed.count(line), expected.count(line)) == (1, 1)
        assert printed.index(line) == 0 or "meddler" not in preload
        printed.remove(line)
        expected.remove(line)
    assert [*printed, rank.code] == [*expected, plain.code]


# How to change what a module can change for all others, and how to see it.
CHANGES = {
    "umask": ("os.umask(0o007)", "oct(os.umask(0o022))"),
    "recursion limit": ("sys.setrecursionlimit(2345)", "sys.getrecursionlimit()"),
    "switch interval": ("sys.setswitchinterval(0.5)", "sys.getswitchinterval()"),
    "garbage collection": ("gc.disable()", "gc.isenabled()"),
    "its thresholds": ("gc.set_threshold(7, 8, 9)", "gc.get_threshold()"),
    "its flags": ("gc.set_debug(gc.DEBUG_SAVEALL)", "gc.get_debug()"),
    "locale": ("locale.setlocale(locale.LC_ALL, 'C')", "locale.setlocale(locale.LC_ALL)"),
    "default timeout": ("socket.setdefaulttimeout(0.2)", "socket.getdefaulttimeout()"),
    "bytecode": ("sys.dont_write_bytecode = 'no'", "sys.dont_write_bytecode"),
    "breakpoint": ("sys.breakpointhook = print", "sys.breakpointhook is sys.__breakpointhook__"),
    "start method": (
        "multiprocessing.set_start_method('spawn')",
        "multiprocessing.get_start_method(allow_none=True)",
    ),
    "logging": ("logging.disable(40)", "logging.root.manager.disable"),
    "random state": ("random.seed(5)", "random.getstate() == random.Random(5).getstate()"),
}
MODULES = "gc, locale, logging, multiprocessing, os, random, socket, sys"


@pytest.mark.parametrize("what", CHANGES)
def test_a_setting_that_importing_changes_is_seen_once_it_is_imported(tmp_path: Path, what: str) -> None:
    sees_a_change(tmp_path, *CHANGES[what], MODULES)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_so_are_the_random_states_of_frameworks(tmp_path: Path) -> None:
    look = "numpy.random.get_state()[1][0] == 5, torch.initial_seed() == 5"
    sees_a_change(tmp_path, "numpy.random.seed(5); torch.manual_seed(5)", look, "numpy.random, torch")


def sees_a_change(tmp_path: Path, change: str, look: str, modules: str) -> None:
    """Have a library make the change as it is imported, and a script look before and after."""
    sees = f"import {modules}\nprint({look})\nimport changes\nprint({look})\n"
    write(tmp_path, {"library/changes.py": f"import {modules}\n{change}\n", "script.py": sees})
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])}
    plain = run_plain(["script.py"], tmp_path, environ)
    assert len(set(plain.output.splitlines())) == 2
    preload = [*modules.split(", "), "changes"] if fake_agent.start.preload is not None else None
    rank = run_rank(["script.py"], tmp_path, environ=environ, preload=preload)
    assert (rank.failed, rank.output.decode(), rank.code) == ([], plain.output.decode(), 0)


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torch", "nvflare"))), reason="needs torch and nvflare")
@pytest.mark.parametrize("touches", [False, True])
def test_nothing_that_is_imported_ahead_touches_a_gpu(tmp_path: Path, touches: bool) -> None:
    """A context on it would take memory from the task that is at work."""
    script = "import torch.distributed\nimport nvflare.client\nprint(torch.cuda.is_initialized())"
    watch = "import torch\ndef refuse():\n    raise OSError('CUDA is touched')\ntorch.cuda._lazy_init = refuse"
    library = {"watch": watch, "touches": "import torch\ntorch.cuda.current_device()"}
    write(tmp_path, {"script.py": script, **{f"library/{name}.py": code for name, code in library.items()}})
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])}
    names = script_imports.ahead_of(str(tmp_path / "script.py"), module=False, folders=[])
    preload = ["torch", "watch", *names, *(["touches"] if touches else [])]
    rank = run_rank(["script.py"], tmp_path, environ=environ, preload=preload)
    assert (rank.output, rank.code) == (b"False\n", 0)
    assert rank.failed == (["touches: OSError: CUDA is touched"] if touches else [])


def test_what_cannot_be_imported_ahead_is_told_and_left_to_the_script(tmp_path: Path) -> None:
    write(tmp_path, {"library/leaves.py": "import sys; sys.exit(3)", "script.py": "import leaves"})
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])}
    preload = ("leaves", "no.such", "json:nothing", "x" * 1000)
    rank = run_rank(["script.py"], tmp_path, environ=environ, preload=preload)
    assert rank.code == 3
    assert rank.failed[:2] == ["leaves: SystemExit: 3", "no.such: ModuleNotFoundError: No module named 'no'"]
    assert [len(sentence) for sentence in rank.failed[2:]] == [300]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "went away before it gave orders"),
        (b"s3cr3t\n", "word to go on is not JSON"),
        (b"[]\n", "holds no environment"),
        (b'{"environ": {"A": 1}}\n', "holds no environment"),
    ],
)
def test_a_word_to_go_on_that_is_not_valid(
    tmp_path: Path, answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_agent.start, "answer", answer)
    write(tmp_path, {"script.py": "print('ran')"})
    rank = run_rank(["script.py"], tmp_path, preload=["json"])
    assert rank.code == 2
    assert rank.output.decode().startswith("rank 3: ")
    assert reason in rank.output.decode()
    assert b"s3cr3t" not in rank.output
    assert b"ran\n" not in rank.output
