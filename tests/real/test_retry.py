"""Tasks that go on though an attempt has failed, in the simulator: the server sees one task each time."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from simulation import Simulator, finish

pytestmark = pytest.mark.real

# Adds the world size to the model. In the first attempt one rank does as it is told, once rank 0 has its model.
TRAIN = """
    import os
    import pathlib
    import sys
    import time

    import nvflare.client as flare
    import torch.distributed as dist

    folder, how, who = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    flare.init(rank=dist.get_rank())
    received = flare.receive()
    dist.barrier()
    if dist.get_rank() == who and not (folder / "failed").exists():
        (folder / "failed").write_text(str(os.getpid()))
        print("fails", flush=True)
        exec(how)
    dist.barrier()
    if received:
        params = {name: value + dist.get_world_size() for name, value in received.params.items()}
        flare.send(flare.FLModel(params=params))
"""
KILLED = "os.kill(os.getpid(), 9)"
RAISES = "raise ValueError('bad day')"
HANGS = "time.sleep(600)"

# Stands for a node that cannot be reached as long as the file is there.
INTERPRETER = f"""#!/bin/sh
echo >> "{{folder}}/tries"
[ ! -e "{{folder}}/down" ] || {{{{ echo no route to host >&2; exit 255; }}}}
exec {sys.executable} "$@"
"""


@pytest.fixture
def one_site(simulator: Simulator) -> Simulator:
    simulator.sites = ("site-1",)
    return simulator


def node_1(simulator: Simulator, folder: Path) -> None:
    """The site has two nodes, and the second one's interpreter does as the files in the folder say."""
    interpreter = folder / "python"
    interpreter.write_text(INTERPRETER.format(folder=folder))
    interpreter.chmod(0o755)
    simulator.write_site_file(f"nodes: [localhost, {{host: 127.0.0.1, python: {interpreter}}}]\n")


def test_a_rank_killed_from_outside_costs_an_attempt_and_not_the_round(
    one_site: Simulator, tmp_path: Path
) -> None:
    one_site.write_job(TRAIN, nodes=2, rounds=2, script_args=[str(tmp_path), KILLED, "1"], max_task_attempts=2)

    one_site.run()

    assert one_site.model() == [4.0]
    said = one_site.messages("site-1")
    assert "rank 1 (local rank 0): SIGKILL" in said
    assert said.count("task 'train': attempt 2 begins") == 1
    assert "Finished FedAvg" in one_site.messages("server")


def test_a_rank_0_that_falls_silent_costs_an_attempt_and_not_the_round(
    one_site: Simulator, tmp_path: Path
) -> None:
    """NVFlare's own watch over it tells first here, for its agent waits for node_timeout."""
    args = [str(tmp_path), HANGS, "0"]
    one_site.write_job(
        TRAIN, nodes=2, script_args=args, max_task_attempts=2, heartbeat_interval=1, heartbeat_timeout=5
    )
    running = one_site.start()
    one_site.wait_for_message("site-1", "rank 0 | fails")
    # Before that NVFlare waits for its answer to the task, without end.
    one_site.wait_for_message("site-1", "waiting for result from external trainer")

    os.kill(int((tmp_path / "failed").read_text()), signal.SIGSTOP)
    finish(running)

    assert one_site.model() == [2.0]
    said = one_site.messages("site-1")
    (error,) = [error for error in one_site.errors("site-1") if "group failed" in error]
    blame = r"node 0 \(.+\) rank 0 \(local rank 0\): NVFlare gave up on it: trainer heartbeat timed out after"
    assert re.search(blame, error)
    # NVFlare's own lines, of a first greeting that came too early, may be before it.
    assert re.search(r"last lines:\n(    .*\n)*    fails\n", error)
    assert "torchrun/attempt-0001/rank-0.log\n  stopped because of it: rank 1" in error
    assert said.count("task 'train': attempt 2 begins") == 1
    assert "Finished FedAvg" in one_site.messages("server")


def test_the_script_s_own_exception_is_not_tried_again(one_site: Simulator, tmp_path: Path) -> None:
    one_site.write_job(TRAIN, nodes=2, script_args=[str(tmp_path), RAISES, "1"], max_task_attempts=3)

    one_site.run()

    said = one_site.messages("site-1")
    assert "ValueError: bad day" in said
    assert "begins" not in said
    heard = one_site.messages("server")
    assert "Finished FedAvg" not in heard
    assert "EXECUTION_EXCEPTION" in heard


def test_an_unreachable_node_is_tried_three_times_and_costs_no_attempt(
    one_site: Simulator, tmp_path: Path
) -> None:
    node_1(one_site, tmp_path)
    (tmp_path / "down").touch()
    one_site.write_job(TRAIN, script_args=[str(tmp_path), KILLED, "1"])

    one_site.run()

    assert (tmp_path / "tries").read_text().count("\n") == 3
    assert not (tmp_path / "failed").exists()
    errors = [error for error in one_site.errors("site-1") if "no route to host" in error]
    assert len(errors) == 3
    assert "node 1 (127.0.0.1): no agent could be started there, python ended with exit code 255" in errors[0]
    # The server's controllers can tell it from a fault of the script.
    heard = one_site.messages("server")
    assert "EXECUTION_RESULT_ERROR" in heard
    assert "EXECUTION_EXCEPTION" not in heard


def test_an_elastic_group_trains_on_what_is_well(one_site: Simulator, tmp_path: Path) -> None:
    node_1(one_site, tmp_path)
    (tmp_path / "down").touch()
    one_site.write_job(TRAIN, script_args=[str(tmp_path), KILLED, "1"], nnodes="1:2", rounds=2)

    one_site.run()

    # Two rounds with one node; in the second one the other sits out.
    assert one_site.model() == [2.0]
    assert (tmp_path / "tries").read_text().count("\n") == 1
    said = one_site.messages("site-1")
    assert "group of 1 nodes: localhost; without 127.0.0.1: no agent could be started there" in said
    assert re.search(
        r"node 127\.0\.0\.1 sits out for \d+ s more, for it has failed: no agent could be started", said
    )
    assert one_site.errors("site-1") == []
