"""NVFlare's FedAvg recipe, each site of which runs by torchrun, in NVFlare's own environments for recipes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from poc import Poc
from simulation import LIMIT_S, leaving_nothing
from tb_events import scalars

pytestmark = pytest.mark.real

MODEL = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))
"""

# What it adds shows which ranks have taken part.
TRAIN = """
    import nvflare_torchrun_plugin.client as flare
    import torch
    import torch.distributed as dist
    from model import Net
    from nvflare_torchrun_plugin.client.tracking import SummaryWriter

    flare.init()
    dist.init_process_group("gloo")
    net = Net()
    while flare.is_running():
        model = flare.receive()
        flare.load_model(net, model)
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        net.weight.data += total
        SummaryWriter().add_scalar("added", total.item(), model.current_round)
        flare.send(flare.FLModel(params=flare.full_params(net)))
    dist.destroy_process_group()
"""
SUM = 1 + 2

JOB = """
    import sys

    from model import Net
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    from nvflare.recipe import PocEnv, SimEnv
    from nvflare.recipe.utils import add_experiment_tracking
    from nvflare_torchrun_plugin.job_api import use_torchrun
    from nvflare_torchrun_plugin.node_group import NodeGroupProvider

    recipe = FedAvgRecipe(name="recipe", model=Net(), min_clients=1, num_rounds=2, train_script="train.py")
    add_experiment_tracking(recipe, "tensorboard")
    use_torchrun(recipe, NodeGroupProvider(nodes=2), nproc_per_node=1, launch_once=True)
    run = recipe.execute(ENV)
    result = run.get_result(clean_up=False)
    print("status:", run.get_status())
    print("result:", result)
"""


def execute(folder: Path, environ: dict[str, str], env: str) -> tuple[str, Path]:
    """Run the job's script with this environment for the recipe; what it says of the status and the result."""
    for name, code in (("model.py", MODEL), ("train.py", TRAIN), ("job.py", JOB.replace("ENV", env, 1))):
        (folder / name).write_text(dedent(code))
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=folder,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    said = dict(re.findall(r"(?m)^(status|result): (.*)$", done.stdout))
    assert (done.returncode, set(said)) == (0, {"status", "result"}), done.stdout
    return said["status"], Path(said["result"])


def weight(result: Path) -> list[float]:
    """Of the global model that the server has kept."""
    (file,) = result.rglob("FL_global_model.pt")
    kept: list[float] = torch.load(file)["model"]["weight"].tolist()
    return kept


@pytest.fixture
def poc(tmp_path: Path) -> Iterator[Poc]:
    poc = Poc(tmp_path, ("site-1",))
    try:
        yield poc
    finally:
        left = poc.stop()
    assert left == {}
    assert [path.name for path in poc.tmp.iterdir() if path.name.startswith("nvfl")] == []


def test_in_the_simulator(poc: Poc) -> None:
    with leaving_nothing(poc.tmp):
        env = f"SimEnv(num_clients=1, workspace_root={str(poc.folder / 'runs')!r})"
        _, result = execute(poc.folder, poc.environ, env)

    assert weight(result) == [2 * SUM] * 3
    log = (result / "site-1" / "log.txt").read_text()
    assert re.search(r"node group of 2 \(\S+ x 1, \S+ x 1\), transport local", log)
    # Both ranks have written.
    assert scalars(result, "site-1") == {"added": [(0, SUM), (1, SUM)]}


def test_in_poc(poc: Poc) -> None:
    # NVFlare's own port may be taken, and 10 s are short for a busy machine.
    poc.prepare()
    project = str((poc.folder / "poc" / "project.yml").rename(poc.folder / "project.yml"))
    env = f"PocEnv(num_clients=1, project_conf_path={project!r}, extra={{'login_timeout': 90}})"

    status, result = execute(poc.folder, poc.environ, env)

    assert status == "FINISHED:COMPLETED"
    assert weight(result) == [2 * SUM] * 3
