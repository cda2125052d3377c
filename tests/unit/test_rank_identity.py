"""A script must not be able to tell that a rank runs it: what it finds at its start is as under ``python -u``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from fake_agent import rank_environ, run_plain, run_rank
from rank_runs import both, same, write

pytestmark = pytest.mark.usefixtures("cold_and_warm")

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
