"""What a rank that waits has imported before: the script cannot tell."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import fake_agent
import pytest
from fake_agent import run_plain, run_rank
from rank_runs import write

from nvflare_torchrun_plugin.job import script_imports

pytestmark = pytest.mark.usefixtures("cold_and_warm")

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
    "dlopen flags": ("sys.setdlopenflags(0x101)", "sys.getdlopenflags()"),
    "length of tracebacks": ("sys.tracebacklimit = 3", "getattr(sys, 'tracebacklimit', None)"),
    "a builtin": ("builtins.profile = print", "hasattr(builtins, 'profile')"),
    "another builtin": ("builtins.input = print", "builtins.input is print"),
    "path, in front": ("sys.path.insert(0, '/first')", "sys.path[:2] == ['/first', os.getcwd()], len(sys.path)"),
    "path, in part": ("del sys.path[-1]", "len(sys.path)"),
    "path, as a list": ("sys.path = [*sys.path, '/last']", "sys.path[-1]"),
    "warnings, all": ("warnings.resetwarnings()", "len(warnings.filters)"),
    "warnings, at the end": ("warnings.simplefilter('error', append=True)", "warnings.filters[-1]"),
    "how warnings are shown": ("warnings.showwarning = print", "warnings.showwarning is print"),
    "words": ("del sys.argv[1:]", "sys.argv"),
    "hook of threads": ("threading.excepthook = print", "threading.excepthook is print"),
}
MODULES = "builtins, gc, locale, logging, multiprocessing, os, random, socket, sys, threading, warnings"


@pytest.mark.parametrize("what", CHANGES)
def test_a_setting_that_importing_changes_is_seen_once_it_is_imported(tmp_path: Path, what: str) -> None:
    sees_a_change(tmp_path, *CHANGES[what], MODULES)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_so_are_the_random_states_of_frameworks(tmp_path: Path) -> None:
    look = "numpy.random.get_state()[1][0] == 5, torch.initial_seed() == 5"
    sees_a_change(tmp_path, "numpy.random.seed(5); torch.manual_seed(5)", look, "numpy.random, torch")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_so_are_the_settings_of_frameworks(tmp_path: Path) -> None:
    changes = {
        "torch.set_default_dtype(torch.float64)": "torch.get_default_dtype()",
        "torch.set_num_threads(torch.get_num_threads() + 2)": "torch.get_num_threads()",
        "torch.set_grad_enabled(False)": "torch.is_grad_enabled()",
        "torch.use_deterministic_algorithms(True)": "torch.are_deterministic_algorithms_enabled()",
        "torch.set_float32_matmul_precision('medium')": "torch.get_float32_matmul_precision()",
        "numpy.seterr(all='raise')": "numpy.geterr()",
    }
    sees_a_change(tmp_path, "; ".join(changes), ", ".join(changes.values()), "numpy, torch")


def sees_a_change(tmp_path: Path, change: str, look: str, modules: str) -> None:
    """Have a library make the change as it is imported, and a script look before and after."""
    sees = f"import {modules}\nprint({look})\nimport changes\nprint({look})\n"
    write(tmp_path, {"library/changes.py": f"import {modules}\n{change}\n", "script.py": sees})
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])}
    plain = run_plain(["script.py", "word"], tmp_path, environ)
    assert len(set(plain.output.splitlines())) == 2
    preload = [*modules.split(", "), "changes"] if fake_agent.start.preload is not None else None
    rank = run_rank(["script.py", "word"], tmp_path, environ=environ, preload=preload)
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


def test_what_is_imported_ahead_finds_the_script_as_the_main_program(tmp_path: Path) -> None:
    asks = """
import argparse, os, sys
import __main__ as main
from sys import argv
parser = argparse.ArgumentParser()
words = list(argv)
file = getattr(main, "__file__", None)
"""
    look = """
import sys, asks
print(asks.parser.prog, asks.words, asks.argv is sys.argv)
print(asks.main is sys.modules["__main__"], asks.file)
"""
    files = {"script.py": look, "zipped/__main__.py": look, "package/run.py": look, "package/__init__.py": ""}
    write(tmp_path, {"library/asks.py": asks, **files})
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])}
    preload = ["asks"] if fake_agent.start.preload is not None else None
    for words in (["script.py", "--lr", "1"], ["zipped", "x"], ["-m", "package.run", "--lr"]):
        plain = run_plain(words, tmp_path, environ)
        rank = run_rank(words, tmp_path, environ=environ, preload=preload)
        assert (rank.failed, rank.output.decode(), rank.code) == ([], plain.output.decode(), 0)


def test_a_module_that_the_script_s_own_path_hides_is_not_the_one_imported_ahead(tmp_path: Path) -> None:
    """What NVFlare needs is imported ahead as well, whatever the script will do with its path."""
    script = "import sys\nsys.path.insert(0, 'vendored')\nimport both\nfrom pair import inner\n"
    files = {f"{place}/{name}.py": f"where = {place!r}" for place in ("vendored", "library") for name in ("both",)}
    for place in ("vendored", "library"):
        files |= {f"{place}/pair/__init__.py": "", f"{place}/pair/inner.py": f"where = {place!r}"}
    write(tmp_path, {**files, "script.py": script + "print(both.where, inner.where)"})
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])}
    preload = ["both", "pair:inner"] if fake_agent.start.preload is not None else None
    rank = run_rank(["script.py"], tmp_path, environ=environ, preload=preload)
    assert (rank.output, rank.code) == (b"vendored vendored\n", 0)


def test_a_warning_is_shown_again_once_a_library_has_changed_the_filters(tmp_path: Path) -> None:
    library = "import warnings\nwarnings.filterwarnings('error', message='never said')"
    script = """
import warnings
def warn():
    warnings.warn("again")
warn()
warn()
import filters
warn()
"""
    write(tmp_path, {"library/filters.py": library, "script.py": script})
    environ = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "library"), os.environ.get("PYTHONPATH", "")])}
    preload = ["warnings", "filters"] if fake_agent.start.preload is not None else None
    plain = run_plain(["script.py"], tmp_path, environ)
    assert plain.output.count(b"UserWarning: again") == 2
    rank = run_rank(["script.py"], tmp_path, environ=environ, preload=preload)
    assert (rank.failed, rank.output.decode(), rank.code) == ([], plain.output.decode(), 0)
