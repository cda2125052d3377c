"""The runner and the recipes: what an exported job says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe
from nvflare.recipe.utils import add_cross_site_evaluation

from nvflare_torchrun_plugin.job_api import TorchrunRunner, use_torchrun
from nvflare_torchrun_plugin.node_group import NodeGroupProvider

EXECUTOR = "nvflare_torchrun_plugin.executor.TorchrunExecutor"
# By its name: NVFlare would take the sources of a class that it does not know along.
MODEL = {"class_path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 1}}
SLURM = {"launcher_spec": {"site-1": {"slurm": {"nodes": 2}}, "site-2": {"slurm": {"nodes": 1}}}}


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "train.py"
    file.write_text("print('trains')")
    return str(file)


def client_of(folder: Path) -> dict[str, Any]:
    (file,) = folder.rglob("config_fed_client.json")
    client: dict[str, Any] = json.loads(file.read_text())
    custom = file.parents[1] / "custom"
    assert (custom / "train.py").exists()
    assert not (custom / "nvflare_torchrun_plugin").exists()
    return client


def executors(client: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    return [(e["tasks"], e["executor"]["args"]) for e in client["executors"] if e["executor"]["path"] == EXECUTOR]


def test_the_runner_brings_executor_script_and_nodes(script: str, tmp_path: Path) -> None:
    job = FedJob(name="by-hand")
    nodes = NodeGroupProvider(nodes=2, transport="local")
    runner = TorchrunRunner(script, "--lr 0.1", "1:2", 4, node_group=nodes, max_task_attempts=2)
    job.to(runner, "site-1", tasks=["train"])
    job.export_job(str(tmp_path / "jobs"))

    client = client_of(tmp_path / "jobs")
    given = {
        "script": "train.py",
        "script_args": "--lr 0.1",
        "nnodes": "1:2",
        "nproc_per_node": 4,
        "params_exchange_format": "pytorch",
        "max_task_attempts": 2,
    }
    assert executors(client) == [(["train"], given)]
    assert [(c["id"], c["args"]) for c in client["components"]] == [
        ("node_group", {"nodes": 2, "transport": "local"})
    ]


def test_a_wrong_argument_is_refused_where_it_is_given(script: str) -> None:
    with pytest.raises(ValueError, match="nnodes"):
        TorchrunRunner(script, nnodes="x")
    with pytest.raises(ValueError, match="launch_once is 'false': must be true or false"):
        TorchrunRunner(script, launch_once="false")
    with pytest.raises(TypeError, match="nnode"):
        TorchrunRunner(script, nnode=2)


def other_nodes(script: str, target: str, **options: Any) -> dict[str, str | None]:
    job = FedJob(name="by-hand", meta_props=json.loads(json.dumps(SLURM)))
    job.to(TorchrunRunner(script, **options), target)
    spec = job.job.meta_props["launcher_spec"]
    return {site: spec[site]["slurm"].get("additional_node_command") for site in spec}


def test_nodes_that_nvflare_starts_run_the_translator(script: str) -> None:
    filled = other_nodes(
        script, "site-1", launch_once=True, nproc_per_node=8, torchrun_args=["--tee", "3"], script_args=["a b"]
    )
    command = "python3 -m nvflare_torchrun_plugin.torchrun_node --nproc-per-node 8 --tee 3 custom/train.py 'a b'"
    assert filled == {"site-1": command, "site-2": None}
    assert other_nodes(script, "site-2") == {"site-1": None, "site-2": None}


def test_nodes_that_nvflare_starts_dial_in_for_each_task(script: str) -> None:
    """What they run, the client job tells them, secrets included."""
    filled = other_nodes(script, "site-1", nnodes="1:2", script_args="${secret:K}")
    assert filled == {"site-1": "python3 -m nvflare_torchrun_plugin.node_agent --join", "site-2": None}


def test_a_secret_on_a_command_line_is_an_error(script: str) -> None:
    with pytest.raises(ValueError, match="hold no secret"):
        other_nodes(script, "site-1", launch_once=True, script_args="${secret:K}")


def fedavg(script: str) -> Recipe:
    return FedAvgRecipe(name="r", model=MODEL, min_clients=2, train_script=script, train_args="--e 1")


def with_evaluation(script: str) -> Recipe:
    recipe = fedavg(script)
    add_cross_site_evaluation(recipe)
    return recipe


RECIPES: dict[str, Callable[[str], Recipe]] = {
    "fedavg": fedavg,
    "fedavg with cross-site evaluation": with_evaluation,
    "fedprox": lambda script: FedProxRecipe(
        name="r", model=MODEL, min_clients=2, train_script=script, train_args="--e 1"
    ),
    "fedopt": lambda script: FedOptRecipe(
        name="r", model=MODEL, min_clients=2, train_script=script, train_args="--e 1"
    ),
    "scaffold": lambda script: ScaffoldRecipe(
        name="r", model=MODEL, min_clients=2, train_script=script, train_args="--e 1"
    ),
    "cyclic": lambda script: CyclicRecipe(
        name="r", model=MODEL, min_clients=2, train_script=script, train_args="--e 1"
    ),
    "swarm": lambda script: SwarmLearningRecipe(
        name="r",
        model=MODEL,
        min_clients=2,
        num_rounds=1,
        train_script=script,
        train_args={"script_args": "--e 1"},
    ),
}


# Into the job of FedOptRecipe NVFlare copies all of torch's sources.
SLOW = {"fedopt": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in RECIPES])
def test_a_recipes_clients_run_by_torchrun(name: str, script: str, tmp_path: Path) -> None:
    recipe = use_torchrun(RECIPES[name](script), NodeGroupProvider(nodes=2), nproc_per_node=2)
    recipe.export(str(tmp_path / "jobs"))

    client = client_of(tmp_path / "jobs")
    ((_, args),) = executors(client)
    assert {key: args[key] for key in ("script_args", "nproc_per_node", "params_exchange_format")} == {
        "script_args": "--e 1",
        "nproc_per_node": 2,
        "params_exchange_format": "pytorch",
    }
    assert Path(args["script"]).name == "train.py"
    assert [c["id"] for c in client["components"]].count("node_group") == 1
    # No other executor of NVFlare's may claim the same tasks.
    assert "ClientAPIExecutor" not in json.dumps(client)


def test_sites_of_a_recipe_keep_what_is_their_own(script: str, tmp_path: Path) -> None:
    recipe = fedavg(script)
    recipe.set_per_site_config({"site-1": {"train_args": "--e 2"}, "site-2": {}})
    use_torchrun(recipe).export(str(tmp_path / "jobs"))
    found = [
        executors(json.loads(file.read_text()))[0][1]["script_args"]
        for file in sorted((tmp_path / "jobs").rglob("config_fed_client.json"))
    ]
    assert found == ["--e 2", "--e 1"]


def test_a_recipe_that_launches_by_itself_is_refused(script: str) -> None:
    recipe = FedAvgRecipe(name="r", model=MODEL, min_clients=1, train_script=script, launch_external_process=True)
    with pytest.raises(ValueError, match="without launch_external_process"):
        use_torchrun(recipe)


def test_a_recipe_whose_clients_run_no_script_is_refused() -> None:
    with pytest.raises(ValueError, match="no client of the recipe 'bare' runs a script"):
        use_torchrun(Recipe(FedJob(name="bare")))
