"""A group of 64 local nodes: real agents and translators; torchrun itself would take minutes on two cores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from group_driver import run

from nvflare_torchrun_plugin.node import agent_dir, procs

pytestmark = [pytest.mark.real, pytest.mark.alone]

NODES = 64

# A fake: it stands where the translator finds torchrun, tells as which rank it was called, and starts its rank.
TORCHRUN = """
import os, subprocess, sys
given = [word for word in sys.argv if "node_rank" in word or "nnodes" in word]
print("called as", given, flush=True)
environ = {**os.environ, "RANK": given[1].partition("=")[2], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
sys.exit(subprocess.run([sys.executable, "-u", "-m", "nvflare_torchrun_plugin.rank"], env=environ).returncode)
"""


def test_64_nodes_start_a_no_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = tmp_path / "app" / "custom" / "torch" / "distributed"
    stand_in.mkdir(parents=True)
    for package in (stand_in, stand_in.parent):
        (package / "__init__.py").touch()
    (stand_in / "run.py").write_text(TORCHRUN)
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))

    verdict = run(
        {
            "script": "",
            "app_dir": str(tmp_path / "app"),
            "logs": str(tmp_path / "logs"),
            "group": {"nodes": NODES},
        }
    )

    assert (verdict.outcome, verdict.failure, verdict.leftovers) == ("ok", None, ())
    (logs,) = (tmp_path / "logs").iterdir()
    told = [(logs / f"node-{rank}.log").read_text() for rank in range(NODES)]
    assert all(re.search(rf"called as \['--nnodes={NODES}', '--node_rank={n}'\]", told[n]) for n in range(NODES))
    assert procs.with_variable(agent_dir.DIR_VARIABLE, str(folder)) == []
    assert list(folder.iterdir()) == []
