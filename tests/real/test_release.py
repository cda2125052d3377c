"""The release: built, checked, and installed in a clean environment, in which nothing of the checkout is seen.

``DIST`` names a folder with a release that is built already; ``TORCH`` another version of torch than that of
``constraints.txt``; ``INTERPRETER`` another Python than this one, for which only the versions of torch and NVFlare
count that are there. With either, a job of the template is run as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import nvflare_torchrun_plugin

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
VERSION = nvflare_torchrun_plugin.__version__
TORCH = os.environ.get("TORCH", "")
INTERPRETER = os.environ.get("INTERPRETER", "")

SUM = """
import os
import torch, torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
os.write(1, f"rank {dist.get_rank()}: {total.item()}, torch {torch.__version__.partition('+')[0]}\\n".encode())
dist.destroy_process_group()
"""


def run(command: Sequence[str | Path], cwd: Path, **more: str) -> str:
    """What the command prints; it must succeed. Nothing of this environment but the machine's own is left."""
    # What is not compiled as it is installed is compiled once, not in each process.
    left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(command, cwd=cwd, env={**environ, **more}, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("DIST"):
        return Path(given).absolute()
    folder = tmp_path_factory.mktemp("dist")
    out = run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], ROOT)
    assert out.endswith(".whl\n")
    return folder


@pytest.fixture(scope="module")
def clean(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment with the wheel in it, and what that needs."""
    folder = tmp_path_factory.mktemp("clean")
    run([INTERPRETER or sys.executable, "-m", "venv", folder / "venv"], folder)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    if INTERPRETER:
        pins = [pin for pin in pins if pin.startswith(("nvflare==", "torch=="))]
    if TORCH:
        pins = [pin for pin in pins if not pin.startswith(("torch==", "sympy==", "setuptools=="))]
        pins.append(f"torch=={TORCH}")
    (folder / "pins.txt").write_text("\n".join(pins) + "\n")
    (wheel,) = dist.glob("*.whl")
    tools = folder / "venv" / "bin"
    run([tools / "python", "-m", "pip", "install", "-q", "--no-compile", "-c", "pins.txt", wheel], folder)
    return tools


def test_both_archives_are_fit_for_an_index(dist: Path) -> None:
    assert sorted(file.name for file in dist.iterdir()) == [
        f"nvflare_torchrun_plugin-{VERSION}-py3-none-any.whl",
        f"nvflare_torchrun_plugin-{VERSION}.tar.gz",
    ]
    checked = run(
        [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *sorted(dist.iterdir())], dist
    )
    assert checked.count("PASSED") == 2


def test_the_wheel_alone_serves_a_first_user(clean: Path, tmp_path: Path) -> None:
    path = f"{clean}:{os.environ['PATH']}"
    code = "import nvflare_torchrun_plugin as p; print(p.__version__, p.__file__)"
    version, _, file = run([clean / "python", "-c", code], tmp_path).strip().partition(" ")
    assert version == VERSION
    assert Path(file).is_relative_to(clean.parent)
    assert run([clean / "nvflare-torchrun", "--version"], tmp_path) == f"{VERSION}\n"

    templates = Path(run([clean / "nvflare-torchrun", "templates", "path"], tmp_path).strip())
    assert templates.is_relative_to(clean.parent)
    assert (templates / "torchrun_fedavg_pt" / "config_fed_client.conf").is_file()

    (tmp_path / "sum.py").write_text(SUM)
    translator: list[str | Path] = [
        clean / "python",
        "-m",
        "nvflare_torchrun_plugin.torchrun_node",
        "--nproc-per-node",
        "2",
        "sum.py",
    ]
    said = sorted(line for line in run(translator, tmp_path).splitlines() if line.startswith("rank"))
    torch = TORCH or said[0].rpartition(" ")[2]
    assert said == [f"rank 0: 3, torch {torch}", f"rank 1: 3, torch {torch}"]

    create: list[str | Path] = [
        clean / "nvflare",
        "job",
        "create",
        "-j",
        "job",
        "-w",
        templates / "torchrun_fedavg_pt",
    ]
    client = ["-f", "config_fed_client.conf", "nodes=2", 'app_config="--sites 1 --device cpu"']
    server = ["-f", "config_fed_server.conf", "num_rounds=1", "num_clients=1"]
    run([*create, "-sd", ROOT / "examples" / "digits", *client, *server], tmp_path, PATH=path, HOME=str(tmp_path))
    assert "TorchrunExecutor" in (tmp_path / "job" / "app" / "config" / "config_fed_client.conf").read_text()
    assert (tmp_path / "job" / "app" / "custom" / "client.py").is_file()
    if TORCH or INTERPRETER:
        run([clean / "python", "-m", "pip", "install", "-q", "scikit-learn"], tmp_path)
        simulator: list[str | Path] = [clean / "nvflare", "simulator", "job", "-w", "run", "-n", "1", "-t", "1"]
        run(simulator, tmp_path, PATH=path, HOME=str(tmp_path))
        assert "Finished FedAvg" in (tmp_path / "run" / "server" / "log.txt").read_text()
        assert '"outcome": "ok"' in next((tmp_path / "run").rglob("verdict.json")).read_text()
