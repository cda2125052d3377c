"""Jobs that ``nvflare job create`` makes of the bundled templates train the example in the simulator."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.dxo import from_file
from nvflare.fuel.utils.config_factory import ConfigFactory
from simulation import SITES, leaving_nothing
from tb_events import scalars

from nvflare_torchrun_plugin import templates

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"
# The script is the template's own default.
DEFAULT = ("-f", "config_fed_client.conf", "nodes=2", 'app_config="--device cpu"')
CLIENT = (*DEFAULT, "app_script=client.py")
ONE_NODE = ("-f", "config_fed_client.conf", "nodes=1", "nproc_per_node=2", 'app_config="--device cpu"')

# Of 1437 training images, site-1 of 2 has one more than half; each of its 2 processes takes 16 a step.
STEPS_PER_EPOCH = math.ceil(719 / 2 / 16)

TEMPLATES = sorted(folder.name for folder in templates.path().iterdir())


class Shell:
    """Runs NVFlare's own commands as a person would, with a home folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        tools = Path(sys.executable).parent
        self.tmp = folder / "tmp"
        self.tmp.mkdir()
        path = f"{tools}:{os.environ['PATH']}"
        self.environ = {**os.environ, "HOME": str(folder), "TMPDIR": str(self.tmp), "PATH": path}

    def run(self, *command: str, timeout: float = 200) -> str:
        """Output of a command that must succeed."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def create(self, template: str, *options: str) -> None:
        """Makes the job folder ``job`` from a template."""
        # NVFlare changes meta.conf only of a job whose path is absolute.
        job = str(self.folder / "job")
        self.run("nvflare", "job", "create", "-w", template, "-j", job, "-sd", str(EXAMPLE), *options)

    def simulate(self, sites: int = 2) -> Path:
        """Runs the job with all sites at a time and returns the simulator's workspace."""
        self.run("nvflare", "simulator", "job", "-w", "run", "-n", str(sites), "-t", str(sites), timeout=500)
        return self.folder / "run"


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    with leaving_nothing(shell.tmp):
        yield shell


def job_files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def rounds(number: int) -> tuple[str, ...]:
    """Options for so many rounds."""
    return ("-f", "config_fed_server.conf", f"num_rounds={number}")


def app(run: Path, who: str) -> Path:
    """The folder of the job's app at a site, or on the server."""
    return run / who / "simulate_job" / f"app_{who}"


def summary() -> Any:
    """The example's module of this name."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module("summary")
    finally:
        sys.path.remove(str(EXAMPLE))


def logged_accuracies(run: Path) -> list[float]:
    """The accuracy of every model that a site received, in order."""
    found = [
        (when, float(match["accuracy"]))
        for site in SITES
        for when, message in summary().log(run, site)
        if (match := summary().TRAINED.search(message))
    ]
    return [accuracy for _, accuracy in sorted(found)]


@pytest.mark.real
def test_fedavg_by_absolute_path(shell: Shell) -> None:
    shell.create(str(templates.path() / "torchrun_fedavg_pt"), *CLIENT, *rounds(2))

    run = shell.simulate()
    table = shell.run(sys.executable, str(EXAMPLE / "summary.py"), str(run)).splitlines()

    rows = [line.split() for line in table[1:]]
    assert table[0].split()[:2] == ["round", "sites"]
    assert [row[:4] for row in rows[1:]] == [[str(n), "2", "2", "2"] for n in range(2)]
    start, *after = [float(row[1 if row[0] == "start" else 4]) for row in rows]
    assert start < 0.4
    assert after[-1] > 0.9
    assert all(float(row[5]) > 1 for row in rows[1:])


@pytest.mark.real
def test_cyclic_by_name(shell: Shell) -> None:
    shell.run("nvflare", "config", "-jt", str(templates.path()))
    shell.create("torchrun_cyclic_pt", *CLIENT, "launch_once=true")

    run = shell.simulate()

    # Two rounds over two sites, each starts with what the one before has made of the model.
    accuracies = logged_accuracies(run)
    assert len(accuracies) == 4
    assert accuracies[0] < 0.4
    assert accuracies[1] > 0.6
    assert accuracies[3] > 0.9


def train_with_one_site(shell: Shell, template: str, *client: str) -> tuple[Path, list[dict[str, str]]]:
    """Two rounds of a template on two nodes; the simulator's workspace, and what rank 0 says of each round."""
    shell.create(
        str(templates.path() / template),
        *("-f", "config_fed_client.conf", "nodes=2", *client),
        *("-f", "config_fed_server.conf", "num_rounds=2", "num_clients=1"),
        *("-f", "meta.conf", "min_clients=1"),
    )
    run = shell.simulate(sites=1)
    log = (run / "site-1" / "log.txt").read_text()
    assert "Finished FedAvg" in (run / "server" / "log.txt").read_text(), log[-5000:]
    rounds = [match.groupdict() for match in FRAMEWORK.finditer(log)]
    assert [said["processes"] for said in rounds] == ["2 processes on 2 nodes"] * 2
    return run, rounds


