"""Runs the job over the hosts of an ssh bed, lets the faults happen, and keeps what there was to see."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from beds.ssh import SshBed
from simulation import Simulator
from ssh_groups import GONE_S, TMP

from chaos.plan import MOST_PER_ROUND, PHASES, Fault
from nvflare_torchrun_plugin.node import procs
from nvflare_torchrun_plugin.node.agent_dir import DIR_VARIABLE

SITES: dict[str, tuple[str, ...]] = {"site-1": ("h0", "h1", "h2"), "site-2": ("h0", "h3", "h4")}
"""Each site's nodes; NVFlare's simulator, and so both client jobs, run on h0."""
HOSTS = tuple(sorted({host for hosts in SITES.values() for host in hosts}))
STEPS = {"site-1": 1.0, "site-2": 3.0}
"""What a round of a site adds to the model."""
NODE_TIMEOUT_S = 6.0
GRACE_S = 1.0
LAUNCH_TIMEOUT_S = 1200.0
"""NVFlare ends what takes longer to start, and nobody tries that again; a busy machine may need minutes."""
AGENT = ["-m", "nvflare_torchrun_plugin.node_agent"]
ROUND_LIMIT_S = 300.0
"""Seconds that a round takes at most on a busy machine, its retries included, on average."""
_POLL_S = 0.1

TRAIN = """
    import socket
    import sys
    import time

    import nvflare.client as flare
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    flare.init(rank=dist.get_rank())
    received = flare.receive()
    print("works on", socket.gethostname())
    for _ in range(15):
        time.sleep(0.2)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
    if received:
        params = {name: value + float(sys.argv[1]) for name, value in received.params.items()}
        flare.send(flare.FLModel(params=params))
    dist.destroy_process_group()
