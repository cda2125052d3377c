"""The executor and NVFlare's Job API: what a job says is what the site builds."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor
from nvflare.fuel.utils.class_utils import instantiate_class
from nvflare.job_config.api import FedJob

from nvflare_torchrun_plugin.executor import TorchrunExecutor
from nvflare_torchrun_plugin.node_group import NodeGroupProvider

# Every argument, with OTHERWISE none with its default.
ARGUMENTS: dict[str, Any] = {
    "script": "train.py",
    "module": None,
    "script_args": ["--name", "two words", "${secret:KEY}"],
    "nnodes": "1:4",
    "nproc_per_node": "gpu",
    "launch_once": True,
    "env": {"NCCL_DEBUG": "INFO", "KEY": "<${secret:KEY}>"},
    "torchrun_args": ["--tee", "3"],
    "join_timeout": 33,
    "node_timeout": 12.0,
    "hang_timeout": 900.0,
    "warm_start": {"preload": ["torch"], "max_age": 60},
    "log_ranks": [0, 2],
    "max_task_attempts": 1,
    "retry_on": "any",
    "launch_timeout": 111.0,
    "shutdown_timeout": 12.5,
    "stop_grace_period": 7.0,
    "heartbeat_interval": 2.5,
    "heartbeat_timeout": 45.0,
    "task_wait_timeout": 99.0,
    "result_wait_timeout": 88.0,
    "train_task_name": "fit",
    "evaluate_task_name": "score",
    "submit_model_task_name": "hand_in",
    "train_with_evaluation": True,
    "params_exchange_format": "pytorch",
    "server_expected_format": "pytorch",
    "params_transfer_type": "DIFF",
    "memory_gc_rounds": 3,
    "cuda_empty_cache": True,
}
# What cannot be together with the others.
OTHERWISE = {"script": None, "module": "pkg.train", "launch_once": False, "max_task_attempts": 2}

NOT_OURS = {
    "self",
    "execution_mode",  # always external_process
    "command",  # always the relay
    # of the mode in_process
    "task_script_path",
    "task_script_args",
    # of the mode attach
    "attach_id",
    "attach_timeout",
    "allow_reconnect",
    "allow_insecure_attach",
}
"""Arguments of NVFlare's executor that make no sense here."""

README = Path(__file__).parents[2] / "README.md"


def parameters(owner: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(owner.__init__).parameters)  # type: ignore[misc]  # the class itself is asked


def exported_args(job: FedJob, folder: Path, path: str) -> list[dict[str, Any]]:
    """The arguments of the component with this class path in the exported job's client configuration."""
    job.export_job(str(folder))
    (file,) = folder.rglob("config_fed_client.json")
    client = json.loads(file.read_text())
    components = [entry["executor"] for entry in client["executors"]] + client["components"]
    return [component["args"] for component in components if component["path"] == path]


def kept(executor: TorchrunExecutor, names: set[str]) -> dict[str, Any]:
    return {name: getattr(executor, f"_{name}") for name in names}


@pytest.mark.parametrize("change", [{}, OTHERWISE], ids=["script", "module"])
def test_all_arguments_survive_the_export(tmp_path: Path, change: dict[str, Any]) -> None:
    arguments = {**ARGUMENTS, **change}
    signature = parameters(TorchrunExecutor)
    assert set(arguments) == set(signature) - {"self"}
    same = {name for name in arguments if arguments[name] == signature[name].default}
    assert same == ({"script", "launch_once"} if change else {"module", "max_task_attempts"})
    path = "nvflare_torchrun_plugin.executor.TorchrunExecutor"
    job = FedJob(name="exported")
    job.to(TorchrunExecutor(**arguments), "site-1", tasks=["train"])
    job.set_app_packages(["nvflare_torchrun_plugin"])

    (exported,) = exported_args(job, tmp_path, path)

    assert exported == {name: value for name, value in arguments.items() if name not in same}
    built = instantiate_class(path, exported)
    assert kept(built, set(arguments)) == kept(TorchrunExecutor(**arguments), set(arguments))
    assert kept(built, set(arguments)) == arguments