FRAMEWORK = re.compile(
    r"site-1: (?P<processes>\d+ processes on \d+ nodes), accuracy before (?P<accuracy>[0-9.]+), "
    r"(?P<steps>\d+) steps(, loss (?P<loss>[0-9.]+))?"
)


@pytest.mark.real
def test_lightning(shell: Shell) -> None:
    run, rounds = train_with_one_site(shell, "torchrun_fedavg_lightning", 'app_config="--accelerator cpu"')

    # One group has served both rounds, so Lightning counts on.
    assert [int(said["steps"]) for said in rounds] == [4 * STEPS_PER_EPOCH, 8 * STEPS_PER_EPOCH]
    before, after = (float(said["accuracy"]) for said in rounds)
    assert before < 0.4
    assert after > 0.9
    kept = scalars(run, "site-1")
    assert list(kept) == ["loss"]
    assert dict(kept["loss"]) == pytest.approx({n: float(said["loss"]) for n, said in enumerate(rounds)}, abs=1e-4)


@pytest.mark.real
def test_hugging_face(shell: Shell) -> None:
    run, rounds = train_with_one_site(shell, "torchrun_fedavg_hf", 'app_config="--cpu"')

    # Each round starts with an optimizer and a count of its own.
    assert [int(said["steps"]) for said in rounds] == [4 * STEPS_PER_EPOCH] * 2
    before, after = (float(said["accuracy"]) for said in rounds)
    assert before < 0.4
    assert after > 0.6
    kept = scalars(run, "site-1")
    # One loss per epoch; the second round's count on from the first's.
    assert list(dict(kept["loss"])) == [STEPS_PER_EPOCH * n for n in range(1, 9)]
    assert kept["loss"][-1][1] < kept["loss"][0][1]
    # NVFlare puts the second round's evaluation a round too late: its values alone.
    assert [value for _, value in kept["eval_accuracy"]] == pytest.approx([before, after], abs=1e-4)


@pytest.mark.real
def test_fedavg_fsdp2(shell: Shell) -> None:
    shell.create(str(templates.path() / "torchrun_fedavg_fsdp2_pt"), *DEFAULT, *rounds(1))

    run = shell.simulate()

    assert max(logged_accuracies(run)) < 0.4
    assert summary().accuracy(app(run, "server") / "FL_global_model.pt") > 0.8


