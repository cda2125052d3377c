"""Scripts of the Client API over torchrun on several nodes that are all this host, without NVFlare around them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import simulation

from nvflare_torchrun_plugin.node import procs

LIMIT_S = 240.0

# What a rank with NVFlare would get from it; the first task comes after a wait.
STAND_IN = """
    import json, os, resource, sys, time
    from datetime import timedelta
    import nvflare.client, torch, torch.distributed as dist

    RANK = int(os.environ["RANK"])
    WAIT = float(sys.argv[1])

    def install(tasks):
        current, waits = [None], [WAIT]
        def receive(timeout=None, ctx=None):
            if current[0] is None:
                time.sleep(waits.pop() if waits else 0)
                current[0] = tasks.pop(0) if tasks else None
            return current[0]
        def send(model, clear_cache=True, ctx=None):
            current[0] = None
        answers = dict(
            init="context", system_info={}, get_config={}, get_job_id="job", get_site_name="site", is_train=True,
            is_evaluate=False, is_submit_model=False, get_task_name="train", shutdown=None,
        )
        for name, answer in answers.items():
            setattr(nvflare.client, name, lambda *_, answer=answer, **__: answer)
        for function in (receive, send):
            setattr(nvflare.client, function.__name__, function)
        nvflare.client.is_running = lambda ctx=None: receive() is not None

    if RANK == 0:
        torch.manual_seed(1)
        weight = torch.randn(300, 1000)
        install([nvflare.client.FLModel(params={"w": weight, "b": weight.bfloat16()}) for _ in range(2)])
    import nvflare_torchrun_plugin.client as flare

    def tell(**facts):
        # In one piece: the ranks of a node share the pipe.
        os.write(1, ("FACTS " + json.dumps({"rank": RANK, **facts}) + "\\n").encode())
"""


def run_nodes(tmp_path: Path, code: str, *args: str, nodes: int, nproc: int) -> list[dict[str, Any]]:
    """Run the script on nodes that are all this host; what its ranks tell, by rank."""
    script = tmp_path / "script.py"
    script.write_text(dedent(code))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for node_rank in range(nodes):
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(tmp_path),
            "NVFL_NNODES": str(nodes),
            "NVFL_NODE_RANK": str(node_rank),
            "NVFL_MASTER_ADDR": "127.0.0.1",
            "NVFL_MASTER_PORT": str(port),
            "NVFL_RUN_ID": tmp_path.name,
        }
        command = [sys.executable, "-m", "nvflare_torchrun_plugin.torchrun_node", f"--nproc-per-node={nproc}"]
        processes.append(
            subprocess.Popen(
                [*command, str(script), *args],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * nodes, "\n".join(outputs)
        assert simulation.processes(tmp_path) == {}
    finally:
        # Of a test that has failed there may be ranks that wait for each other.
        procs.send_signal(list(simulation.processes(tmp_path)), signal.SIGKILL)
    facts = [json.loads(line.split("FACTS ")[1]) for line in "".join(outputs).splitlines() if "FACTS " in line]
    return sorted(facts, key=lambda fact: int(fact["rank"]))
