"""What is installed: the wheel that is built from the source archive, and this checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from nvflare_torchrun_plugin import templates

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = (
    "torchrun_cyclic_pt",
    "torchrun_fedavg_cse_pt",
    "torchrun_fedavg_fsdp2_pt",
    "torchrun_fedavg_hf",
    "torchrun_fedavg_lightning",
    "torchrun_fedavg_pt",
    "torchrun_swarm_pt",
)
TEMPLATE_FILES = {"info.conf", "info.md", "meta.conf", "config_fed_client.conf", "config_fed_server.conf"}
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds an sdist or a wheel of ``source`` as pip does, with the setuptools of this Python."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(out)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, as it would lie in site-packages."""
    tmp = tmp_path_factory.mktemp("packaging")
    kept_out = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "demo-workspace")
    shutil.copytree(ROOT, tmp / "checkout", ignore=kept_out)
    with tarfile.open(build("sdist", tmp / "checkout", tmp)) as archive:
        # Pythons before 3.11.4 have no filters, and pass over this.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp / "source")  # noqa: S202 (we have just built it)
    (source,) = (tmp / "source").iterdir()
    with zipfile.ZipFile(build("wheel", source, tmp)) as wheel:
        wheel.extractall(tmp / "site")  # noqa: S202 (we have just built it)
    return tmp / "site"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``, by its path from there."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(folder: Path, code: str) -> str:
    """Output of Python code that finds the package in ``folder`` and nothing else of this checkout."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); {code}"
    return subprocess.run(
        [sys.executable, "-I", "-c", program], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_wheel_holds_every_template_whole(unpacked: Path) -> None:
    installed = contents(unpacked / "nvflare_torchrun_plugin" / "job_templates")

    assert set(installed) == {f"{template}/{file}" for template in TEMPLATES for file in TEMPLATE_FILES}
    assert installed == contents(ROOT / "job_templates")


def test_wheel_holds_every_module_the_type_marker_and_the_licence(unpacked: Path) -> None:
    package = ROOT / "nvflare_torchrun_plugin"
    modules = {str(p.relative_to(package)) for p in package.rglob("*.py")}
    installed = contents(unpacked / package.name)
    (licence,) = unpacked.glob("*.dist-info/**/LICENSE")

    assert {name for name in installed if "job_templates" not in name} == modules | {"py.typed"}
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_wheel_brings_nothing_else(unpacked: Path) -> None:
    assert {p.name.split("-")[0] for p in unpacked.iterdir()} == {"nvflare_torchrun_plugin"}


def test_wheel_finds_its_own_templates(unpacked: Path) -> None:
    found = run(unpacked, "from nvflare_torchrun_plugin import templates; print(templates.path())")

    assert Path(found) == unpacked / "nvflare_torchrun_plugin" / "job_templates"


def test_checkout_finds_its_own_templates() -> None:
    assert templates.path() == ROOT / "job_templates"


def test_command_prints_the_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nvflare_torchrun_plugin.templates"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout == f"{ROOT / 'job_templates'}\n"


def test_incomplete_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "__file__", str(tmp_path / "package" / "templates.py"))

    with pytest.raises(FileNotFoundError) as e:
        templates.path()

    assert str(tmp_path / "package" / "job_templates") in str(e.value)
    assert str(tmp_path / "job_templates") in str(e.value)


@pytest.mark.parametrize("module", ["", ".templates", ".torchrun_node"])
def test_light_modules_import_neither_torch_nor_nvflare(unpacked: Path, module: str) -> None:
    heavy = "{'torch', 'nvflare', 'numpy'} & set(sys.modules)"

    assert run(unpacked, f"import nvflare_torchrun_plugin{module}; print({heavy})") == "set()"
