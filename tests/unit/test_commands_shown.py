"""Every command that the README and the pages of docs/ show is run by a test: here, or by one named here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_timeline import a_good_task
from typer.testing import CliRunner

from nvflare_torchrun_plugin.cli.verbs import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Commands that begin so are run elsewhere: by this test, or by these lines of .ci/run.
_CREATE = "tests/real/test_templates.py::test_fedavg_by_absolute_path"
_POC = "tests/real/test_poc.py::test_job_with_code_on_the_nodes_of_each_site"
_PATH = "tests/unit/test_packaging.py::test_command_prints_the_folder"
_SAME = "tests/real/test_templates.py::test_name_and_path_make_the_same_job"
_JOIN_FILE = "tests/unit/test_join_file.py::test_the_command_makes_one_for_each_side"
_JOIN = "tests/unit/test_join.py::test_agents_come_by_connections_that_nodes_have_opened"
_FOREGROUND = "tests/real/test_poc_foreground.py::test_it_runs_a_job_and_ends_when_it_is_shut_down"
_RELEASE = "tests/real/test_release.py::test_the_wheel_alone_serves_a_first_user"
ELSEWHERE = {
    "TEMPLATES=$(python -m nvflare_torchrun_plugin.templates)": _PATH,
    "exec /path/of/site-1/startup/sub_start.sh --once": _FOREGROUND,
    "make demo": ".ci/run",
    "make docs": ".ci/run",
    "make test": ".ci/run",
    "nvflare config -jt": "tests/real/test_templates.py::test_cyclic_by_name",
    "nvflare job create -j job -w torchrun_fedavg_pt": _SAME,
    "nvflare job create -j job -w $": _CREATE,
    "nvflare job monitor": _POC,
    "nvflare job submit": _POC,
    "nvflare poc": _POC,
    "nvflare simulator": _CREATE,
    "nvflare-torchrun doctor": "tests/real/test_cli_doctor.py::test_healthy_hosts",
    "nvflare-torchrun plan --job": "tests/unit/test_cli_plan_options.py::test_a_job_and_the_sites_own_nodes",
    "nvflare-torchrun plan --nodes": "tests/unit/test_cli_plan_options.py::test_two_nodes_by_ssh",
    "nvflare-torchrun run": "tests/real/test_cli_run.py::test_hosts_by_ssh_and_a_rank_that_ends_with_a_code",
    "pip install .": _RELEASE,
    "python -m nvflare_torchrun_plugin.join_file": _JOIN_FILE,
    "python -m nvflare_torchrun_plugin.node_agent --join": _JOIN,
    # Another recipe than the example's; what this one exports is looked at below.
    "python examples/digits/job.py": "tests/real/test_recipes.py::test_in_the_simulator",
}
# A test that made them would run itself; that they are there, make says.
DRY = ("make check", "make venv", "make release")

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\S.*\n)+")
_FOLDER_TREE = "job/"
_SHELL = ("sh", "bash")


def commands(text: str) -> list[str]:
    """The commands in blocks of shell, fenced or indented, one a line, without comments and continuation lines."""
    blocks = [found[3] for found in _FENCE.finditer(text) if found[2] in _SHELL]
    blocks += _INDENTED.findall(_FENCE.sub("", text))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    plain = (re.sub(r"(^|\s+)#.*", "", line) for line in lines)
    return [" ".join(line.split()) for line in plain if line.strip() and not line.strip().startswith(_FOLDER_TREE)]


SHOWN = sorted({command for page in PAGES for command in commands(page.read_text())})


HERE = [command for command in SHOWN if re.match("nvflare-torchrun (site|templates|timeline) ", command)]


def test_every_command_is_run_by_some_test() -> None:
    unknown = [
        command
        for command in SHOWN
        if command not in HERE
        and command not in DRY
        # A shell's variable or option in between is the command's own.
        and not any(command.startswith(known) for known in ELSEWHERE)
    ]
    assert unknown == []


def test_the_tables_are_of_use() -> None:
    for known, where in ELSEWHERE.items():
        assert any(command.startswith(known) for command in SHOWN), known
        file, _, test = where.partition("::")
        assert (f"def {test}(" if test else known) in (ROOT / file).read_text(), where
    assert set(SHOWN) >= set(DRY)


@pytest.mark.parametrize("command", DRY)
def test_make_knows_it(command: str) -> None:
    done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", HERE)
def test_our_own_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a kit and a run, on the host that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-0")
    a_good_task(tmp_path / "run")
    for kit in ("site-1", "prod_00/site-1"):
        for folder in ("local", "startup"):
            (tmp_path / kit / folder).mkdir(parents=True)
        (tmp_path / kit / "local/resources.json.default").write_text(json.dumps({"class_allow_list": []}))
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.output


def test_what_the_example_exports(tmp_path: Path) -> None:
    (command,) = (command for command in SHOWN if command.startswith("python examples/digits/job.py --export"))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    words = [sys.executable, *command.split()[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "jobs/digits/meta.json").is_file()
