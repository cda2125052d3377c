"""``nvflare-torchrun site``: what it writes, shows and refuses, in the folders of a startup kit."""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from nvflare_torchrun_plugin.cli.output import RefusedError
from nvflare_torchrun_plugin.cli.verbs import app

DEFAULT = {"format_version": 2, "class_allow_list": ["nvflare."], "components": [{"id": "x"}]}


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    kit = tmp_path / "a site"
    for folder in ("local", "startup"):
        (kit / folder).mkdir(parents=True)
    (kit / "local/resources.json.default").write_text(json.dumps(DEFAULT))
    return kit


def site(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["site", *map(str, words)])


def refusal(*words: str | Path) -> str:
    done = site(*words)
    assert isinstance(done.exception, RefusedError), done.output
    return str(done.exception)


def written(kit: Path) -> Any:
    return yaml.safe_load((kit / "local/node_group.yaml").read_text())


def test_all_that_can_be_said_of_hosts(kit: Path) -> None:
    options = "--nproc-per-node 8 --transport ssh --python /opt/py --master-port-range 1000-2000 --stage never"
    more = ["--env", "A=b=c", "--on-busy", "fail", "--allow", "/opt/a.py", "--allow", "/opt/b c.py"]
    done = site("write", kit, "--nodes", "localhost, gpu-1", *options.split(), *more)
    assert done.exit_code == 0, done.exception
    assert written(kit) == {
        "nodes": [{"host": "localhost", "nproc_per_node": 8}, {"host": "gpu-1", "nproc_per_node": 8}],
        "transport": "ssh",
        "python": "/opt/py",
        "master_port_range": [1000, 2000],
        "env": {"A": "b=c"},
        "on_busy": "fail",
        "stage": "never",
        "allowed_scripts": ["/opt/a.py", "/opt/b c.py"],
    }
    assert "+- host: gpu-1\n+  nproc_per_node: 8\n" in done.output
    assert [path.name for path in (kit / "local").iterdir() if "node_group" in path.name] == ["node_group.yaml"]


def test_a_transport_of_the_site_s_own(kit: Path) -> None:
    site("write", kit, "--nodes", "localhost,b", "--transport", "kubectl exec -i 'pod {host}' -- {command}")
    assert written(kit)["transport"] == ["kubectl", "exec", "-i", "pod {host}", "--", "{command}"]


def test_a_file_that_is_there_is_replaced_only_when_asked(kit: Path) -> None:
    file = kit / "local/node_group.yaml"
    file.write_text("nodes: 3\n")
    file.chmod(0o600)
    said = refusal("write", kit, "--nodes", "2")
    assert f"is there already: `nvflare-torchrun site check '{kit}'` shows what it says" in said
    assert written(kit) == {"nodes": 3}
    done = site("write", kit, "--nodes", "2", "--replace")
    assert {"-nodes: 3", "+nodes: 2"} <= set(done.output.splitlines())
    assert written(kit) == {"nodes": 2}
    assert file.stat().st_mode & 0o777 == 0o600


def test_nodes_that_dial_in(kit: Path) -> None:
    join = ["--join-file", "/etc/site/join.json", "--join-ports", "31000-31099", "--join-wait", "5"]
    assert site("write", kit, "--nodes", "3", "--transport", "join", *join).exit_code == 0
    assert written(kit) == {
        "nodes": 3,
        "transport": "join",
        "join": {"file": "/etc/site/join.json", "ports": [31000, 31099], "wait": 5.0},
    }
    shown = site("check", kit).output
    assert "join: file /etc/site/join.json; ports 31000 to 31099; 5 s for an absent node\n" in shown
    site("write", kit, "--nodes", "auto", "--transport", "join", "--replace", "--elsewhere")
    assert (
        "join: file one for each job; ports 30400 to 30499; 60 s for" in site("check", kit, "--elsewhere").output
    )