"""


@dataclass
class Attempt:
    """One group that a site has started.

    Attributes:
        site: whose it is.
        round: in which round.
        run_id: its name.
        directory: its verdict and the lines of its ranks.
        phase: the latest one that the log names.
        due: what is about to happen to it, and when.
        fault: what has happened to it.
        hits: kind and host of all that has happened at its site while it was there; the group before it may have
            been there as well, serving its result.
        away: hosts that were cut off or gone at some time while it was there.
        ended: when its verdict was there.
        survivors: what was left of it some time after that.
        checked: whether that was looked for.
    """

    site: str
    round: int
    run_id: str
    directory: Path
    phase: str = PHASES[0]
    due: tuple[Fault, float] | None = None
    fault: Fault | None = None
    hits: set[tuple[str, str]] = field(default_factory=set)
    away: set[str] = field(default_factory=set)
    ended: float | None = None
    survivors: list[str] = field(default_factory=list)
    checked: bool = False

    @property
    def accepted(self) -> bool:
        """Whether the task has its result from this group."""
        return self.phase == "finishing" or (self.ended is not None and self.verdict()["outcome"] == "ok")

    def verdict(self) -> dict[str, Any]:
        """Its verdict, once it has ended."""
        verdict: dict[str, Any] = json.loads((self.directory / "verdict.json").read_text())
        return verdict

    def hosts(self) -> set[str]:
        """Hosts on which ranks have come to train."""
        said = "\n".join(log.read_text() for log in self.directory.glob("rank-*.log"))
        return set(re.findall(r"works on (\w+)", said))


@dataclass(frozen=True)
class Process:
    """A process on a host of the bed, with its id outside."""

    pid: int
    host: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]


class Chaos:
    """One run.

    Attributes:
        attempts: all groups of all sites, in the order in which their sites' logs name them.
        pending: faults that have not happened.
        seconds: of each round.
    """

    def __init__(
        self,
        simulator: Simulator,
        bed: SshBed,
        faults: Sequence[Fault],
        rounds: int,
        tell: Callable[[str], None],
    ) -> None:
        self.simulator = simulator
        self.rounds = rounds
        self.attempts: list[Attempt] = []
        self.pending = list(faults)
        self._bed = bed
        self._tell = tell
        self._away: dict[str, tuple[float, str]] = {}
        self._rounds_of = dict.fromkeys(SITES, 0)
        self._logs = {site: Follower(simulator.workspace / site / "log.json") for site in SITES}

    def run(self) -> None:
        """Run the job to its end, whatever that is."""
        _write_job(self.simulator, self.rounds)
        folder = self.simulator.job.parent
        with (folder / "output.txt").open("w") as output:
            process = self._bed["h0"].popen(
                self.simulator.command(),
                cwd=folder,
                env=self.simulator.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + self.rounds * ROUND_LIMIT_S
        try:
            while process.poll() is None:
                assert time.monotonic() < deadline, f"the job has not ended: {folder}"
                self._look()
                time.sleep(_POLL_S)
        finally:
            for host in list(self._away):
                self._return(host)
        self._look()

    @property
    def seconds(self) -> list[float]:
        began = [
            datetime.strptime(entry["asctime"], "%Y-%m-%d %H:%M:%S,%f")
            for entry in self.simulator.log("server")
            if re.search(r"Round \d+ started|Finished FedAvg", entry["message"])
        ]
        return [(last - first).total_seconds() for first, last in pairwise(began)]

    # -- seeing ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = time.monotonic()
        for site, log in self._logs.items():
            for message in log.news():
                self._learn(site, message)
        for host, (back, _) in list(self._away.items()):
            if now >= back:
                self._return(host)
        for attempt in self.attempts:
            if attempt.ended is None:
                attempt.away |= self._away.keys() & set(SITES[attempt.site])
                if (attempt.directory / "verdict.json").exists():
                    attempt.ended = now
                else:
                    self._let_happen(attempt, now)
            elif not attempt.checked and now >= attempt.ended + _patience(attempt):
                attempt.checked = True
                attempt.survivors = [str(process) for process in self._processes() if _is_of(process, attempt)]

    def _learn(self, site: str, message: str) -> None:
        if message.startswith("got task assignment: name=train"):
            self._rounds_of[site] += 1
        elif match := re.match(r"task group (\S+): (\w+), ", message):
            run_id, phase = match.groups()
            known = [attempt for attempt in self.attempts if attempt.run_id == run_id]
            if not known:
                number = int(run_id.partition("-")[0])
                directory = self.simulator.workspace / site / "simulate_job" / "torchrun" / f"attempt-{number:04d}"
                known = [Attempt(site, self._rounds_of[site] - 1, run_id, directory)]
                self.attempts += known
            known[0].phase = phase

    def _processes(self) -> list[Process]:
        spaces = {self._bed[name].space.ids["pid"]: name for name in self._bed.names}
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                host = spaces.get((directory / "ns" / "pid").readlink())
                if host is not None:
                    argv = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                    entries = (directory / "environ").read_bytes().decode(errors="replace").split("\0")
                    environ = dict(entry.partition("=")[::2] for entry in entries)
                    found.append(Process(int(directory.name), host, tuple(argv), environ))
        return sorted(found, key=lambda process: (process.host, process.pid))

    # -- doing ----------------------------------------------------------------------------------------------

    def _let_happen(self, attempt: Attempt, now: float) -> None:
        if attempt.fault is not None:
            return
        if attempt.due is None:
            met = sum(one.fault is not None for one in self.attempts if _same_task(one, attempt))
            fault = next((one for one in self.pending if _is_for(one, attempt)), None)
            if fault is not None and met < MOST_PER_ROUND:
                attempt.due = fault, now + fault.delay
        elif now >= attempt.due[1]:
            fault = attempt.due[0]
            targets = self._targets(fault.kind, attempt)
            if not targets:
                # Another one may find something.
                self.pending.remove(fault)
                self.pending.append(fault)
                attempt.due = None
                return
            host, pid = targets[int(fault.pick * len(targets))]
            self._do(fault, host, pid)
            self.pending.remove(fault)
            attempt.fault = fault
            for one in self.attempts:
                if one.site == attempt.site and one.ended is None:
                    one.hits.add((fault.kind, host))
            self._tell(
                f"{attempt.site} round {attempt.round}, {attempt.run_id} {attempt.phase}: {fault.kind} {host}"
            )

    def _targets(self, kind: str, attempt: Attempt) -> list[tuple[str, int]]:
        """Return what can be hit, by host and process."""
        processes = self._processes()
        job = {one.pid for one in processes if attempt.site in one.argv}
        if kind == "rank":
            return [(one.host, one.pid) for one in processes if _is_of(one, attempt) and "RANK" in one.environ]
        # The agent that looks there for what is left of an earlier attempt is not this one's.
        late = [one for one in self.attempts if one.ended is not None and not one.checked]
        seen_to = {host for one in late if one.site == attempt.site for _, host in one.hits}
        # Of two agents on a host the younger one is meant.
        agents = {
            one.host: one.pid
            for one in processes
            if list(one.argv[-2:]) == AGENT
            and one.host in {*SITES[attempt.site]} - seen_to
            and (one.host != HOSTS[0] or procs.parent(one.pid) in job)
        }
        if kind == "agent":
            return list(agents.items())
        if kind == "client":
            clients = [one for one in processes if one.argv[:1] == ("ssh",) and procs.parent(one.pid) in job]
            return list({one.argv[-2]: one.pid for one in clients if one.argv[-2] not in seen_to}.items())
        return [(host, 0) for host in agents if host not in {*self._away, HOSTS[0]}]

    def _do(self, fault: Fault, host: str, pid: int) -> None:
        if fault.kind == "cable":
            self._bed.cable(host, up=False)
        elif fault.kind == "host":
            self._bed.power_off(host)
        else:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        self._away[host] = time.monotonic() + fault.away, fault.kind

    def _return(self, host: str) -> None:
        _, kind = self._away.pop(host)
        if kind == "cable":
            self._bed.cable(host, up=True)
        else:
            # What it had in memory is lost.
            self._bed[host].run(["sh", "-c", f"rm -rf {TMP}; mkdir {TMP}"])
            self._bed.power_on(host)
        self._tell(f"{host} is back")


class Follower:
    """The messages of a log of NVFlare's as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def news(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole + newline)
        return [json.loads(line)["message"] for line in whole.splitlines()]


