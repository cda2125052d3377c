"""``nvflare-torchrun timeline``: the table, JSON, the page's words, and the exit codes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_timeline import at, ends, group, moments, task, write
from typer.testing import CliRunner

from nvflare_torchrun_plugin.cli.output import RefusedError
from nvflare_torchrun_plugin.cli.verbs import app
from nvflare_torchrun_plugin.supervision.events import GROUP_FILE, TASKS_FILE
from nvflare_torchrun_plugin.timeline import PHASES

REPLY = '{"event": "reply", "at": %s, "group": "g", "code": "OK"}'


def a_good_task(run: Path) -> None:
    write(run / TASKS_FILE, task(0), at(1, "attempt", group="g"), at(20, "reply", group="g", code="OK"))
    told = moments(receive=10, received=11, send=18)
    write(run / "attempt-0001" / GROUP_FILE, *group(3, "g"), *told, *ends(22))


def a_failed_task(run: Path, what: str = "exit code 1") -> None:
    code = "EXECUTION_EXCEPTION"
    write(run / TASKS_FILE, task(0), at(0, "attempt", group="g"), at(15, "reply", group="g", code=code))
    failure = at(12, "failure", node_rank=1, host="b", rank=3, what=what)
    told = [*moments(receive=8, received=9), at(12, "stop", reason=None), failure]
    write(run / "attempt-0001" / GROUP_FILE, *group(0, "g"), *told, *ends(14, "failed"))


def test_the_table_of_a_good_run(tmp_path: Path) -> None:
    a_good_task(tmp_path)
    done = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in re.sub("  +", "  ", done.output).splitlines()] == [
        f"site  task  round  try  start  node  {'  '.join(PHASES)}  total  outcome",
        "site-1  train  0  1  cold  0 a  3.0  2.0  3.0  2.0  1.0  7.0  2.0  2.0  22.0  ok",
        "site-1  train  0  1  cold  1 b  3.0  2.0  4.0  1.0  1.0  7.0  2.0  2.0  22.0  ok",
    ]


def test_a_failed_run(tmp_path: Path) -> None:
    a_failed_task(tmp_path)
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--json"])
    assert done.exit_code == 1
    (found,) = json.loads(done.output)
    assert (found["task"], found["round"], found["outcome"]) == ("train", 0, "execution exception")
    assert [node["failure"] for node in found["nodes"]] == [None, "rank 3: exit code 1"]
    assert found["nodes"][1]["seconds"]["training"] == 3
    assert found["nodes"][1]["segments"][-2]["failed"] is True


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_nothing_to_show(tmp_path: Path, name: str) -> None:
    done = CliRunner().invoke(app, ["timeline", str(tmp_path / name)])
    assert isinstance(done.exception, RefusedError)
    assert str(tmp_path / name) in str(done.exception)


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    a_good_task(tmp_path)
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--html", str(tmp_path)])
    assert isinstance(done.exception, RefusedError)
    assert "Is a directory" in str(done.exception)


class _Page(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else_and_takes_no_text_for_markup(tmp_path: Path) -> None:
    a_failed_task(tmp_path, what="<script src='//x'>&")
    file = tmp_path / "t.html"
    assert CliRunner().invoke(app, ["timeline", str(tmp_path), "--html", str(file)]).exit_code == 1
    page = _Page()
    page.feed(file.read_text())
    tags = {tag for tag, _ in page.found}
    assert tags & {"script", "link", "img", "iframe", "object", "base"} == set()
    assert "url(" not in file.read_text()
    assert {attribute for _, given in page.found for attribute in given} & {"src", "href", "onclick"} == set()
    assert "✗ rank 3: <script src='//x'>&" in page.text
    bars = [given for tag, given in page.found if tag == "span" and (given.get("class") or "").startswith("seg")]
    red = [given["aria-label"] for given in bars if "failed" in (given["class"] or "").split()]
    assert len(red) == 1
    assert (red[0] or "").startswith("training 3.0 s, from 9.0 s on, ended in the failure: rank 3")


def test_what_is_told_does_not_rule_the_terminal(tmp_path: Path) -> None:
    a_failed_task(tmp_path, "\x1b[2J\x9b \ud800")
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 1
    assert "rank 3: \\x1b[2J\\x9b \\ud800" in done.output
    assert "\x1b" not in done.output
    assert "\\ud800" in (tmp_path / "page.html").read_text()
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--json"])
    assert json.loads(done.output)[0]["nodes"][1]["failure"] == "rank 3: \x1b[2J\x9b \ud800"


def test_a_run_that_took_a_leap_in_time_has_a_page(tmp_path: Path) -> None:
    a_good_task(tmp_path)
    with (tmp_path / TASKS_FILE).open("a") as file:
        file.write(json.dumps({"event": "reply", "at": 2**33 - 1.0, "group": "g", "code": "OK"}) + "\n")
    done = CliRunner().invoke(app, ["timeline", str(tmp_path), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "page.html").stat().st_size < 50_000


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "reply", "at": 20, "group": "g"}',
        '{"event": "attempt", "at": 20}',
        '{"event": "reply", "at": 20, "group": [], "code": "OK"}',
    ],
)
def test_what_this_package_does_not_write_is_refused(tmp_path: Path, line: str) -> None:
    a_good_task(tmp_path)
    with (tmp_path / TASKS_FILE).open("a") as file:
        file.write(line + "\n")
    done = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert isinstance(done.exception, RefusedError), done.exception
    assert f"{tmp_path} cannot be read: a line" in str(done.exception)


@pytest.mark.parametrize("line", ["\xff", *(REPLY % moment for moment in ("NaN", "1e999", "-1", "1" + 400 * "0"))])
def test_a_line_that_no_clock_and_no_disk_should_write_is_passed_over(tmp_path: Path, line: str) -> None:
    a_good_task(tmp_path)
    before = CliRunner().invoke(app, ["timeline", str(tmp_path)]).output
    for name in (TASKS_FILE, f"attempt-0001/{GROUP_FILE}"):
        with (tmp_path / name).open("a", encoding="latin-1") as file:
            file.write(line + "\n")
    done = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert (done.exit_code, done.output) == (0, before)