def test_what_is_shown_can_be_typed(kit: Path) -> None:
    shown = site("write", kit, "--nodes", "2").output.splitlines()[-1]
    command = shown.partition("is written; ")[2].removesuffix(" looks at it again")
    assert shlex.split(command) == ["nvflare-torchrun", "site", "check", str(kit)]
    assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0


def test_to_machines_it_says_what_it_has_done(kit: Path) -> None:
    told = json.loads(site("write", kit, "--nodes", "2", "--json").output)
    assert told == {"file": str(kit / "local/node_group.yaml"), "written": {"nodes": 2}}
    told = json.loads(site("allow", kit, "--write", "--json").output)
    assert (told["allowed"], told["written"]) == (False, True)
    told = json.loads(site("allow", kit, "--write", "--json").output)
    assert (told["allowed"], told["written"]) == (True, False)


def test_a_difference_rules_no_terminal(kit: Path) -> None:
    (kit / "local/node_group.yaml").write_bytes(b"# \x1b[2J \xff \xc2\x9b\n")
    shown = site("write", kit, "--nodes", "2", "--replace").output
    assert "-# \\x1b[2J \N{REPLACEMENT CHARACTER} \\x9b\n" in shown


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_writes_belongs_to_the_kits_owner(kit: Path) -> None:
    owner = (12345, 12346)
    os.chown(kit / "local", *owner)
    assert site("write", kit, "--nodes", "2").exit_code == 0
    assert site("allow", kit, "--write").exit_code == 0
    for name in ("node_group.yaml", "resources.json"):
        found = (kit / "local" / name).stat()
        assert (found.st_uid, found.st_gid) == owner
    os.chown(kit / "local/node_group.yaml", 54321, 54321)
    site("write", kit, "--nodes", "3", "--replace")
    assert (kit / "local/node_group.yaml").stat().st_uid == 54321


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes what is another's")
@pytest.mark.parametrize("there", [True, False])
def test_root_follows_no_link_to_what_is_not_its_owner_s(kit: Path, there: bool) -> None:
    aim = kit / "startup/of_root"
    if there:
        aim.write_text("as it was")
    link = kit / "local/node_group.yaml"
    link.symlink_to(aim)
    os.chown(link, 12345, 12346, follow_symlinks=False)
    said = refusal("write", kit, "--nodes", "2", "--replace")
    assert said == f"{link} is a link of user 12345 to {aim}, which is not that user's: write that file itself"
    assert (aim.read_text() if there else aim.exists()) == ("as it was" if there else False)
    os.chown(aim if there else aim.parent, 12345, 12346)
    assert site("write", kit, "--nodes", "2", "--replace").exit_code == 0
    assert (aim.stat().st_uid, link.is_symlink()) == (12345, True)