# In one piece: both ranks write to the same pipe.
HELD = """
import torch.distributed as dist
from client_fsdp2 import shard
from model import DigitNet

dist.init_process_group("gloo")
parameters = list(shard(DigitNet()).parameters())
held = sum(parameter.to_local().numel() for parameter in parameters)
print(f"{held} of {sum(parameter.numel() for parameter in parameters)}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.real
def test_fsdp2_script_divides_the_network(shell: Shell) -> None:
    (shell.folder / "held.py").write_text(HELD)
    shell.environ["PYTHONPATH"] = str(EXAMPLE)

    said = shell.run("torchrun", "--standalone", "--nproc-per-node=2", "held.py")

    assert said.count("4965 of 9930\n") == 2


@pytest.mark.real
def test_fedavg_with_cross_site_evaluation(shell: Shell) -> None:
    """On site-2 each task has processes of its own, which find what those that trained have left."""
    shell.create(str(templates.path() / "torchrun_fedavg_cse_pt"), *ONE_NODE, *rounds(1))
    job = shell.folder / "job"
    shutil.copytree(job / "app", job / "per_task")
    for file, old, new in (
        (job / "per_task" / "config" / "config_fed_client.conf", "launch_once = true", "launch_once = false"),
        (job / "meta.conf", '"@ALL"\n    ]', '"server", "site-1"\n    ]\n    per_task = ["site-2"]'),
    ):
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))

    run = shell.simulate()

    # To train, to give what was trained, and to evaluate two of the sites' models and the server's.
    launches = {site: len(list((run / site).rglob("torchrun/attempt-*"))) for site in SITES}
    assert launches == {"site-1": 1, "site-2": 5}
    evaluation = run / "server" / "simulate_job" / "cross_site_val"
    by_site = json.loads((evaluation / "cross_val_results.json").read_text())
    assert set(by_site) == set(SITES)
    # All measure on the same images.
    assert by_site["site-1"] == by_site["site-2"]
    measured = {model: metrics["accuracy"] for model, metrics in by_site["site-1"].items()}
    # A best one is kept from the second round on.
    assert set(measured) == {*SITES, "SRV_FL_global_model.pt"}
    assert min(measured.values()) > 0.8
    final = summary().accuracy(app(run, "server") / "FL_global_model.pt")
    assert measured["SRV_FL_global_model.pt"] == pytest.approx(final)
    for site in SITES:
        submitted = from_file(str(evaluation / "model_shareables" / site)).data
        trained = torch.load(app(run, site) / "trained.pt")
        assert set(submitted) == set(trained)
        assert all(torch.equal(torch.as_tensor(submitted[name]), trained[name]) for name in trained)


@pytest.mark.real
def test_swarm(shell: Shell) -> None:
    shell.create(str(templates.path() / "torchrun_swarm_pt"), *DEFAULT, "launch_once=true", *rounds(2))

    run = shell.simulate()

    *first, third, fourth = logged_accuracies(run)
    assert len(first) == 2
    assert max(first) < 0.4
    # Both have begun the second round with the average.
    assert third == fourth
    assert third > 0.8
    # Every site has the last one, the server has none.
    finals = [app(run, site) / "FL_global_model.pt" for site in SITES]
    assert summary().accuracy(finals[0]) == summary().accuracy(finals[1]) > third - 0.05
    assert list((run / "server").rglob("*.pt")) == []


@pytest.mark.real
@pytest.mark.parametrize("template", TEMPLATES)
def test_name_and_path_make_the_same_job(shell: Shell, template: str) -> None:
    shell.create(str(templates.path() / template), *CLIENT)
    by_path = job_files(shell.folder / "job")
    shell.environ["NVFLARE_HOME"] = str(templates.path().parent)
    shell.create(template, *CLIENT, "-force")

    assert job_files(shell.folder / "job") == by_path
    assert set(by_path) == {
        "meta.conf",
        "app/config/config_fed_client.conf",
        "app/config/config_fed_server.conf",
        *(f"app/custom/{file.name}" for file in EXAMPLE.glob("*.py")),
    }


@pytest.mark.real
def test_variables_reach_the_executor_and_the_node_group(shell: Shell) -> None:
    template = str(templates.path() / "torchrun_fedavg_pt")
    shell.create(template, *CLIENT, "nproc_per_node=4", "launch_once=true")

    config = shell.folder / "job" / "app" / "config"
    client = ConfigFactory.load_config("config_fed_client.conf", [str(config)]).to_dict()
    args = client["executors"][0]["executor"]["args"]
    assert (client["app_script"], client["app_config"], client["nodes"]) == ("client.py", "--device cpu", 2)
    assert args["script"] == "{app_script}"
    assert args["script_args"] == "{app_config}"
    assert args["nnodes"] == "{nodes}"
    assert (args["nproc_per_node"], args["launch_once"]) == (4, True)
    assert client["components"][0]["args"]["nodes"] == 2
