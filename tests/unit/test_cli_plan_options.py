"""What `plan` finds out from options and from jobs' folders; that it agrees with a real run is tested with one."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from nvflare_torchrun_plugin.cli import app

HERE = socket.gethostname()
EXECUTOR = "nvflare_torchrun_plugin.executor.TorchrunExecutor"
PROVIDER = "nvflare_torchrun_plugin.node_group.NodeGroupProvider"


class Cli:
    """The command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch

    def __call__(self, *words: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["nvflare-torchrun", *words])
        with pytest.raises(SystemExit) as caught:
            app.main()
        said = self._capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, said.out, said.err

    def json(self, *words: str) -> Any:
        verb, *more = words
        code, out, err = self(verb, "--json", *more)
        assert code == 0, err
        return json.loads(out)

    def refusal(self, *words: str) -> str:
        code, out, err = self(*words)
        assert (code, out) == (2, "")
        return err.removeprefix("nvflare-torchrun: ")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(capsys, monkeypatch)


def job(folder: Path, args: dict[str, Any], *, nodes: Any = None, meta: dict[str, Any] | None = None) -> None:
    """Write a job for all sites whose code is in its custom folder."""
    custom = folder / "app/custom"
    custom.mkdir(parents=True)
    (custom / "train.py").touch()
    (folder / "app/config").mkdir()
    components = [] if nodes is None else [{"id": "nodes", "path": PROVIDER, "args": {"nodes": nodes}}]
    executors = [{"tasks": ["train"], "executor": {"path": EXECUTOR, "args": {"script": "train.py", **args}}}]
    config = {"format_version": 2, "executors": executors, "components": components}
    (folder / "app/config/config_fed_client.json").write_text(json.dumps(config))
    (folder / "meta.json").write_text(json.dumps({"name": "job", "deploy_map": {"app": ["@ALL"]}, **(meta or {})}))


