"""The beds themselves: hosts that differ where hosts do, faults that are felt, and no trace afterwards."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from beds.fixtures import need
from beds.hosts import Bed, BedError, command_pid
from beds.slurm import FREEZER, SlurmBed
from beds.ssh import SshBed
from simulation import processes, the_one

pytestmark = pytest.mark.real

LIMIT_S = 10.0

LISTEN = """
import socket
with socket.create_server(("", 5000), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as client:
            client.sendall(socket.gethostname().encode())
"""
CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=1.0) as client:
    print(client.recv(100).decode())
"""

# In the background, in a session of its own, and with nobody to wait for it.
DAEMONIZED = "setsid sleep 300 </dev/null >/dev/null 2>&1 &"


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    need(Bed)
    with Bed(["h0", "h1"]) as bed:
        yield bed


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


def this_machine() -> dict[str, object]:
    """What a bed might leave in the namespaces that it was started from."""
    return {
        "children": descendants(os.getpid()),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "links": subprocess.run(["ip", "-o", "address"], capture_output=True, check=True).stdout,
        "netns": subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout,
        "host name": os.uname().nodename,
        "/etc/hosts": Path("/etc/hosts").read_text(),
        "/run": sorted(path.name for path in Path("/run").iterdir()),
        "shared memory": sorted(path.name for path in Path("/dev/shm").iterdir()),
    }


def ended_within(pids: set[int], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while left := {pid for pid in pids if Path(f"/proc/{pid}").exists()}:
        if time.monotonic() > deadline:
            pytest.fail(f"processes {left} are still there after {limit_s} s")
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("kind", [Bed, SshBed, SlurmBed])
def test_a_closed_bed_leaves_nothing(kind: type[Bed]) -> None:
    need(kind)
    before = this_machine()
    with kind(["h0", "h1"]) as bed:
        bed["h1"].run(["sh", "-c", DAEMONIZED])
        bed.wait_for("the orphan", lambda: "sleep" in " ".join(bed["h1"].space.inhabitants()))
        inside = descendants(os.getpid())
    assert not bed.directory.exists()
    assert ended_within(inside, 0.0)
    assert this_machine() == before


def test_a_bed_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    need(Bed)
    before = this_machine()
    monkeypatch.setattr("beds.hosts.NETWORK", "echo no network today >&2; exit 3")
    bed = Bed(["h0", "h1"])
    with pytest.raises(BedError, match=r"(?s)^h0: .* ended with 3\nno network today\n$"), bed:
        pytest.fail("it is up")
    assert not bed.directory.exists()
    assert this_machine() == before


def test_a_host_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    need(Bed)
    maker = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import signal\nfrom beds.hosts import Bed\n"
            "with Bed(['h0']) as bed:\n"
            "    bed['h0'].popen(['sleep', '300'])\n"
            "    print('up', flush=True)\n"
            "    signal.pause()\n",
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(tmp_path)},
    )
    with maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"up\n"
        processes = descendants(maker.pid)
        maker.kill()
    assert maker.returncode == -signal.SIGKILL
    assert ended_within(processes, LIMIT_S)


def test_a_machine_that_cannot_have_a_bed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert SlurmBed.lacking() == "a test bed needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(SlurmBed, "PROGRAMS", ("sh", "no-such-daemon", "nor-this"))
    assert SlurmBed.lacking() == "a test bed needs no-such-daemon, nor-this"


