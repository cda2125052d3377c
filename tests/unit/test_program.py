"""What the ranks run."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_torchrun_plugin.launching import program
from nvflare_torchrun_plugin.launching.program import Program, ProgramError


def test_the_script_is_found_in_the_first_folder_that_has_it(tmp_path: Path) -> None:
    custom, app = tmp_path / "custom", tmp_path / "app"
    for folder in (custom, app):
        (folder / "src").mkdir(parents=True)
    (app / "src" / "train.py").touch()
    train = program.parse("src/train.py", None, "", None)
    assert train.find([str(custom), str(app)]) == str(app / "src" / "train.py")
    (custom / "src" / "train.py").touch()
    assert train.find([str(custom), str(app)]) == str(custom / "src" / "train.py")
    absolute = program.parse(str(app / "src" / "train.py"), None, "", None)
    assert absolute.find([str(custom)]) == str(app / "src" / "train.py")


def test_a_missing_script_is_named_with_the_places(tmp_path: Path) -> None:
    (tmp_path / "train.py").mkdir()
    with pytest.raises(ProgramError) as caught:
        program.parse("train.py", None, "", None).find([str(tmp_path), "/nowhere"])
    assert (
        str(caught.value) == f"script 'train.py' is not there; looked for {tmp_path}/train.py, /nowhere/train.py"
    )


def test_a_script_that_cannot_be_looked_for(tmp_path: Path) -> None:
    name = "x" * 300
    with pytest.raises(ProgramError) as caught:
        program.parse(name, None, "", None).find([str(tmp_path)])
    assert str(caught.value) == f"script {name!r} cannot be looked for: {tmp_path / name}: File name too long"


def test_a_module_is_not_looked_for() -> None:
    assert program.parse(None, "pkg.train", "", None).find([]) == "pkg.train"


def test_arguments_are_split_as_a_shell_does_or_taken_as_they_are() -> None:
    text = """--name "two words" '$HOME' a\\ b ${secret:KEY}"""
    assert program.parse("a.py", None, text, None).args == ("--name", "two words", "$HOME", "a b", "${secret:KEY}")
    assert program.parse("a.py", None, ["a b", "", '"'], {"A": "1"}) == Program(
        "a.py", None, ("a b", "", '"'), {"A": "1"}
    )


def test_secrets_are_resolved_in_arguments_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_KEY", "k y'\"")
    parsed = program.parse("a.py", None, "--key=${secret:SITE_KEY} plain", {"KEY": "<${secret:SITE_KEY}>"})
    assert parsed.args == ("--key=${secret:SITE_KEY}", "plain")
    assert parsed.resolved() == (("--key=k y'\"", "plain"), {"KEY": "<k y'\">"})


def test_a_secret_that_the_site_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SITE_KEY", raising=False)
    with pytest.raises(ProgramError, match="SITE_KEY"):
        program.parse("a.py", None, "${secret:SITE_KEY}", None).resolved()


@pytest.mark.parametrize(
    ("script", "module", "args", "message"),
    [
        (None, None, "", "give either script or module, got script=None and module=None"),
        ("a.py", "b", "", "give either script or module, got script='a.py' and module='b'"),
        (" ", None, "", "script must be a non-empty string, got ' '"),
        (None, 5, "", "module must be a non-empty string, got 5"),
        ("a\0.py", None, "", "script must be a non-empty string, got 'a\\x00.py'"),
        (
            "a.py",
            None,
            "'open",
            "script_args cannot be split into words (No closing quotation); give a list instead",
        ),
        ("a.py", None, [1], "script_args must be a string or a list of strings without NUL characters"),
        ("a.py", None, None, "script_args must be a string or a list of strings without NUL characters"),
    ],
)
def test_what_is_wrong_is_named(script: object, module: object, args: object, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        program.parse(script, module, args, None)
    assert str(caught.value) == message
