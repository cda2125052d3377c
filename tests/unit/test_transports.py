"""Argv templates: what they start, and what people are told of it. A real Slurm is among the real tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from nvflare_torchrun_plugin import transports

FAKE_SRUN = """#!/bin/sh
printf '%s\\n' "$@" -- ${SLURM_GPUS-unset} ${SLURM_LABELIO-unset} ${SLURM_JOB_ID-unset}
"""


def srun(tmp_path: Path, **environ: str) -> list[str]:
    """What an srun gets, its options and then some of its environment."""
    (tmp_path / "srun").write_text(FAKE_SRUN)
    (tmp_path / "srun").chmod(0o700)
    argv = transports.argv("srun", "n2", ["my python", "-m", "agent"])
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(argv, capture_output=True, text=True, check=True, env={"PATH": path, **environ})
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_srun_gets_one_step_on_the_node_and_the_command_word_by_word(tmp_path: Path) -> None:
    said = srun(tmp_path, SLURM_JOB_ID="7", SLURM_LABELIO="1", SLURM_GPUS_ON_NODE="2")

    assert said[0] == "--overlap"
    assert said[-8:] == ["--nodelist=n2", "my python", "-m", "agent", "--", "unset", "unset", "7"]
    assert [word for word in said if "gpus" in word] == []


@pytest.mark.parametrize("asked", ["SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"])
def test_gpus_of_the_whole_job_or_of_a_task_become_those_of_a_node(tmp_path: Path, asked: str) -> None:
    said = srun(tmp_path, **{asked: "6", "SLURM_GPUS_ON_NODE": "2"})

    assert said[0] == "--gpus=2"
    assert said[-3] == "unset"
    # A job may have asked for none.
    assert srun(tmp_path, **{asked: "0"})[0] == "--overlap"


@pytest.mark.parametrize(
    ("transport", "name"), [("ssh", "ssh"), ("srun", "srun"), (["/opt/my ssh", "{host}"], "my ssh")]
)
def test_the_client_has_a_name(transport: str | list[str], name: str) -> None:
    assert transports.client(transports.argv(transport, "n2", ["python"])) == name


def test_a_short_command_is_its_own_client() -> None:
    assert transports.client(["/usr/bin/python"]) == "python"
