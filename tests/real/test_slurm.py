"""Node groups in a real Slurm: one step of the allocation per node, beside whatever else the job runs there."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from beds.fixtures import need
from beds.slurm import SlurmBed
from simulation import LIMIT_S as SIMULATOR_LIMIT_S
from simulation import SITES, Simulator, processes
from slurm_groups import SlurmDriver, pids_on

from nvflare_torchrun_plugin import transports

pytestmark = pytest.mark.real

THREE = ("--nodes=3", "--gpus-per-node=2")

# No torch in the ranks: three torchruns at a time are enough for a small machine.
SHOW = """
import json, os, socket, sys
from pathlib import Path

names = ("CUDA_VISIBLE_DEVICES", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_NTASKS")
facts = {name: os.environ.get(name) for name in names}
facts |= {"host": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "pid": os.getpid()}
file = Path(sys.argv[1], "rank-" + os.environ["RANK"])
file.with_suffix(".tmp").write_text(json.dumps(facts))
file.with_suffix(".tmp").rename(file)
"""
STAY = SHOW + "import signal\nsignal.pause()\n"


def test_three_nodes_are_found_and_have_all_that_is_theirs(driver: SlurmDriver) -> None:
    end = driver.run(SHOW, *THREE)

    assert (end.state, driver.verdict()["outcome"]) == ("COMPLETED", "ok"), driver.log
    ranks = driver.ranks()
    assert [rank["host"] for rank in ranks] == ["n1", "n1", "n2", "n2", "n3", "n3"]
    cores = len(os.sched_getaffinity(0))
    for number, rank in enumerate(ranks):
        assert (rank["GROUP_RANK"], rank["LOCAL_RANK"]) == (str(number // 2), str(number % 2))
        assert (rank["CUDA_VISIBLE_DEVICES"], rank["WORLD_SIZE"], rank["cores"]) == ("0,1", "6", cores)
        assert (rank["SLURM_JOB_ID"], rank["SLURM_NTASKS"]) == (ranks[0]["SLURM_JOB_ID"], None)


def test_the_client_may_be_a_step_itself_and_send_the_jobs_folder(driver: SlurmDriver) -> None:
    code = SHOW + "import helper\nassert helper.__file__ == os.path.join(os.getcwd(), 'custom', 'helper.py')\n"
    (driver.folder / "app" / "custom").mkdir(parents=True)
    (driver.folder / "app" / "custom" / "helper.py").write_text(f"TEXT = {'x' * 3_000_000!r}\n")

    end = driver.run(
        code,
        *("--nodes=3", "--ntasks-per-node=2", "--gpus-per-node=2"),
        prefix="srun --nodes=1 --ntasks=1 --nodelist=n2",
        group={"nodes": "auto", "stage": "always"},
        nproc_per_node=1,
    )

    assert (end.state, driver.verdict()["outcome"]) == ("COMPLETED", "ok"), driver.log
    # The client's own host goes first.
    assert [rank["host"] for rank in driver.ranks()] == ["n2", "n1", "n3"]


# What a step says of itself: its host, its share of it, and how many tasks it has.
STEP = 'echo "$(hostname) $SLURM_STEP_GPUS $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE $SLURM_STEP_NUM_TASKS $MINE"'
NARROWING = {
    "SLURM_TRES_PER_TASK": "gres/gpu:1",
    "SRUN_CPUS_PER_TASK": "1",
    "SLURM_EXACT": "1",
    "SLURM_EXCLUSIVE": "1",
    "SLURM_GRES": "gpu:1",
    "SLURM_STEP_GRES": "gpu:1",
    "SLURM_LABELIO": "1",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_RESV_PORTS": "2",
    "SLURM_STDINMODE": "none",
    "SLURM_STDOUTMODE": "/dev/null",
}


@pytest.mark.parametrize(
    ("options", "cores", "environ", "around"),
    [
        (("--gpus-per-node=2", "--ntasks-per-node=4", "--cpus-per-task=2"), 8, {}, ""),
        (("--gres=gpu:2", "--ntasks=3", "--mem-per-cpu=100"), 1, {}, ""),
        (("--gpus-per-node=2", "--exclusive", "--hint=nomultithread", "--distribution=cyclic"), 8, {}, ""),
        (("--gpus-per-task=1", "--ntasks=6", "--mem-per-gpu=100"), 2, {}, ""),
        (("--gpus=6", "--ntasks=6", "--ntasks-per-gpu=1"), 2, {}, ""),
        (("--gpus-per-node=2", "--cpus-per-task=4", "--export=NONE"), 4, NARROWING, ""),
        (
            ("--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=4"),
            8,
            {},
            "srun --nodes=1 --ntasks=1 --exact --label --nodelist=n1",
        ),
    ],
    ids=["tasks", "gres", "exclusive", "gpus-per-task", "gpus", "environment", "in-a-step"],
)
def test_no_option_of_the_job_narrows_a_step(
    slurm_bed: SlurmBed, tmp_path: Path, options: tuple[str, ...], cores: int, environ: dict[str, str], around: str
) -> None:
    steps = [shlex.join(transports.argv("srun", host, ["sh", "-c", STEP])) for host in ("n2", "n3")]
    inner = tmp_path / "inner"
    inner.write_text("\n".join([*(f"export {name}={value}" for name, value in environ.items()), *steps]))
    script = f"#!/bin/sh\nexport PATH={shlex.quote(os.environ['PATH'])} MINE=kept\n{around} sh {inner}\n"

    end = slurm_bed.end(slurm_bed.submit(script, "--nodes=3", *options, directory=tmp_path, env=dict(os.environ)))

    # The bed's Slurm has no task plugin and says so.
    said = [line.removeprefix("0: ") for line in end.output.splitlines() if "lacks support" not in line]
    assert said == [f"{host} 0,1 0,1 {cores} 1 kept" for host in ("n2", "n3")]


BOUND_CLIENT = "srun --nodes=1 --ntasks=1 --exact --cpus-per-task=1 --cpu-bind=cores --nodelist=m1"
CORES = "from os import *; print(uname().nodename, len(sched_getaffinity(0)), environ['CUDA_VISIBLE_DEVICES'])"


@pytest.fixture(scope="module")
def binding_bed() -> Iterator[SlurmBed]:
    """A Slurm that binds tasks to cores."""
    need(SlurmBed)
    if not {0, 1} <= os.sched_getaffinity(0):
        pytest.skip("two cores are needed to see a task bound to one")
    with SlurmBed(["m1", "m2"], cpus=2, task="affinity") as bed:
        yield bed


def test_a_client_in_a_narrow_step_does_not_narrow_its_nodes(binding_bed: SlurmBed, tmp_path: Path) -> None:
    """Its own host is one of them."""
    transport = {"m1": transports.on_own_host("srun"), "m2": "srun"}
    show = [sys.executable, "-c", CORES]
    steps = [shlex.join(transports.argv(transport[host], host, show)) for host in transport]
    (tmp_path / "inner").write_text("\n".join([shlex.join(show), *steps]))

    script = f"#!/bin/sh\n{BOUND_CLIENT} --gres=gpu:1 sh {tmp_path}/inner\n"
    options = ("--nodes=2", "--cpus-per-task=2", "--gres=gpu:2")
    end = binding_bed.end(binding_bed.submit(script, *options, directory=tmp_path))

    assert end.output.splitlines() == ["m1 1 0", "m1 2 0,1", "m2 2 0,1"]


@contextlib.contextmanager
def in_state(bed: SlurmBed, node: str, state: str) -> Iterator[None]:
    def update(wanted: str) -> int:
        command = ["scontrol", "update", f"nodename={node}", f"state={wanted}", "reason=maintenance"]
        return bed["ctl"].run(command, check=False).returncode

    assert update(state) == 0
    try:
        yield
    finally:
        # One that is down comes back by itself when its slurmd is heard of again.
        update("resume")
        bed.wait_for(f"{node} to be idle", lambda: node_state(bed, node) == "idle")


def node_state(bed: SlurmBed, node: str) -> str:
    return bed["ctl"].run(["sinfo", "--noheader", f"--nodes={node}", "--format=%T"]).stdout.strip()


def test_a_node_that_is_to_be_drained_serves_its_job_to_the_end(binding_bed: SlurmBed, tmp_path: Path) -> None:
    drained = tmp_path / "drained"
    step = shlex.join(transports.argv("srun", "m2", ["hostname"]))
    script = f"#!/bin/sh\nuntil [ -e {drained} ]; do sleep 0.1; done\n{step}\n"
    job = binding_bed.submit(script, "--nodes=2", directory=tmp_path)
    binding_bed.wait_for_state(job, "RUNNING")
    with in_state(binding_bed, "m2", "drain"):
        assert node_state(binding_bed, "m2") == "draining"
        drained.touch()
        end = binding_bed.end(job)

    assert (end.state, end.output) == ("COMPLETED", "m2\n")


def test_a_node_that_is_set_down_is_named(binding_bed: SlurmBed, tmp_path: Path) -> None:
    """With --no-kill the allocation goes on without it, and still lists it."""
    driver = SlurmDriver(binding_bed, tmp_path)
    go = tmp_path / "go"
    waiting = f"sh -c 'until [ -e {go} ]; do sleep 0.1; done; exec \"$@\"' sh"
    job = driver.submit(SHOW, "--nodes=2", "--no-kill", prefix=waiting, nproc_per_node=1)
    binding_bed.wait_for_state(job, "RUNNING")
    with in_state(binding_bed, "m2", "down"):
        go.touch()
        assert binding_bed.end(job).state == "COMPLETED"

    failure = driver.verdict()["failure"]
    assert (failure["node_rank"], failure["host"], failure["cause"]) == (1, "m2", "infrastructure")
    assert failure["what"].startswith(
        "no agent could be started there, srun ended with exit code 1: srun: error: Unable to create step"
    )
    assert driver.ranks() == []


def test_a_node_without_its_slurmd_is_named(binding_bed: SlurmBed, tmp_path: Path) -> None:
    driver = SlurmDriver(binding_bed, tmp_path)
    go = tmp_path / "go"
    waiting = f"sh -c 'until [ -e {go} ]; do sleep 0.1; done; exec \"$@\"' sh"
    job = driver.submit(SHOW, "--nodes=2", prefix=waiting, nproc_per_node=1)
    binding_bed.wait_for_state(job, "RUNNING")
    binding_bed.kill("m2", "slurmd")
    try:
        go.touch()
        assert binding_bed.end(job).state == "COMPLETED"
    finally:
        binding_bed.daemon("m2", "slurmd", "-D")

    failure = driver.verdict()["failure"]
    assert (failure["node_rank"], failure["host"], failure["rank"]) == (1, "m2", None)
    assert failure["what"].startswith("no agent could be started there, srun ended with exit code ")
    assert any("Communication connection failure" in line for line in failure["last_lines"])


def test_a_client_outside_its_allocation_says_what_to_do(driver: SlurmDriver) -> None:
    (driver.folder / "salloc").write_text(driver.script(SHOW))

    ended = driver.bed["ctl"].run(
        ["salloc", *THREE, "sh", str(driver.folder / "salloc")], cwd=driver.folder, env=driver.environ, check=False
    )

    assert ended.returncode == 1
    assert re.search(
        r": nodes is 'auto': Slurm: this host is not among the hosts 'n1, n2, n3' of the Slurm allocation \d+"
        r" \(SLURM_JOB_NODELIST=n\[1-3\]\): start the client by sbatch, or in an interactive allocation through"
        r" 'srun --pty'",
        driver.log,
    )
    assert driver.ranks() == []


def test_gpus_that_are_spread_unevenly_are_an_error(driver: SlurmDriver) -> None:
    driver.run(SHOW, "--nodes=3", "--ntasks=3", "--gpus=5")

    assert (
        ": Slurm: SLURM_GPUS is '5', but SLURM_GPUS_ON_NODE is '2': a step has to ask for its GPUs" in driver.log
    )
    assert driver.ranks() == []


@pytest.mark.parametrize("host", ["n3", "n9"])
def test_what_srun_says_is_the_nodes_message(driver: SlurmDriver, host: str) -> None:
    group = {"nodes": ["n1", host], "transport": "srun"}

    end = driver.run(SHOW, "--nodelist=n1,n2", "--nodes=2", group=group, nproc_per_node=1)

    assert end.state == "COMPLETED"
    failure = driver.verdict()["failure"]
    assert (failure["node_rank"], failure["host"], failure["rank"]) == (1, host, None)
    assert failure["what"].startswith(
        "no agent could be started there, srun ended with exit code 1: srun: error: "
    )


def step(driver: SlurmDriver, job: int, host: str) -> str:
    """The id of the job's step there; that of the batch script is no number."""
    said = driver.bed["ctl"].run(["squeue", "--steps", "--noheader", "--format=%i %N"]).stdout
    (found,) = re.findall(rf"^({job}\.\d+) {host}$", said, re.MULTILINE)
    return str(found)


def start(driver: SlurmDriver) -> tuple[int, list[dict[str, Any]]]:
    job = driver.submit(STAY, *THREE, nproc_per_node=1)
    return job, driver.wait_for_ranks(job, 3)


def failed_within(driver: SlurmDriver, job: int, limit_s: float) -> dict[str, Any]:
    began = time.monotonic()
    end = driver.bed.end(job)
    assert time.monotonic() - began < limit_s, driver.log
    assert end.state == "COMPLETED"
    verdict = driver.verdict()
    assert (verdict["outcome"], verdict["leftovers"]) == ("failed", []), verdict
    failure: dict[str, Any] = verdict["failure"]
    return failure


def test_a_step_that_is_cancelled_is_a_lost_node(driver: SlurmDriver) -> None:
    job, _ = start(driver)

    driver.bed["ctl"].run(["scancel", step(driver, job, "n2")])

    failure = failed_within(driver, job, 15)
    assert (failure["node_rank"], failure["host"]) == (1, "n2")


NOTICED = (
    """
import signal
import time
from pathlib import Path

assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
noticed = []
signal.signal(signal.SIGUSR1, lambda *_: noticed.append(True))
"""
    + SHOW
    + """
deadline = time.monotonic() + 60
while not noticed and time.monotonic() < deadline:
    time.sleep(0.02)
Path(sys.argv[1], "noticed-" + os.environ["RANK"]).write_text(str(bool(noticed)))
"""
)


def test_the_notice_of_a_scheduler_reaches_every_rank_and_ends_nothing(driver: SlurmDriver) -> None:
    """As ``sbatch --signal=USR1`` gives it, to all steps."""
    job = driver.submit(NOTICED, *THREE, nproc_per_node=1)
    driver.wait_for_ranks(job, 3)

    driver.bed["ctl"].run(["scancel", "--signal=USR1", str(job)])

    assert driver.bed.end(job).state == "COMPLETED"
    assert driver.verdict()["outcome"] == "ok", driver.log
    assert {file.name: file.read_text() for file in driver.facts.glob("noticed-*")} == {
        f"noticed-{rank}": "True" for rank in range(3)
    }


def test_a_job_that_is_cancelled_leaves_nothing_anywhere(driver: SlurmDriver) -> None:
    job, _ = start(driver)

    driver.bed.cancel(job)

    began = time.monotonic()
    assert driver.bed.end(job).state == "CANCELLED"
    while processes(driver.tmp) and time.monotonic() - began < 30:
        time.sleep(0.05)
    assert time.monotonic() - began < 10


# Each rank leaves its value and its host where all see it: that they met is torchrun's business, not a backend's.
# Rank 0 alone talks to NVFlare; the others stay until the script is told that it is over.
TRAIN = """
    import os
    import socket
    import sys
    import time
    from pathlib import Path

    rank, node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
    met = Path(sys.argv[1], os.environ["TORCHELASTIC_RUN_ID"])
    met.mkdir(exist_ok=True)
    (met / f"{rank} {rank + 1 + 10 * node} {socket.gethostname()}").touch()
    over = met / "over"
    if rank == 0:
        import nvflare.client as flare

        flare.init(rank=rank)
        while (received := flare.receive()) is not None:
            while len(there := sorted(met.iterdir())) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.02)
            total = sum(int(path.name.split()[1]) for path in there)
            print(f"met {', '.join(path.name.split()[2] for path in there)}", flush=True)
            if sys.argv[2] == "once":
                over.touch()
            flare.send(flare.FLModel(params={name: v + total for name, v in received.params.items()}))
            if sys.argv[2] == "once":
                break
        over.touch()
    while not over.exists():
        time.sleep(0.02)
    print(f"rank {rank} is done", flush=True)
"""


def test_a_job_of_the_simulator_on_the_nodes_of_the_allocation(
    slurm_bed: SlurmBed, simulator: Simulator, tmp_path: Path
) -> None:
    (tmp_path / "met").mkdir()
    simulator.sites = SITES[:1]
    args = [str(tmp_path / "met"), "once"]
    warm_start = {"preload": ["nvflare.client"]}
    simulator.write_job(TRAIN, rounds=3, script_args=args, log_ranks="all", warm_start=warm_start)
    simulator.write_site_file("nodes: auto\n")

    job = slurm_bed.submit(
        f"#!/bin/sh\nexec {shlex.join(simulator.command())}\n",
        *(*THREE, "--cpus-per-task=4"),
        directory=tmp_path,
        env=simulator.environ,
    )
    end = slurm_bed.end(job, limit_s=SIMULATOR_LIMIT_S)

    assert (end.state, simulator.model()) == ("COMPLETED", [3 * (1 + 12 + 23)]), end.output[-5000:]
    said = simulator.messages("site-1")
    assert "node group of 3 (n1 x 1, n2 x 1, n3 x 1), transport srun" in said
    assert f"Slurm allocation {job} (SLURM_JOB_NODELIST=n[1-3])" in said
    assert said.count("node 0 rank 0 | met n1, n2, n3") == 3
    assert [said.count(f"node {rank} rank {rank} | rank {rank} is done") for rank in range(3)] == [3, 3, 3]
    # The first one may come before its group is planned.
    assert said.count(": warm, ") >= 2
    assert simulator.errors("site-1") == []


NODE = """#!/bin/bash
export NVFL_NODE_RANK=$SLURM_NODEID
if [ $NVFL_NODE_RANK = 0 ]; then exec {client}; else exec {other}; fi
"""
# As NVFlare's Slurm launcher starts a job whose launcher_spec has an additional_node_command.
CONTRACT = """#!/bin/bash
export NVFL_NNODES=$SLURM_JOB_NUM_NODES NVFL_MASTER_ADDR=$SLURMD_NODENAME NVFL_RUN_ID=$SLURM_JOB_ID
export NVFL_MASTER_PORT=$((29400 + SLURM_JOB_ID % 1000))
exec srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 --label {node}
"""


def test_beside_nvflares_own_launcher(slurm_bed: SlurmBed, simulator: Simulator, tmp_path: Path) -> None:
    (tmp_path / "met").mkdir()
    simulator.sites = SITES[:1]
    args = [str(tmp_path / "met"), "loop"]
    simulator.write_job(TRAIN, rounds=2, launch_once=True, script_args=args)
    translator = [sys.executable, "-m", "nvflare_torchrun_plugin.torchrun_node", "--nproc-per-node", "1"]
    other = [*translator, str(simulator.job / "app" / "custom" / "train.py"), *args]
    node = tmp_path / "node.sh"
    node.write_text(NODE.format(client=shlex.join(simulator.command()), other=shlex.join(other)))
    node.chmod(0o700)

    job = slurm_bed.submit(
        CONTRACT.format(node=node),
        *("--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--gres=gpu:2"),
        directory=tmp_path,
        env=simulator.environ,
    )
    end = slurm_bed.end(job, limit_s=SIMULATOR_LIMIT_S)

    assert (end.state, simulator.model()) == ("COMPLETED", [2 * (1 + 12 + 23)]), end.output[-5000:]
    said = simulator.messages("site-1")
    assert "from environment of the client job (NVFL_NNODES=3)" in said
    assert said.count("node 0 rank 0 | met n1, n2, n3") == 2
    assert (end.output.count("1: rank 1 is done"), end.output.count("2: rank 2 is done")) == (1, 1)
    assert simulator.errors("site-1") == []


# Rank 0 sends its result when it may; the others stay until then. What it sends tells how many took part.
GATED = """
    import os
    import socket
    import sys
    import time
    from pathlib import Path

    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    met = folder / "met" / os.environ["TORCHELASTIC_RUN_ID"]
    met.mkdir(exist_ok=True)
    (met / f"{rank} {socket.gethostname()}").touch()
    over = met / "over"
    if rank == 0:
        import nvflare.client as flare

        flare.init(rank=rank)
        received = flare.receive()
        while len(there := sorted(met.iterdir())) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.02)
        attempt = len(list(met.parent.iterdir()))
        print(f"attempt {attempt} met {', '.join(path.name.split()[1] for path in there)}", flush=True)
        while not (folder / f"go-{attempt}").exists() and not (folder / "go-all").exists():
            time.sleep(0.02)
        over.touch()
        flare.send(flare.FLModel(params={name: v + len(there) for name, v in received.params.items()}))
    while not over.exists():
        time.sleep(0.02)
"""
LATE = "until [ -e {file} ] || [ $SLURM_NODEID != 2 ]; do sleep 0.1; done"


AGENT = (sys.executable, "-m", "nvflare_torchrun_plugin.node_agent")


def join_options(simulator: Simulator) -> list[str]:
    return ["--join", "--file", str(simulator.app("site-1") / ".nvfl-join.json")]


def submit_joining(bed: SlurmBed, simulator: Simulator, folder: Path, before: str = ":") -> int:
    """As NVFlare's launcher starts a job whose other nodes dial in, after a line of a shell's."""
    simulator.write_site_file("{nodes: auto, transport: join, join: {wait: 5}}\n")
    other = f"{before}; exec {shlex.join([*AGENT, *join_options(simulator)])}"
    node = folder / "node.sh"
    node.write_text(NODE.format(client=shlex.join(simulator.command()), other=shlex.join(["sh", "-c", other])))
    node.chmod(0o700)
    return bed.submit(
        CONTRACT.format(node=node),
        *("--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--gres=gpu:2"),
        directory=folder,
        env=simulator.environ,
    )


def test_nodes_of_nvflares_own_launcher_dial_in_for_each_task(
    slurm_bed: SlurmBed, simulator: Simulator, tmp_path: Path
) -> None:
    """One comes late, an agent is killed inside of a round, a node goes for good: the rounds are all done."""
    (tmp_path / "met").mkdir()
    simulator.sites = SITES[:1]
    simulator.write_job(
        GATED, rounds=3, nnodes="2:3", max_task_attempts=3, node_timeout=10, script_args=[str(tmp_path)]
    )
    job = submit_joining(slurm_bed, simulator, tmp_path, LATE.format(file=tmp_path / "late"))

    def wait_for(text: str) -> None:
        log = simulator.workspace / "site-1" / "log.txt"

        def ready() -> bool:
            assert slurm_bed.job(job)["JobState"] in ("PENDING", "RUNNING"), simulator.messages("site-1")
            return log.exists() and text in log.read_text()

        slurm_bed.wait_for(text, ready, SIMULATOR_LIMIT_S)

    wait_for("attempt 1 met n1, n2")
    (tmp_path / "late").touch()
    wait_for("node-rank-2 has joined: host n3")
    (tmp_path / "go-1").touch()
    wait_for("attempt 2 met n1, n2, n3")
    (killed,) = pids_on(slurm_bed, "n3", *AGENT)
    os.kill(killed, signal.SIGKILL)
    wait_for("attempt 3 met n1, n2")
    (tmp_path / "go-3").touch()
    wait_for("attempt 4 met n1, n2")
    (dialler,) = pids_on(slurm_bed, "n2", *join_options(simulator))
    os.kill(dialler, signal.SIGTERM)
    wait_for(" met n1, n3")
    (tmp_path / "go-all").touch()
    end = slurm_bed.end(job, limit_s=SIMULATOR_LIMIT_S)

    assert (end.state, end.exit_code, simulator.model()) == ("COMPLETED", "0:0", [2 + 2 + 2]), end.output[-5000:]
    said = simulator.messages("site-1")
    assert "nodes 'auto': environment of the client job (NVFL_NNODES=3)" in said
    assert (
        "node-rank-2: no agent could be started there, join ended with exit code 1: node rank 2 is absent" in said
    )
    assert re.search(
        r"group failed: node 2 \(node-rank-2\): its agent \(or join, which connects it\) ended with exit code 137",
        said,
    )
    assert "1: nvfl join: leaving: got SIGTERM" in end.output
    assert "2: nvfl join: leaving: the run ended" in end.output
    assert not (simulator.app("site-1") / ".nvfl-join.json").exists()


def test_a_group_of_nodes_that_dial_in_is_started_ahead(
    slurm_bed: SlurmBed, simulator: Simulator, tmp_path: Path
) -> None:
    """Then each node has two agents at a time."""
    (tmp_path / "met").mkdir()
    simulator.sites = SITES[:1]
    simulator.write_job(TRAIN, rounds=2, warm_start=True, script_args=[str(tmp_path / "met"), "once"])

    end = slurm_bed.end(submit_joining(slurm_bed, simulator, tmp_path), limit_s=SIMULATOR_LIMIT_S)

    assert (end.state, end.exit_code) == ("COMPLETED", "0:0"), end.output[-5000:]
    assert simulator.model() == [2 * (1 + 12 + 23)]
    said = simulator.messages("site-1")
    assert said.count("node 0 rank 0 | met n1, n2, n3") == 2
    assert len(re.findall(r"task group [12]-\w+: warm, ", said)) == 2
    assert simulator.errors("site-1") == []
