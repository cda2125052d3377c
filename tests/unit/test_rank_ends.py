"""A script must not be able to tell that a rank runs it: its output and its exit code, however it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_runs import both, same, write

pytestmark = pytest.mark.usefixtures("cold_and_warm")

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