def test_hosts_have_names_processes_and_shared_memory_of_their_own(bed: Bed) -> None:
    assert bed["h1"].run(["hostname"]).stdout == "h1\n"
    assert bed["h1"].run(["ps", "-o", "pid=", "-p", "1"]).stdout.strip() == "1"
    sleeper = bed["h0"].popen(["sleep", "300"])
    assert bed["h1"].run(["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout.count("sleep") == 0
    bed["h0"].run(["touch", "/dev/shm/mine", "/run/mine"])
    assert "mine" not in bed["h1"].run(["ls", "/dev/shm", "/run"]).stdout
    sleeper.kill()
    sleeper.wait(LIMIT_S)


def test_the_end_of_the_outer_process_ends_the_command(bed: Bed) -> None:
    outer = bed["h0"].popen(["sh", "-c", "echo up; exec sleep 300"], stdout=subprocess.PIPE)
    assert outer.stdout is not None
    assert outer.stdout.readline() == "up\n"
    inner = command_pid(outer)
    assert inner is not None
    outer.kill()
    outer.communicate(timeout=LIMIT_S)
    assert ended_within({inner}, LIMIT_S)


def test_orphans_are_reaped(bed: Bed) -> None:
    bed["h0"].run(["sh", "-c", "sh -c 'sleep 0.1 &'"])
    holder = bed["h0"].space.pid
    bed.wait_for("no child of the host's first process", lambda: not descendants(holder), LIMIT_S)


def test_a_private_directory_is_each_hosts_own(tmp_path: Path) -> None:
    need(Bed)
    (tmp_path / "shared").touch()
    private = tmp_path / "private"
    private.mkdir()
    (private / "outside").touch()
    with Bed(["h0", "h1"], private=[str(private)]) as bed:
        bed["h0"].run(["touch", str(private / "mine")])
        assert bed["h0"].run(["ls"], cwd=private).stdout == "mine\n"
        assert bed["h1"].run(["ls"], cwd=private).stdout == ""
        assert bed["h1"].run(["ls"], cwd=tmp_path).stdout == "private\nshared\n"
    assert list(private.iterdir()) == [private / "outside"]


def test_a_pulled_cable_is_felt_and_the_host_lives_on(bed: Bed) -> None:
    server = bed["h1"].popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    for address in ("h1", "h1-6", bed["h1"].address, bed["h1"].address6):
        assert bed["h0"].run([sys.executable, "-c", CONNECT, address]).stdout == "h1\n"
    with bed.unplugged("h1"):
        for address in ("h1", "h1-6"):
            lost = bed["h0"].run([sys.executable, "-c", CONNECT, address], check=False)
            assert lost.returncode == 1
            assert lost.stderr.endswith("TimeoutError: timed out\n")
        assert server.poll() is None
    assert bed["h0"].run([sys.executable, "-c", CONNECT, "h1"]).stdout == "h1\n"
    server.kill()
    server.communicate(timeout=LIMIT_S)


def test_beds_beside_each_other_do_not_meet(bed: Bed) -> None:
    server = bed["h1"].popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    with Bed(["h0", "h1"]) as other:
        refused = other["h0"].run([sys.executable, "-c", CONNECT, "h1"], check=False)
        assert refused.stderr.endswith("ConnectionRefusedError: [Errno 111] Connection refused\n")
    assert bed["h0"].run([sys.executable, "-c", CONNECT, "h1"]).stdout == "h1\n"
    server.kill()
    server.communicate(timeout=LIMIT_S)


def test_a_host_may_take_its_own_name_for_a_loopback_address(bed: Bed) -> None:
    def address(host: str) -> str:
        return bed[host].run([sys.executable, "-c", "import socket; print(socket.gethostbyname('h1'))"]).stdout

    with bed.own_hosts("h1", "127.0.1.1 h1"):
        assert address("h1") == "127.0.1.1\n"
        assert address("h0") == f"{bed['h1'].address}\n"
    assert address("h1") == f"{bed['h1'].address}\n"


def test_what_was_waited_for_is_named_with_the_logs(bed: Bed) -> None:
    bed.daemon("h0", "sh", "-c", "echo cannot bind; exec sleep 300")
    bed.wait_for("the log", lambda: "cannot bind" in bed.daemons["h0", "sh"].tail())
    with pytest.raises(BedError) as late:
        bed.wait_for("rain", lambda: False, 0.1)
    assert str(late.value) == "waited for rain, limit 0 s\nsh on h0 runs, its log ends with:\n    cannot bind"
    bed.kill("h0", "sh")

    bed.daemon("h1", "sh", "-c", "echo no key; exit 7")
    began = time.monotonic()
    with pytest.raises(BedError) as broken:
        bed.wait_for("rain", lambda: False)
    assert (
        str(broken.value) == "waited for rain, limit 30 s\nsh on h1 ended with 7, its log ends with:\n    no key"
    )
    assert time.monotonic() - began < LIMIT_S
    bed.kill("h1", "sh")


def test_a_command_that_fails_or_takes_too_long_is_named(bed: Bed) -> None:
    with pytest.raises(BedError) as failed:
        bed["h1"].run(["sh", "-c", "echo out; echo err >&2; exit 4"])
    assert str(failed.value) == "h1: sh -c 'echo out; echo err >&2; exit 4': ended with 4\nout\nerr\n"
    with pytest.raises(BedError, match=r"^h1: sleep 300: no end within 0 s\n"):
        bed["h1"].run(["sleep", "300"], timeout=0.2)


def ssh(bed: SshBed, name: str, command: str = "hostname") -> subprocess.CompletedProcess[str]:
    return bed["h0"].run(["ssh", "-o", "ConnectTimeout=1", name, command], check=False)


def test_ssh_reaches_every_host_without_a_question(ssh_bed: SshBed) -> None:
    for name in ssh_bed.names:
        for address in (name, f"{name}-6"):
            answer = ssh(ssh_bed, address)
            assert (answer.returncode, answer.stdout, answer.stderr) == (0, f"{name}\n", "")
    assert ssh_bed["h2"].run(["ssh", "h1", "ssh h0 hostname"]).stdout == "h0\n"


def test_a_refused_key(ssh_bed: SshBed) -> None:
    with ssh_bed.key_refused("h1"):
        refused = ssh(ssh_bed, "h1")
        assert (refused.returncode, refused.stdout) == (255, "")
        assert refused.stderr == "root@h1: Permission denied (publickey).\n"
        assert ssh(ssh_bed, "h2").stdout == "h2\n"
    assert ssh(ssh_bed, "h1").stdout == "h1\n"


def test_a_changed_host_key(ssh_bed: SshBed) -> None:
    with ssh_bed.host_key_changed("h1"):
        refused = ssh(ssh_bed, "h1")
        assert (refused.returncode, refused.stdout) == (255, "")
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
        assert ssh(ssh_bed, "h2").stdout == "h2\n"
    assert ssh(ssh_bed, "h1").stdout == "h1\n"


def test_a_noisy_login_shell(ssh_bed: SshBed) -> None:
    with ssh_bed.login_shell("h1", "echo Welcome; echo 'stty: no terminal' >&2"):
        noisy = ssh(ssh_bed, "h1")
        assert (noisy.returncode, noisy.stdout, noisy.stderr) == (0, "Welcome\nh1\n", "stty: no terminal\n")
        assert ssh(ssh_bed, "h2").stdout == "h2\n"
    assert ssh(ssh_bed, "h1").stdout == "h1\n"


def test_an_unreachable_host(ssh_bed: SshBed) -> None:
    with ssh_bed.unplugged("h1"):
        lost = ssh(ssh_bed, "h1")
        assert (lost.returncode, lost.stdout) == (255, "")
        assert lost.stderr == "ssh: connect to host h1 port 22: Connection timed out\n"
    assert ssh(ssh_bed, "h1").stdout == "h1\n"


def test_a_host_without_power_is_gone_until_it_is_back(ssh_bed: SshBed) -> None:
    ssh(ssh_bed, "h1", DAEMONIZED)
    client = ssh_bed["h0"].popen(["ssh", "h1", "echo up; sleep 300"], stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == "up\n"
    holder = ssh_bed["h1"].space.pid

    ssh_bed.power_off("h1")

    ssh_bed.wait_for("no process on it but the bed's own", lambda: not descendants(holder), LIMIT_S)
    assert client.poll() is None
    assert ssh(ssh_bed, "h1").stderr == "ssh: connect to host h1 port 22: Connection timed out\n"
    ssh_bed.power_on("h1")
    assert ssh(ssh_bed, "h1").stdout == "h1\n"
    client.kill()
    client.communicate(timeout=LIMIT_S)


def test_a_slurm_job_has_three_hosts_with_gpus(slurm_bed: SlurmBed, tmp_path: Path) -> None:
    job = slurm_bed.submit(
        "#!/bin/sh\nsrun sh -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES'\n",
        *("--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=2"),
        directory=tmp_path,
    )
    end = slurm_bed.end(job)
    assert (end.state, end.exit_code) == ("COMPLETED", "0:0")
    assert sorted(end.output.splitlines()) == ["n1 0,1", "n2 0,1", "n3 0,1"]


def test_a_slurm_job_can_fail_and_be_cancelled(slurm_bed: SlurmBed, tmp_path: Path) -> None:
    failing = slurm_bed.submit("#!/bin/sh\necho bad >&2\nexit 3\n", directory=tmp_path)
    end = slurm_bed.end(failing)
    assert (end.state, end.exit_code, end.output) == ("FAILED", "3:0", "bad\n")

    endless = slurm_bed.submit("#!/bin/sh\nsrun sleep 300\n", "--nodes=2", directory=tmp_path)
    assert slurm_bed.wait_for_state(endless, "RUNNING") == "RUNNING"
    slurm_bed.cancel(endless)
    assert slurm_bed.end(endless).state == "CANCELLED"


@pytest.mark.parametrize(("proctrack", "left"), [("linuxproc", True), ("cgroup", False)])
def test_what_outlives_a_slurm_step(proctrack: Literal["linuxproc", "cgroup"], left: bool, tmp_path: Path) -> None:
    need(SlurmBed)
    if proctrack == "cgroup" and not os.access(FREEZER / "tasks", os.W_OK):
        pytest.skip("Slurm's cgroup tracking needs the freezer of cgroup version 1")
    before = sorted(path.name for path in FREEZER.glob("*"))
    with SlurmBed(["step"], proctrack=proctrack) as bed:
        job = bed.submit(f"#!/bin/sh\nsrun sh -c {shlex.quote(DAEMONIZED + ' sleep 1')}\n", directory=tmp_path)
        assert bed.end(job).state == "COMPLETED"
        assert ("sleep" in " ".join(bed["step"].space.inhabitants())) is left
        if proctrack == "cgroup":
            with (
                pytest.raises(BedError, match="slurm_step is there already"),
                SlurmBed(["step"], proctrack="cgroup"),
            ):
                pytest.fail("two nodes in one group")
    assert sorted(path.name for path in FREEZER.glob("*")) == before


def test_a_child_that_has_just_been_forked_is_not_taken_for_its_parent(tmp_path: Path) -> None:
    code = "import os, sys; os.fork(); print(end='.', flush=True); sys.stdin.read()"
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as forking:
        assert forking.stdin is not None
        assert forking.stdout is not None
        assert forking.stdout.read(2) == b".."
        found = processes(tmp_path)
        assert len(found) == 2
        assert the_one(found, "os.fork()") == forking.pid
        forking.stdin.close()
        # Both have gone when it is closed on all sides.
        assert forking.stdout.read() == b""
    assert the_one(processes(tmp_path), "os.fork()") is None
