"""The job's folder packed for other nodes: what makes it another folder, and what does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvflare_torchrun_plugin.node.staging import Archive, Incoming, StagingError


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "app"
    (folder / "custom" / "package").mkdir(parents=True)
    (folder / "custom" / "package" / "module.py").write_text("WORD = 1")
    return folder


def test_bytecode_that_ranks_leave_does_not_make_it_another_folder(app: Path) -> None:
    before = Archive(str(app))

    for directory in (app / "custom", app / "custom" / "package"):
        (directory / "__pycache__").mkdir()
        (directory / "__pycache__" / "module.cpython-311.pyc").write_bytes(b"code")
        os.utime(directory, (0, 12345))

    assert Archive(str(app)).digest == before.digest


def test_other_content_makes_it_another_folder(app: Path) -> None:
    before = Archive(str(app))

    (app / "custom" / "package" / "module.py").write_text("WORD = 2")

    assert Archive(str(app)).digest != before.digest


def test_a_copy_has_the_code_without_the_bytecode(app: Path, tmp_path: Path) -> None:
    (app / "custom" / "__pycache__").mkdir()
    incoming = Incoming(str(tmp_path))
    app.rename(tmp_path / "sent")

    arrived = [incoming.take(piece) for piece in Archive(str(tmp_path / "sent")).pieces()]

    assert arrived[-1] == str(app)
    assert sorted(path.name for path in app.rglob("*")) == ["custom", "module.py", "package"]


def test_a_job_without_a_folder_gets_a_directory_to_work_in(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    incoming = Incoming(str(tmp_path / "copy"))
    (tmp_path / "copy").mkdir()

    arrived = [incoming.take(piece) for piece in Archive(str(tmp_path / "app")).pieces()]

    assert list(Path(arrived[-1] or "").iterdir()) == []


def test_a_folder_that_cannot_be_read_is_an_error(app: Path) -> None:
    (app / "custom" / "missing.py").symlink_to("nowhere")
    with pytest.raises(StagingError, match="cannot pack the folder custom of"):
        Archive(str(app))
