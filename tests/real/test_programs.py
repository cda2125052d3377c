"""What a job may run and with what, in NVFlare's simulator: a module of its own, arguments with secrets."""

from __future__ import annotations

import hashlib
import json
import uuid
from pathlib import Path

import pytest
from simulation import Simulator

pytestmark = pytest.mark.real

# Each rank adds what the module beside it says.
MODULE = """
    import os
    import sys

    import nvflare.client as flare
    import torch
    import torch.distributed as dist

    from .amount import AMOUNT

    dist.init_process_group("gloo")
    flare.init(rank=dist.get_rank())
    received = flare.receive()
    total = torch.tensor([AMOUNT])
    dist.all_reduce(total)
    print("runs", __name__, __spec__.name, os.path.relpath(sys.argv[0]), sys.argv[1:], flush=True)
    if received:
        flare.send(flare.FLModel(params={name: value + total.item() for name, value in received.params.items()}))
"""

# Looks for the secret where everyone on the host can see it, while everything of the job is running.
SECRETS = """
    import hashlib
    import json
    import os
    import sys
    from pathlib import Path

    import nvflare.client as flare
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    flare.init(rank=rank)
    received = flare.receive()
    secret = sys.argv[2]
    commands = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            commands[directory.name] = (directory / "cmdline").read_bytes()
        except OSError:
            continue
    found = {
        "args": [hashlib.sha256(arg.encode()).hexdigest() for arg in sys.argv[1:]],
        "env": hashlib.sha256(os.environ["API_KEY"].encode()).hexdigest(),
        "this process is among them": str(os.getpid()) in commands,
        "seen in": sorted(pid for pid, command in commands.items() if secret.encode() in command),
        "seen reference in": len([c for c in commands.values() if b"--key=<${secret:SITE_KEY}>" in c]),
    }
    Path(f"found-{rank}.json").write_text(json.dumps(found))
    # Nobody ends before all have looked.
    dist.barrier()
    if received:
        flare.send(flare.FLModel(params=received.params))
"""


def test_a_module_of_the_job(simulator: Simulator) -> None:
    simulator.sites = ("site-1",)
    files = {"training/__init__.py": "", "training/amount.py": "AMOUNT = 7.0\n", "training/start.py": MODULE}
    simulator.write_files(files, nodes=2, module="training.start", script_args=["a b", "'$c'"])

    output = simulator.run()

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    assert simulator.model() == [14.0]
    for rank in (0, 1):
        line = f"node {rank} rank {rank} | runs __main__ training.start custom/training/start.py ['a b', \"'$c'\"]"
        assert line in simulator.messages("site-1")
    assert simulator.errors("site-1") == []


def test_secrets_reach_the_ranks_and_nobody_else(simulator: Simulator) -> None:
    secret = uuid.uuid4().hex
    simulator.sites = ("site-1",)
    simulator.environ["SITE_KEY"] = secret
    simulator.write_job(
        SECRETS,
        nodes=2,
        script_args=["--key=<${secret:SITE_KEY}>", "${secret:SITE_KEY}"],
        env={"API_KEY": "key ${secret:SITE_KEY}"},
    )

    output = simulator.run()

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    for rank in (0, 1):
        found = json.loads((simulator.app("site-1") / f"found-{rank}.json").read_text())
        assert found["args"] == [digest(f"--key=<{secret}>"), digest(secret)]
        assert found["env"] == digest(f"key {secret}")
        assert found["this process is among them"] is True
        assert found["seen in"] == []
        # Two ranks and two torchruns at least: what people see in a process list is the reference.
        assert found["seen reference in"] >= 4
    assert secret not in output
    (verdict,) = simulator.workspace.rglob("verdict.json")
    assert json.loads(verdict.read_text())["outcome"] == "ok"
    assert files_with(secret, simulator.job.parent) == []


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