def test_two_nodes_by_ssh(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    for name, value in {"HF_TOKEN": "hush", "NCCL_DEBUG": "INFO", "RANK": "3", "OTHER": "x"}.items():
        monkeypatch.setenv(name, value)
    words = ("plan", "--nodes", f"{HERE},gpu-1", "--master-addr", "10.0.0.1", "--env", "KEY=hush", "--copy")
    said = cli.json(*words, "--nproc-per-node", "8", "--tee", "3", "train.py", "--lr", "0.1")
    assert said["node_group"] == {"source": "--nodes", "nodes": 2, "least": 2, "transport": "ssh"}
    assert (said["master_address"], said["master_port_range"]) == ("10.0.0.1", [29400, 30399])
    first, second = said["nodes"]
    agent = [sys.executable, "-m", "nvflare_torchrun_plugin.node_agent"]
    assert first["transport"] == agent
    assert second["transport"][-2:] == ["gpu-1", " ".join(agent)]
    contract = second["contract"]
    assert (contract["NVFL_NNODES"], contract["NVFL_NODE_RANK"]) == ("2", "1")
    rank = ["-m", "nvflare_torchrun_plugin.rank", f"{tmp_path}/train.py", "--lr", "0.1"]
    options = ["--nproc-per-node=8", "--join-timeout=600", "--tee", "3"]
    translator = [sys.executable, "-m", "nvflare_torchrun_plugin.torchrun_node", "--log-dir=AGENT_DIR"]
    assert second["translator"] == [*translator, *options, *rank]
    endpoint = f"--rdzv_endpoint=10.0.0.1:{contract['NVFL_MASTER_PORT']}"
    assert {"--nnodes=2", "--node_rank=1", "--nproc_per_node=8", endpoint} <= set(second["torchrun"])
    assert (first["staging"], second["staging"]) == ("none", f"a copy of {tmp_path}, unless the node sees it")
    environment = first["environment"]
    assert {name: environment["set"][name] for name in ("HF_TOKEN", "KEY", "NCCL_DEBUG")} == {
        "HF_TOKEN": "(not shown)",
        "KEY": "(not shown)",
        "NCCL_DEBUG": "INFO",
    }
    assert environment["hidden"] == ["RANK"]
    assert "OTHER" in environment["kept"]
    assert "GLOO_SOCKET_IFNAME" in environment["set_by_node"]
    assert (second["environment"]["kept"], second["environment"]["hidden"]) == (None, None)


def test_plain_text_has_no_secret_and_no_style(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code, out, err = cli("plan", "--nodes", "2", "--env", "KEY=hush", "train.py")
    assert (code, err) == (0, "")
    assert "hush" not in out
    assert "\x1b" not in out
    assert re.search(r"^master address +127\.0\.0\.1$", out, re.MULTILINE)
    assert re.search(rf"^node 0 \({re.escape(HERE)}\)$", out, re.MULTILINE)
    assert out.endswith(f"node 1 ({HERE}): as node 0, but for its host and node rank\n")
    assert re.search(r"^hidden +\S", out, re.MULTILINE)


def test_a_node_that_is_like_another_is_not_shown_again(cli: Cli, tmp_path: Path) -> None:
    here = {"host": HERE, "address": "10.0.0.1", "nproc_per_node": 2}
    others = [{"host": f"gpu-{n}", "nproc_per_node": nproc} for n, nproc in ((1, 2), (2, 4), (12, 2))]
    (tmp_path / "kit/local").mkdir(parents=True)
    described = {"nodes": [here, *others], "transport": "ssh"}
    (tmp_path / "kit/local/node_group.yaml").write_text(json.dumps(described))
    job(tmp_path / "job", {})
    code, out, err = cli("plan", "--job", "job", "--workspace", "kit")
    assert (code, err) == (0, "")
    shown = re.findall(r"^node \d.*$", out, re.MULTILINE)
    as_node_1 = "as node 1, but for its host and node rank"
    assert shown == [f"node 0 ({HERE})", "node 1 (gpu-1)", "node 2 (gpu-2)", f"node 3 (gpu-12): {as_node_1}"]


def test_one_node_has_no_rendezvous(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    said = cli.json("plan", "train.py")
    assert (said["master_address"], said["master_port_range"]) == (None, None)
    assert "--standalone" in said["nodes"][0]["torchrun"]


def test_a_job_and_the_sites_own_nodes(cli: Cli, tmp_path: Path) -> None:
    per_site = {"launcher_spec": {"site-2": {"process": {"nproc_per_node": 2}}}}
    job(tmp_path / "job", {"script_args": "--lr 0.1", "nnodes": 2, "nproc_per_node": 4}, nodes=3, meta=per_site)
    said = cli.json("plan", "--job", "job")
    assert said["node_group"]["source"] == "FL context property node_group"
    assert (len(said["nodes"]), said["directory"]) == (2, f"{tmp_path}/job/app")
    assert said["target"] == f"{tmp_path}/job/app/custom/train.py"
    assert {"--nproc_per_node=4", "--lr", "0.1"} <= set(said["nodes"][1]["torchrun"])
    assert "--nproc_per_node=2" in cli.json("plan", "--job", "job", "--site", "site-2")["nodes"][1]["torchrun"]
    local = tmp_path / "kit/local"
    local.mkdir(parents=True)
    (local / "node_group.yaml").write_text("nodes: 1\n")
    refusal = cli.refusal("plan", "--job", "job", "--workspace", "kit")
    assert refusal.startswith("the job wants 2 nodes (nnodes), but site file kit/local/node_group.yaml offers 1")


def test_a_template_with_variables(cli: Cli, tmp_path: Path) -> None:
    app_dir = tmp_path / "job/app"
    (app_dir / "config").mkdir(parents=True)
    template = Path(__file__).parents[2] / "job_templates/torchrun_fedavg_pt"
    for source, target in (("config_fed_client.conf", app_dir / "config"), ("meta.conf", tmp_path / "job")):
        (target / source).write_bytes((template / source).read_bytes())
    (app_dir / "custom").mkdir()
    (app_dir / "custom/client.py").touch()
    said = cli.json("plan", "--job", "job")
    assert (said["target"], len(said["nodes"])) == (f"{app_dir}/custom/client.py", 1)
    assert "--nproc_per_node=1" in said["nodes"][0]["torchrun"]


def test_a_job_without_code_is_held_to_the_sites_rules(cli: Cli, tmp_path: Path) -> None:
    job(tmp_path / "job", {"script": sys.executable})
    (tmp_path / "job/app/custom/train.py").unlink()
    (tmp_path / "job/app/custom").rmdir()
    assert cli.refusal("plan", "--job", "job").startswith("a job without the BYOC right")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"join_timeout": 300}, "TorchrunExecutor: join_timeout is 300, but launch_timeout is 300"),
        (
            {"nonsense": 1},
            "TorchrunExecutor: its arguments: unknown key 'nonsense': remove it (known",
        ),
        ({"nproc_per_nodes": 1}, "unknown key 'nproc_per_nodes': did you mean 'nproc_per_node'? (known keys: "),
        ({"script": "none.py"}, "script 'none.py' is not there; looked for"),
        ({"script_args": "${secret:NONE}"}, "secret reference"),
    ],
)
def test_what_the_executor_refuses_is_refused(
    cli: Cli, tmp_path: Path, args: dict[str, Any], message: str
) -> None:
    job(tmp_path / "job", args)
    assert message in cli.refusal("plan", "--job", "job")