def test_defaults_are_left_out_of_the_export(tmp_path: Path) -> None:
    job = FedJob(name="exported")
    job.to(TorchrunExecutor(script="train.py"), "site-1", tasks=["train"])

    (exported,) = exported_args(job, tmp_path, "nvflare_torchrun_plugin.executor.TorchrunExecutor")

    assert exported == {"script": "train.py"}


def test_the_node_group_survives_the_export(tmp_path: Path) -> None:
    arguments = {
        "nodes": [{"host": "localhost", "nproc_per_node": 2}],
        "transport": "local",
        "master_port_range": [31000, 31009],
        "env": {"A": "1"},
        "forward_env": ["A_*"],
        "python": "/opt/python",
        "stage": "never",
        "on_busy": "share",
        "busy_timeout": 60.0,
    }
    joined = {"nodes": 2, "transport": "join", "join": {"file": "/f", "ports": [5, 6], "wait": 7.0}}
    assert {*arguments, *joined} == set(parameters(NodeGroupProvider)) - {"self"}
    job = FedJob(name="exported")
    job.to(TorchrunExecutor(script="train.py"), "site-1", tasks=["train"])
    job.to(NodeGroupProvider(**arguments), "site-1")  # type: ignore[arg-type]  # a dict of several types
    job.to(NodeGroupProvider(**joined), "site-1")  # type: ignore[arg-type]

    path = "nvflare_torchrun_plugin.node_group.NodeGroupProvider"
    assert exported_args(job, tmp_path, path) == [arguments, joined]


def test_every_option_of_nvflares_executor_is_here() -> None:
    """Fails when NVFlare gains or loses an option: then the executor must follow."""
    theirs, ours = parameters(ClientAPIExecutor), parameters(TorchrunExecutor)
    assert set(theirs) - set(ours) == NOT_OURS - {"self"}
    # Each task has a launch of its own, and the ranks get less time to end.
    other_default = {"launch_once", "stop_grace_period"}
    common = set(theirs) & set(ours) - {"self"}
    assert {name for name in common if ours[name].default != theirs[name].default} == other_default


def test_the_readme_lists_every_option() -> None:
    table = README.read_text().partition("## Options of the executor")[2].partition("The same keys serve")[0]
    first_cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    listed = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(set(parameters(TorchrunExecutor)) - {"self"})


def test_the_readmes_snippet_works(tmp_path: Path) -> None:
    """It is the heart of job.py."""
    snippet = README.read_text().partition("Its heart:\n\n```python\n")[2].partition("```")[0]
    example = README.parent / "examples" / "digits"
    script = tmp_path / "snippet.py"
    script.write_text(snippet)

    done = subprocess.run(
        [sys.executable, str(script), "--export", "--export-dir", str(tmp_path / "jobs")],
        cwd=example,
        env={"PYTHONPATH": str(example), "HOME": str(tmp_path), "PATH": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout
    (file,) = (tmp_path / "jobs").rglob("config_fed_client.json")
    client = json.loads(file.read_text())
    (executor,) = client["executors"]
    assert executor["tasks"] == ["train"]
    assert executor["executor"] == {
        "path": "nvflare_torchrun_plugin.executor.TorchrunExecutor",
        "args": {
            "script": "client.py",
            "script_args": "--device cpu",
            "nproc_per_node": 1,
            "params_exchange_format": "pytorch",
        },
    }
    assert [(c["path"], c["args"]) for c in client["components"] if "torchrun" in c["path"]] == [
        ("nvflare_torchrun_plugin.node_group.NodeGroupProvider", {"nodes": 2, "transport": "local"})
    ]
    # The script and all that it imports, and no sources of the package.
    custom = {path.name for path in (file.parents[1] / "custom").iterdir()}
    assert custom == {"client.py", "data.py", "model.py"}
