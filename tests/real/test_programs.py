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

# Looks for the site's secret and NVFlare's own where others could see them, while all of the job is running.
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
    home = Path(os.environ["HOME"])
    bootstrap = Path(os.environ["NVFLARE_CLIENT_API_BOOTSTRAP"])
    tokens = [json.loads(bootstrap.read_text())["launch_token"]]
    dist.broadcast_object_list(tokens)
    secrets = {"key": sys.argv[2], "token": tokens[0]}
    contents = {}
    for path in home.rglob("*"):
        try:
            contents[str(path)] = path.read_bytes()
        except OSError:
            continue
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
        "bootstrap": str(bootstrap),
        "mode": bootstrap.stat().st_mode & 0o777,
        "token, backward": tokens[0][::-1],
        "files": {
            name: sorted(path for path, content in contents.items() if secret.encode() in content)
            for name, secret in secrets.items()
        },
        "commands": {
            name: sorted(pid for pid, command in commands.items() if secret.encode() in command)
            for name, secret in secrets.items()
        },
        "seen reference in": len([c for c in commands.values() if b"--key=<${secret:SITE_KEY}>" in c]),
    }
    # Nobody ends before all have looked.
    dist.barrier()
    (home / f"found-{rank}.json").write_text(json.dumps(found))
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
    # Node 1 has a copy of the job's files.
    simulator.write_site_file("nodes: 2\nstage: always\n")
    simulator.write_job(
        SECRETS,
        script_args=["--key=<${secret:SITE_KEY}>", "${secret:SITE_KEY}"],
        env={"API_KEY": "key ${secret:SITE_KEY}"},
    )

    output = simulator.run()

    assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
    tokens: set[str] = set()
    homes: list[str] = []
    for rank in (0, 1):
        found = json.loads((simulator.job.parent / f"found-{rank}.json").read_text())
        assert found["args"] == [digest(f"--key=<{secret}>"), digest(secret)]
        assert found["env"] == digest(f"key {secret}")
        assert found["this process is among them"] is True
        assert found["commands"] == {"key": [], "token": []}
        tokens.add(found["token, backward"][::-1])
        homes.append(found["bootstrap"])
        assert found["mode"] == 0o600
        assert found["files"] == {"key": [], "token": [homes[0]]}
        # Two ranks and two torchruns at least: what people see in a process list is the reference.
        assert found["seen reference in"] >= 4
    (token,) = tokens
    assert homes[0] != homes[1]
    (verdict,) = simulator.workspace.rglob("verdict.json")
    assert json.loads(verdict.read_text())["outcome"] == "ok"
    for hidden in (secret, token):
        assert hidden not in output
        assert files_with(hidden, simulator.job.parent) == []


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]
