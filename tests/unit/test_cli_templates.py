"""``nvflare-torchrun templates``: list, show, copy, path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nvflare_torchrun_plugin import templates as bundled
from nvflare_torchrun_plugin.cli.output import RefusedError
from nvflare_torchrun_plugin.cli.verbs import app
from nvflare_torchrun_plugin.templates import path

NAMES = sorted(folder.name for folder in path().iterdir())


def templates(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["templates", *map(str, words)])


def test_the_path() -> None:
    assert templates("path").output == f"{path()}\n"
    assert json.loads(templates("path", "--json").output) == {"folder": str(path())}


def test_the_list_has_every_template_and_what_it_is_for() -> None:
    lines = templates("list").output.splitlines()
    assert [line.split()[0] for line in lines] == ["template", *NAMES]
    assert all(len(line.split()) > 3 for line in lines[1:])
    told = json.loads(templates("list", "--json").output)
    assert [one["name"] for one in told] == NAMES
    assert "FedAvg, PyTorch, each site trains with torchrun on a group of nodes" in {
        one["description"] for one in told
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_shows_its_variables_and_files(name: str) -> None:
    done = templates("show", name)
    assert done.exit_code == 0
    assert (path() / name / "info.md").read_text().strip() in done.output
    last = done.output.splitlines()[-1]
    assert (
        last == f"{path() / name}: config_fed_client.conf, config_fed_server.conf, info.conf, info.md, meta.conf"
    )
    assert json.loads(templates("show", name, "--json").output)["folder"] == str(path() / name)


def test_a_copy_is_one_and_replaces_nothing(tmp_path: Path) -> None:
    target = tmp_path / "mine"
    assert templates("copy", NAMES[0], target).exit_code == 0
    copied = {file.name: file.read_bytes() for file in target.iterdir()}
    assert copied == {file.name: file.read_bytes() for file in (path() / NAMES[0]).iterdir()}
    told = json.loads(templates("copy", NAMES[0], tmp_path / "more", "--json").output)
    assert told == {"name": NAMES[0], "folder": str(tmp_path / "more")}
    assert "nvflare job create -w '" in templates("copy", NAMES[0], tmp_path / "a blank").output
    done = templates("copy", NAMES[0], target)
    assert isinstance(done.exception, RefusedError)
    assert f"{target} is there already" in str(done.exception)


@pytest.mark.parametrize("verb", [("show",), ("copy", "anywhere")])
def test_a_name_that_is_none(verb: tuple[str, ...], tmp_path: Path) -> None:
    done = templates(verb[0], "../no", *(tmp_path / word for word in verb[1:]))
    assert isinstance(done.exception, RefusedError)
    assert f"there is no template '../no': the templates are {', '.join(NAMES)}" in str(done.exception)


def test_a_package_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "__file__", str(tmp_path / "package" / "templates.py"))
    for verb in ("path", "list"):
        done = templates(verb)
        assert isinstance(done.exception, RefusedError)
        assert "install it again" in str(done.exception)
