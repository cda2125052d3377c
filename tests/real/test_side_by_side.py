"""Two simulators at the same time on one host, with one TMPDIR and as many ports as they need."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from simulation import finish, in_folder

pytestmark = pytest.mark.real

# Rank 0 goes on once each job has got so far: then all groups live at the same time.
MEET = """
    import os
    import sys
    import time
    from pathlib import Path

    import nvflare.client as flare
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flare.init(rank=dist.get_rank())
    received = flare.receive()
    total = torch.tensor([float(sys.argv[2])])
    if received:
        print("port", os.environ["MASTER_PORT"], flush=True)
        here = Path(sys.argv[1])
        (here / sys.argv[2]).touch()
        while len(list(here.iterdir())) < 2:
            time.sleep(0.05)
    dist.all_reduce(total)
    if received:
        flare.send(flare.FLModel(params={name: value + total.item() for name, value in received.params.items()}))
"""


def test_jobs_do_not_meet(tmp_path: Path) -> None:
    for name in ("one", "two", "here"):
        (tmp_path / name).mkdir()
    first = two_free_ports()
    with in_folder(tmp_path / "one") as one, in_folder(tmp_path / "two") as two:
        two.tmp = one.tmp
        two.environ["TMPDIR"] = one.environ["TMPDIR"]
        for number, simulator in ((1, one), (2, two)):
            simulator.sites = ("site-1",)
            simulator.write_site_file(f"nodes: 2\nmaster_port_range: [{first}, {first + 1}]\n")
            simulator.write_job(MEET, script_args=[str(tmp_path / "here"), str(number)])

        running = [simulator.start() for simulator in (one, two)]
        outputs = [finish(process) for process in running]

        ports = []
        for number, simulator, output in ((1, one, outputs[0]), (2, two, outputs[1])):
            assert "Finished FedAvg" in simulator.messages("server"), output[-5000:]
            assert simulator.model() == [2.0 * number]
            assert simulator.errors("site-1") == []
            (line,) = [entry["message"] for entry in simulator.log("site-1") if "| port " in entry["message"]]
            ports.append(int(line.split()[-1]))
        assert sorted(ports) == [first, first + 1]


def two_free_ports() -> int:
    """The first of two neighbours, away from the default range that other jobs on this host may be using."""
    for port in range(32000, 32700, 2):
        try:
            with socket.create_server(("", port)), socket.create_server(("", port + 1)):
                return port
        except OSError:
            continue
    raise AssertionError("no two free ports side by side")