def test_folders_that_are_no_jobs(cli: Cli, tmp_path: Path) -> None:
    assert cli.refusal("plan", "--job", "none").startswith("none has no meta.json")
    job(tmp_path / "job", {}, meta={"deploy_map": {"app": ["site-1", "server"]}})
    assert cli.refusal("plan", "--job", "job", "--site", "site-7") == (
        "the job job has no app for site 'site-7': --site names one of site-1\n"
    )
    config = tmp_path / "job/app/config/config_fed_client.json"
    config.write_text("{")
    assert "config_fed_client cannot be read" in cli.refusal("plan", "--job", "job")
    config.write_text('{"executors": [{"tasks": ["train"], "executor": {"path": "other.Executor"}}]}')
    assert f"has no executor {EXECUTOR}" in cli.refusal("plan", "--job", "job")
    assert cli.refusal("plan", "--job", "job", "--nodes", "2").startswith("--job says what to run, and how")


@pytest.mark.parametrize(
    ("meta", "config"),
    [
        ([], None),
        ({"deploy_map": 5}, None),
        ({"deploy_map": {"app": [5]}}, None),
        (None, {"executors": 5}),
        (None, {"executors": [5]}),
        (None, {"executors": [{"executor": 5}]}),
    ],
)
def test_a_job_whose_values_are_of_the_wrong_type(cli: Cli, tmp_path: Path, meta: Any, config: Any) -> None:
    job(tmp_path / "job", {})
    if meta is not None:
        (tmp_path / "job/meta.json").write_text(json.dumps(meta))
    if config is not None:
        (tmp_path / "job/app/config/config_fed_client.json").write_text(json.dumps(config))
    assert "job" in cli.refusal("plan", "--job", "job")


def test_a_title_is_no_markup(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    code, out, _ = cli("plan", "--nodes", "localhost,b[/x]", "--master-addr", "a", "train.py")
    assert code == 0
    assert "node 1 (b[/x])" in out


@pytest.mark.parametrize(
    "besides",
    [["--nodes", "2"], ["--copy"], ["--hang-timeout", "5"], ["--run-dir", "logs"], ["train.py"]],
    ids=str,
)
def test_a_job_says_itself_what_to_run(cli: Cli, tmp_path: Path, besides: list[str]) -> None:
    job(tmp_path / "job", {"script": "train.py"})
    refusal = cli.refusal("plan", "--job", "job", *besides)
    assert refusal == "--job says what to run, and how: give besides it --site and --workspace alone\n"


@pytest.mark.parametrize(
    "words", [["--node-timeout", "9"], ["--hang-timeout", "5"], ["--log-ranks", "0"]], ids=str
)
def test_what_only_counts_in_a_run_is_checked(cli: Cli, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "train.py").touch()
    assert cli("plan", *words, "train.py")[0] == 0
    assert words[0].removeprefix("--").replace("-", "_") in cli.refusal("plan", words[0], "-1", "train.py")
