"""A real Slurm, without accounting: a controller and nodes with stand-in GPUs."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from beds.hosts import ENVIRON, INSIDE, LIMIT_S, Bed, BedError, script

CONTROLLER = "ctl"

# Spool and state are each host's own, as with real hosts. The intervals keep a test from waiting for nothing.
SLURM_CONF = """
ClusterName=bed
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task}
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
KillWait=3
UnkillableStepTimeout=20
MinJobAge=300
SlurmctldTimeout=10
SlurmdTimeout=20
InactiveLimit=0
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation=/run/slurmctld
GresTypes=gpu
NodeName={nodes} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# Slurm looks for munge's socket in one place only, so each host has its own /run/munge.
MOUNTS = f"""
mkdir /run/munge /run/slurmd /run/slurmctld
mount --bind {INSIDE}/slurm /etc/slurm
"""
MUNGED = ("munged", "--foreground", f"--key-file={INSIDE}/munge-key", "--seed-file=/run/munge/seed")

CGROUP_CONF = """
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
"""
# Unlike all else the tree of groups is the machine's: Slurm wants its root, and names a group there after a node.
FREEZER = Path("/sys/fs/cgroup/freezer")

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}


@dataclass(frozen=True)
class JobEnd:
    """How a job ended, and what its tasks printed."""

    state: str
    exit_code: str
    output: str


class SlurmBed(Bed):
    """``ctl`` and the nodes; sbatch, srun and the like work in every host.

    Stand-in GPUs do for ``--gres``, ``--gpus-per-node`` and CUDA_VISIBLE_DEVICES; nothing computes on them.
    With ``linuxproc`` processes in sessions of their own outlive their step, the harder case. With ``cgroup`` they
    don't; that needs the freezer of version 1, and node names that no other bed has at the same time.
    With the task plugin ``affinity`` tasks are bound to cores, of which this machine must have as many as a node.
    """

    PROGRAMS: ClassVar[tuple[str, ...]] = (*Bed.PROGRAMS, "munged", "slurmctld", "slurmd", "sbatch", "scontrol")

    def __init__(
        self,
        nodes: Sequence[str] = ("n1", "n2", "n3"),
        *,
        cpus: int = 8,
        gpus: int = 2,
        proctrack: Literal["linuxproc", "cgroup"] = "linuxproc",
        task: Literal["none", "affinity"] = "none",
        private: Sequence[str] = (),
    ) -> None:
        super().__init__((CONTROLLER, *nodes), private=private)
        self.nodes = tuple(nodes)
        self._cpus = cpus
        self._gpus = gpus
        self._proctrack = proctrack
        self._task = task

    def __enter__(self) -> SlurmBed:
        super().__enter__()
        return self

    def _start(self) -> None:
        if self._proctrack == "cgroup":
            for node in self.nodes:
                self._take_group(FREEZER / f"slurm_{node}")
        super()._start()
        self._configure()
        for host in self.hosts.values():
            host.run(script(MOUNTS))
            self.daemon(host.name, *MUNGED)
        for host in self.hosts.values():
            self.wait_for(f"munged on {host.name}", lambda: self._succeeds(host.name, "munge", "-n"))  # noqa: B023
        self.daemon(CONTROLLER, "slurmctld", "-D", "-c")
        for node in self.nodes:
            self.daemon(node, "slurmd", "-D")
        self.wait_for(f"Slurm's nodes {', '.join(self.nodes)} to be idle", self._all_idle)

    def _configure(self) -> None:
        etc = self.directory / "slurm"
        etc.mkdir()
        conf = SLURM_CONF.format(
            controller=CONTROLLER,
            nodes=",".join(self.nodes),
            cpus=self._cpus,
            gpus=self._gpus,
            proctrack=self._proctrack,
            task=self._task,
        )
        (etc / "slurm.conf").write_text(conf)
        if self._proctrack == "cgroup":
            (etc / "cgroup.conf").write_text(CGROUP_CONF)
        gpus = [INSIDE / f"gpu{number}" for number in range(self._gpus)]
        (etc / "gres.conf").write_text("".join(f"Name=gpu File={gpu}\n" for gpu in gpus))
        for gpu in gpus:
            os.mknod(self.directory / gpu.name, stat.S_IFCHR | 0o666, Path("/dev/null").stat().st_rdev)
        key = self.directory / "munge-key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))

    def _take_group(self, group: Path) -> None:
        def remove() -> None:
            for directory, _, _ in os.walk(group, topdown=False):
                Path(directory).rmdir()

        try:
            group.mkdir()
        except FileExistsError:
            raise BedError(f"{group} is there already: a node of that name runs, or was left") from None
        self._undo.callback(remove)

    def _succeeds(self, name: str, *argv: str) -> bool:
        return self[name].run(argv, check=False).returncode == 0

    def _all_idle(self) -> bool:
        return self.states(*self.nodes) == ["idle"] * len(self.nodes)

    def states(self, *nodes: str) -> list[str]:
        """What the controller says about nodes, none of it while it is not there."""
        command = ["sinfo", "-h", "-N", "-o", "%T", "-n", ",".join(nodes)]
        return self[CONTROLLER].run(command, check=False).stdout.split()

    def power_on(self, name: str) -> None:
        """The node is back with its daemons; it is idle when its jobs have ended."""
        super().power_on(name)
        self.daemon(name, *MUNGED)
        self.wait_for(f"munged on {name}", lambda: self._succeeds(name, "munge", "-n"))
        self.daemon(name, "slurmd", "-D")

    def submit(self, text: str, *options: str, directory: Path, env: dict[str, str] | None = None) -> int:
        """Submits a batch script and returns the job's id; ``directory`` is its working directory."""
        answer = self[CONTROLLER].run(
            ["sbatch", "--parsable", f"--chdir={directory}", f"--output={directory}/job-%j.out", *options],
            input=text,
            env=env or ENVIRON,
        )
        return int(answer.stdout)

    def job(self, job: int) -> dict[str, str]:
        """What the controller says about a job, by its names."""
        answer = self[CONTROLLER].run(["scontrol", "--oneliner", "show", "job", str(job)])
        return dict(re.findall(r"(\S+?)=(\S*)", answer.stdout))

    def wait_for_state(self, job: int, *states: str, limit_s: float = LIMIT_S) -> str:
        """Asks again and again: ``sbatch --wait`` notices an end up to half a minute later."""

        def ready() -> bool:
            return self.job(job)["JobState"] in states

        self.wait_for(f"job {job} to be {' or '.join(states)}", ready, limit_s)
        return self.job(job)["JobState"]

    def end(self, job: int, *, limit_s: float = 2 * LIMIT_S) -> JobEnd:
        """Waits for a job's end, which is when its nodes are free again."""
        state = self.wait_for_state(job, *sorted(ENDED), limit_s=limit_s)
        said = self.job(job)
        output = Path(said["StdOut"])
        return JobEnd(state, said["ExitCode"], output.read_text() if output.exists() else "")

    def cancel(self, job: int) -> None:
        self[CONTROLLER].run(["scancel", str(job)])