def _patience(attempt: Attempt) -> float:
    """Seconds after its end in which nothing may be left: a host that was cut off ends its part by itself."""
    return GONE_S + (NODE_TIMEOUT_S + GRACE_S if attempt.away else 0)


def _is_of(process: Process, attempt: Attempt) -> bool:
    return f"nvfl-agent-{attempt.run_id}-" in process.environ.get(DIR_VARIABLE, "")


def _same_task(one: Attempt, other: Attempt) -> bool:
    return (one.site, one.round) == (other.site, other.round)


def _is_for(fault: Fault, attempt: Attempt) -> bool:
    reached = attempt.phase in PHASES and PHASES.index(attempt.phase) >= PHASES.index(fault.phase)
    return fault.site == attempt.site and fault.round <= attempt.round and reached


def _write_job(simulator: Simulator, rounds: int) -> None:
    """Write a job with an app for each site, which says what its nodes are."""
    simulator.sites = tuple(SITES)
    simulator.write_job(
        TRAIN,
        rounds=rounds,
        nnodes="1:3",
        max_task_attempts=2 * MOST_PER_ROUND,
        node_timeout=NODE_TIMEOUT_S,
        stop_grace_period=GRACE_S,
        launch_timeout=LAUNCH_TIMEOUT_S,
    )
    app = simulator.job / "app"
    for site, hosts in SITES.items():
        shutil.copytree(app, simulator.job / site)
        path = simulator.job / site / "config" / "config_fed_client.json"
        config = json.loads(path.read_text())
        config["executors"][0]["executor"]["args"]["script_args"] = str(STEPS[site])
        config["components"] = [
            {
                "id": "nodes",
                "path": "nvflare_torchrun_plugin.node_group.NodeGroupProvider",
                "args": {"nodes": list(hosts), "transport": "ssh"},
            }
        ]
        path.write_text(json.dumps(config))
    path = simulator.job / "meta.json"
    meta = json.loads(path.read_text())
    meta["deploy_map"] = {"app": ["server"], **{site: [site] for site in SITES}}
    path.write_text(json.dumps(meta))