def test_what_only_its_owner_may_read_nobody_else_may_read_meanwhile(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kit / "local/node_group.yaml"
    site("write", kit, "--nodes", "2")
    file.chmod(0o640)
    seen: list[int] = []
    give = os.fchmod

    def note(fd: int, mode: int) -> None:
        seen.append(stat.S_IMODE(os.fstat(fd).st_mode))
        give(fd, mode)

    monkeypatch.setattr(os, "fchmod", note)
    site("write", kit, "--nodes", "3", "--replace")
    assert (seen, stat.S_IMODE(file.stat().st_mode)) == ([0o600], 0o640)


def test_a_link_in_place_of_the_draft_is_not_followed(kit: Path) -> None:
    kept = kit / "kept"
    kept.write_text("as it was")
    (kit / f"local/.node_group.yaml.{os.getpid()}").symlink_to(kept)
    assert "cannot be written: File exists" in refusal("write", kit, "--nodes", "2")
    assert kept.read_text() == "as it was"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "2", "--join-wait", "5"], "join is given, but transport is None: set transport to 'join'"),
        (["--nodes", "2", "--transport", "join", "--join-ports", "9"], "join ports is [9]"),
        (["--nodes", "far-away,b", "--transport", "ssh"], "node rank 0 must be the client's own host"),
        (["--nodes", "0"], "must be a number from 1"),
        (["--nodes", "2", "--allow", "a.py"], "must be the absolute path of a script"),
        (["--nodes", "2", "--env", "A"], "must be NAME=VALUE"),
        (["--nodes", "2", "--transport", "telnet"], "transport is 'telnet'"),
        (["--nodes", "localhost", "--transport", "x '{host}"], "cannot be split into words"),
        (["--nodes", "2", "--master-port-range", "5"], "master_port_range is [5]"),
        (
            ["--nodes", "2", "--nproc-per-node", "2", "--transport", "join"],
            "transport join --nproc-per-node needs",
        ),
        (["--nodes", "auto", "--nproc-per-node", "2"], "needs --nodes with a number or host names"),
        (["--nproc-per-node", "2"], "needs --nodes with a number or host names"),
        (["--on-busy", "wait"], "key 'nodes' is missing"),
        ([], "nothing to write"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(kit: Path, options: list[str], words: str) -> None:
    said = refusal("write", kit, *options)
    assert words in said
    assert f".yaml.{os.getpid()}" not in said
    assert [path.name for path in (kit / "local").iterdir()] == ["resources.json.default"]


def test_nodes_of_this_host_may_have_a_number_of_processes(kit: Path) -> None:
    assert site("write", kit, "--nodes", "2", "--nproc-per-node", "3").exit_code == 0
    assert written(kit)["nodes"] == [{"host": "localhost", "nproc_per_node": 3}] * 2
    assert site("check", kit).exit_code == 0


def test_on_another_host_than_the_site_s(kit: Path) -> None:
    assert site("write", kit, "--nodes", "far-away,b", "--transport", "ssh", "--elsewhere").exit_code == 0
    done = site("check", kit)
    assert done.exit_code == 1
    assert "node rank 0 must be the client's own host" in done.output
    assert site("check", kit, "--elsewhere").exit_code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
@pytest.mark.parametrize("verb", ["check", "write", "allow"])
def test_a_kit_that_this_user_may_not_look_into(kit: Path, verb: str) -> None:
    site(verb, kit)  # which imports what it takes, and that may be root's alone
    os.seteuid(12345)
    try:
        said = refusal(verb, kit)
    finally:
        os.seteuid(0)
    assert said == f"{kit} cannot be looked into: Permission denied; ask its owner, or be that user"


def test_an_allowed_script_of_which_nothing_can_be_known_is_missing(kit: Path) -> None:
    script = f"/{'x' * 300}.py"
    site("write", kit, "--nodes", "2", "--allow", script)
    done = site("check", kit)
    assert (done.exit_code, f"any job may run: {script} (MISSING here)\n" in done.output) == (1, True)


def test_a_folder_that_is_no_kit(tmp_path: Path) -> None:
    for verb in ("check", "write", "allow"):
        assert "is no startup kit" in refusal(verb, tmp_path)


def test_the_server_s_kit_is_no_site_s(kit: Path) -> None:
    (kit / "startup/fed_server.json").touch()
    for verb in ("check", "write", "allow"):
        assert "is the server's kit (startup/fed_server.json); give a site's folder" in refusal(verb, kit)
    assert not (kit / "local/node_group.yaml").exists()
    (kit / "startup/fed_client.json").touch()
    assert site("check", kit).exit_code == 0


def test_a_check_says_what_there_is(kit: Path) -> None:
    here = Path(__file__)
    done = site("check", kit)
    assert (done.exit_code, "is not there: each job says" in done.output) == (0, True)
    site("write", kit, "--nodes", "localhost,b", "--transport", "ssh", "--allow", here)
    done = site("check", kit)
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines == [
        "node host address processes python",
        "0 localhost",
        "1 b",
        "transport: ssh",
        "on_busy: wait, 3600 s; stage: auto",
        f"any job may run: {here}",
        "jobs without code of their own are refused: nvflare_torchrun_plugin. is not allowed;"
        f" nvflare-torchrun site allow '{kit}' --write allows it",
    ]
    site("write", kit, "--allow", "/no/such.py", "--replace")
    done = site("check", kit, "--json")
    assert done.exit_code == 1
    told = json.loads(done.output)
    assert (told["group"], told["missing_scripts"], told["classes_allowed"]) == (None, ["/no/such.py"], False)


def test_a_check_names_the_line_of_a_mistake(kit: Path) -> None:
    (kit / "local/node_group.yaml").write_text("nodes: 2\nnodes: 3\n")
    for options in ([], ["--json"]):
        done = site("check", kit, *options)
        assert done.exit_code == 1
        assert "node_group.yaml line 2" in done.output


def test_the_entry_is_shown_and_then_written_into_a_full_copy(kit: Path) -> None:
    done = site("allow", kit)
    assert done.exit_code == 0
    assert '+    "nvflare_torchrun_plugin."' in done.output
    assert not (kit / "local/resources.json").exists()
    done = site("allow", kit, "--write")
    assert '+    "nvflare_torchrun_plugin."' in done.output
    assert json.loads((kit / "local/resources.json").read_text()) == {
        **DEFAULT,
        "class_allow_list": ["nvflare.", "nvflare_torchrun_plugin."],
    }
    assert json.loads((kit / "local/resources.json.default").read_text()) == DEFAULT
    before = (kit / "local/resources.json").read_bytes()
    assert "allows nvflare_torchrun_plugin. already" in site("allow", kit, "--write").output
    assert (kit / "local/resources.json").read_bytes() == before
    assert json.loads(site("allow", kit, "--json").output)["allowed"] is True
    assert "find our classes allowed" in site("check", kit).output


def test_a_site_s_own_resources_are_kept(kit: Path) -> None:
    own = {**DEFAULT, "class_allow_list": ["mine."], "more": "\N{GREEK SMALL LETTER ALPHA}"}
    (kit / "local/resources.json").write_text(json.dumps(own))
    site("allow", kit, "--write")
    found = json.loads((kit / "local/resources.json").read_text())
    assert found == {**own, "class_allow_list": ["mine.", "nvflare_torchrun_plugin."]}


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "no whole copy"), ("[]", "no whole copy"), ("{", "cannot be read"), (None, "has no res")],
)
def test_resources_that_are_not_whole(kit: Path, text: str | None, words: str) -> None:
    (kit / "local/resources.json.default").unlink()
    if text is not None:
        (kit / "local/resources.json").write_text(text)
    assert words in refusal("allow", kit, "--write")


def test_a_folder_in_the_way_is_refused(kit: Path) -> None:
    (kit / "local/node_group.yaml").mkdir()
    assert "cannot be read: Is a directory" in refusal("write", kit, "--nodes", "2", "--replace")
    assert sorted(path.name for path in (kit / "local").iterdir()) == ["node_group.yaml", "resources.json.default"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one(kit: Path, there: bool) -> None:
    kept = kit / "kept.yaml"
    if there:
        kept.write_text("nodes: 3\n")
    (kit / "local/node_group.yaml").symlink_to(kept)
    assert site("write", kit, "--nodes", "2", "--replace").exit_code == 0
    assert (kit / "local/node_group.yaml").readlink() == kept
    assert yaml.safe_load(kept.read_text()) == {"nodes": 2}
    assert sorted(path.name for path in kit.iterdir()) == ["kept.yaml", "local", "startup"]


def test_a_copy_is_as_private_as_what_it_was_made_of(kit: Path) -> None:
    (kit / "local/resources.json.default").chmod(0o600)
    assert site("allow", kit, "--write").exit_code == 0
    assert (kit / "local/resources.json").stat().st_mode & 0o777 == 0o600
