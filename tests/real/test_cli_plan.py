"""`nvflare-torchrun plan` says what `nvflare-torchrun run` does, word by word."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from cli_runs import command
from simulation import Simulator

pytestmark = pytest.mark.real

# Each rank tells how its torchrun and its agent were started, and what it finds in its environment. The first word
# after the script is the name of a file, for those whose output goes elsewhere.
TELL = """
    import json, os, sys
    from pathlib import Path

    def words(pid):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\\0")[:-1]

    def parent(pid):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    torchrun = parent(os.getpid())
    told = json.dumps({
        "torchrun": words(torchrun),
        "agent": words(parent(torchrun)),
        "env": dict(os.environ),
    })
    print(told, flush=True)
    Path(sys.argv[1] + os.environ["RANK"]).write_text(told)
"""
# New for each attempt, made by the agent, or what is left of join_timeout once all agents have come.
VARIES = (r"127\.0\.0\.1:\d+", r"--rdzv_id=.*", r"--log-dir=.*", r"--rdzv_conf=timeout=\d+")


def constant(words: list[str]) -> list[str]:
    return [next((pattern for pattern in VARIES if re.search(pattern, word)), word) for word in words]


def test_the_plan_is_what_happens(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dedent(TELL))
    words = ["--nodes", "2", "--nproc-per-node", "1", "--env", "COLOUR=blue", "--join-timeout", "90"]
    words += ["--role", "trainer", "train.py", "told", "--lr", "0.1"]
    outside = {"NCCL_DEBUG": "WARN", "WORLD_SIZE": "9", "SLURM_PROCID": "5", "STAYS": "x"}
    planned = command(["plan", "--json", *words], tmp_path, None, **outside)
    assert planned.code == 0, planned.err
    ended = command(["run", *words], tmp_path, None, **outside)
    assert ended.code == 0, ended.err
    assert [line for line in ended.lines() if line.startswith("0:0 | {")]
    said = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in (0, 1)]
    for node, rank in zip(planned.json()["nodes"], said, strict=True):
        assert constant(rank["torchrun"]) == constant(node["torchrun"])
        assert rank["agent"] == node["transport"]
        assert rank["torchrun"][0] == sys.executable
        env, environment = rank["env"], node["environment"]
        given = {name: value for name, value in environment["set"].items() if name.startswith("NCCL_")}
        assert {name: env[name] for name in given} == given == {"NCCL_DEBUG": "WARN"}
        assert env["COLOUR"] == "blue"
        assert environment["hidden"] == ["SLURM_PROCID", "WORLD_SIZE"]
        assert env["WORLD_SIZE"] == "2"
        assert "SLURM_PROCID" not in env
        assert "STAYS" in environment["kept"]
        assert set(environment["kept"]) | set(environment["set"]) | set(environment["set_by_node"]) <= set(env)


def test_the_plan_of_a_job_is_what_its_client_does(simulator: Simulator, tmp_path: Path) -> None:
    simulator.sites = ("site-1",)
    # It sends no result, so the job fails once it has told what there is to tell.
    simulator.write_job(TELL, nodes=3, script_args=f"{tmp_path}/told --lr 0.1", nnodes=2, torchrun_args="--role x")
    planned = command(["plan", "--json", "--job", str(simulator.job)], tmp_path)
    assert planned.code == 0, planned.err
    simulator.run()
    said = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in (0, 1)]
    directory = planned.json()["directory"]
    for node, rank in zip(planned.json()["nodes"], said, strict=True):
        torchrun = [word.replace(directory, str(simulator.app("site-1"))) for word in node["torchrun"]]
        assert constant(rank["torchrun"]) == constant(torchrun)
        assert rank["agent"] == node["transport"]
        assert ("--role" in torchrun, "--lr" in torchrun) == (True, True)
