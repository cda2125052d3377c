"""NVFlare's own Slurm launcher, whose nodes beside the client job's dial in for each task.

A server and a site are on the controller's host; ``nvflare deploy prepare`` has made the site's startup kit.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import job_log
import pytest
from beds.slurm import SlurmBed
from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.job_config.api import FedJob
from poc import LIMIT_S, Poc, kept_model, wait_until
from round_gate import RoundGate
from slurm_groups import pids_on

from nvflare_torchrun_plugin.job_api import TorchrunRunner
from nvflare_torchrun_plugin.node_group import NodeGroupProvider

pytestmark = pytest.mark.real

SITE = "site-1"
NODES = 3
# A stand-in: the bed has no accounting daemon, which NVFlare's launcher asks how an allocation has ended. The
# controller knows that, too, for some minutes. The launcher asks first whether anybody answers, then for one job.
SACCT = """#!/bin/sh
job=
for word; do case $word in --jobs=*) job=${word#--jobs=};; esac; done
[ "$job" ] || exit 0
said=$(scontrol --oneliner show job "$job") || exit 0
value() { printf '%s\\n' "$said" | tr ' ' '\\n' | sed -n "s/^$1=//p" | head -n 1; }
user=$(value UserId)
echo "$job|$(value JobName)|${user%(*}|$(value JobState)|$(value ExitCode)|0:0"
"""
# What README says for a site whose allocations are to outlive a node.
SBATCH = """#!/bin/sh
exec sbatch --no-kill "$@"
"""
# Rank 0 alone talks to NVFlare, and sends its result when it may; the others stay until then. The result tells how
# many took part.
TRAIN = """
    import os
    import socket
    import sys
    import time
    from pathlib import Path

    rank, folder, gated = int(os.environ["RANK"]), Path(sys.argv[1]), sys.argv[2] == "gated"
    met = folder / "met" / os.environ["TORCHELASTIC_RUN_ID"]
    met.mkdir(exist_ok=True, parents=True)
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
        while gated and not (folder / f"go-{attempt}").exists():
            time.sleep(0.02)
        over.touch()
        flare.send(flare.FLModel(params={name: v + len(there) for name, v in received.params.items()}))
    while not over.exists():
        time.sleep(0.02)
"""
AGENT = ("-m", "nvflare_torchrun_plugin.node_agent")


class LaunchedPoc(Poc):
    """A POC in the controller's host, whose site starts its client jobs by NVFlare's Slurm launcher."""

    def __init__(self, folder: Path, bed: SlurmBed) -> None:
        super().__init__(folder, (SITE,), bed["ctl"])
        self.bed = bed

    def prepare(self) -> None:
        super().prepare()
        programs = {"sacct": SACCT, "sbatch": SBATCH}
        for name, text in programs.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o700)
        environ = {"TMPDIR": self.tmp, "OMP_NUM_THREADS": 1, "SLURM_NO_KILL": "set"}
        settings = {
            "sandbox": "none",
            "python_path": sys.executable,
            # What the job writes for the other nodes begins with "python3".
            "setup": f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n"
            + "".join(f"export {name}={shlex.quote(str(value))}\n" for name, value in environ.items()),
            "executables": {name: str(self.folder / name) for name in programs},
            "parent_host": "ctl",
            "poll_interval": 1,
        }
        config = self.folder / "slurm.json"
        config.write_text(json.dumps({"runtime": "slurm", "job_launcher": settings}))
        kit = self.kits / SITE
        given = kit.rename(self.folder / "given")
        self.nvflare("deploy", "prepare", str(given), "--output", str(kit), "--config", str(config))

    def begin(self) -> None:
        """Start the server, and the site by the script of its kit."""
        self.start_server()
        log = self.folder / "site.out"
        with log.open("w") as out:
            self.bed["ctl"].popen(
                [str(self.kits / SITE / "startup" / "start_slurm.sh")],
                cwd=self.kits / SITE,
                env=self.environ,
                stdout=out,
                stderr=out,
            )
        assert wait_until(lambda: "Successfully registered client" in log.read_text(), LIMIT_S), log.read_text()
        self.services |= self.processes()

    def allocation(self, job: str) -> int:
        """The allocation that NVFlare's launcher has got for the job."""
        found: list[str] = []

        def there() -> bool:
            said = self.bed["ctl"].run(["squeue", "--noheader", "--states=all", "--format=%i %k"]).stdout
            found[:] = [line.split()[0] for line in said.splitlines() if line.endswith(f" nvfl:{job}")]
            return bool(found)

        assert wait_until(there, LIMIT_S), (self.folder / "site.out").read_text()
        (allocation,) = found
        return int(allocation)

    def wait_for_message(self, job: str, text: str) -> None:
        assert wait_until(lambda: text in self.messages_so_far(SITE, job), LIMIT_S), (
            text,
            self.messages_so_far(SITE, job)[-5000:],
        )

    def own_errors(self, job: str) -> list[str]:
        """Those of this package.

        NVFlare tells of the POC's server, which is localhost to the client job and is not there, and of its own
        acknowledgements to trainers that have ended.
        """
        package = "nvflare_torchrun_plugin"
        ours = [entry for entry in self.entries(SITE, job) if entry["fullName"].startswith(package)]
        assert ours
        return job_log.errors(ours)


@pytest.fixture(scope="module")
def running(slurm_bed: SlurmBed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedPoc]:
    running = LaunchedPoc(tmp_path_factory.mktemp("poc"), slurm_bed)
    try:
        running.prepare()
        running.begin()
        yield running
    finally:
        left = running.stop()
    assert left == {}


@pytest.fixture
def poc(running: LaunchedPoc) -> Iterator[LaunchedPoc]:
    yield running
    left = running.end_others(30)
    assert left == {}
    assert [path.name for path in running.tmp.iterdir() if path.name.startswith("nvfl")] == []


def write_job(
    folder: Path, rounds: int, *, gated: bool = False, components: Sequence[object] = (), **options: Any
) -> None:
    """Write a job as one does for a site with NVFlare's Slurm launcher; its name is the folder's."""
    folder.mkdir()
    (folder / "train.py").write_text(dedent(TRAIN))
    slurm = {"slurm": {"nodes": NODES}}
    job = FedJob(name=folder.name, min_clients=1, meta_props={"launcher_spec": {SITE: slurm}})
    persistor = job.to_server(NPModelPersistor(model=[0.0]), id="persistor")
    job.to_server(FedAvg(num_clients=1, num_rounds=rounds, persistor_id=persistor))
    for component in components:
        job.to_server(component)
    runner = TorchrunRunner(
        str(folder / "train.py"),
        [str(folder), "gated" if gated else "free"],
        nproc_per_node=1,
        framework=FrameworkType.NUMPY,
        node_group=NodeGroupProvider(nodes="auto", transport="join"),
        **options,
    )
    job.to(runner, SITE, tasks=["train"])
    job.export_job(str(folder.parent / "jobs"))


def test_three_rounds_on_three_nodes(poc: LaunchedPoc) -> None:
    write_job(poc.folder / "rounds", 3)

    job = poc.submit("jobs/rounds")
    end = poc.bed.end(poc.allocation(job), limit_s=LIMIT_S)
    printed = poc.nvflare("job", "monitor", job)
    poc.nvflare("job", "download", job)

    assert (end.state, end.exit_code) == ("COMPLETED", "0:0"), end.output[-5000:]
    assert "FINISHED:COMPLETED" in printed
    assert kept_model(poc.folder / job) == [3 * 3.0]
    said = poc.messages(SITE, job)
    assert [said.count(f"node 0 rank 0 | attempt {number} met n1, n2, n3") for number in (1, 2, 3)] == [1, 1, 1]
    assert [end.output.count(f"{rank}: nvfl join: leaving: the run ended") for rank in (1, 2)] == [1, 1]
    assert poc.own_errors(job) == []


def test_a_job_that_is_aborted_in_the_middle_of_a_round(poc: LaunchedPoc) -> None:
    write_job(poc.folder / "aborted", 3, gated=True)
    job = poc.submit("jobs/aborted")
    allocation = poc.allocation(job)
    poc.wait_for_message(job, "attempt 1 met n1, n2, n3")

    poc.nvflare("job", "abort", job, "--force")
    end = poc.bed.end(allocation, limit_s=LIMIT_S)

    # It has ended by itself: had the launcher cancelled it, it would be CANCELLED.
    assert (end.state, end.exit_code) == ("COMPLETED", "0:0"), end.output[-5000:]
    assert [end.output.count(f"{rank}: nvfl join: leaving: the run ended") for rank in (1, 2)] == [1, 1]


@pytest.fixture
def back_on(slurm_bed: SlurmBed) -> Iterator[None]:
    """Nodes that a test has switched off are there for the next one."""
    yield
    off = [node for node in slurm_bed.nodes if (node, "slurmd") not in slurm_bed.daemons]
    for node in off:
        slurm_bed.power_on(node)
    slurm_bed.wait_for("all nodes to be idle", lambda: set(slurm_bed.states(*slurm_bed.nodes)) == {"idle"}, 90)


# As NVFlare's launcher starts a job, where nobody has said --no-kill.
PLAIN = """#!/bin/sh
exec srun --nodes=3 --ntasks=3 --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 sleep 600
"""


@pytest.mark.usefixtures("back_on")
def test_nodes_that_are_lost_between_two_rounds_and_in_one(poc: LaunchedPoc) -> None:
    """The allocation outlives them, and so does the job; one without --no-kill does not."""
    folder = poc.folder / "lossy"
    gate = RoundGate(str(folder))
    options = {"nnodes": "1:3", "max_task_attempts": 2, "node_timeout": 5}
    write_job(folder, 2, gated=True, components=[gate], **options)
    plain = poc.bed.submit(PLAIN, "--nodes=3", "--ntasks=3", "--no-requeue", directory=poc.folder)
    job = poc.submit("jobs/lossy")
    allocation = poc.allocation(job)
    first = poc.kits / SITE / job / "torchrun" / "attempt-0001" / "verdict.json"

    (folder / "round-0-goes").touch()
    poc.wait_for_message(job, "attempt 1 met n1, n2, n3")
    (folder / "go-1").touch()
    assert wait_until((folder / "round-1-waits").exists, LIMIT_S)
    assert wait_until(first.exists, LIMIT_S)
    assert pids_on(poc.bed, "n3", *AGENT) == []
    assert len(pids_on(poc.bed, "n3", *AGENT, "--join")) == 1
    poc.bed.power_off("n3")
    (folder / "round-1-goes").touch()
    poc.wait_for_message(job, "attempt 2 met n1, n2")
    poc.bed.power_off("n2")
    poc.wait_for_message(job, "attempt 3 met n1")
    down = ["down*", "down*"]
    poc.bed.wait_for("Slurm to have given both up", lambda: poc.bed.states("n2", "n3") == down, LIMIT_S)
    (folder / "go-3").touch()
    end = poc.bed.end(allocation, limit_s=LIMIT_S)
    printed = poc.nvflare("job", "monitor", job)
    poc.nvflare("job", "download", job)

    assert (end.state, end.exit_code) == ("COMPLETED", "0:0"), end.output[-5000:]
    assert "FINISHED:COMPLETED" in printed
    assert kept_model(poc.folder / job) == [3 + 1]
    assert poc.bed.end(plain).state == "NODE_FAIL"
    # A host without power tidies up nothing; its TMPDIR would be its own.
    for lost in poc.tmp.glob("nvfl-agent-2-*"):
        shutil.rmtree(lost)
