"""Hosts with names, addresses, processes and mounts of their own, all on one switch."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

LIMIT_S = 30.0
TAIL_LINES = 15

# Where each host finds the bed's directory. Mounted there, it stays in sight when /tmp is private.
INSIDE = Path("/run/bed")

# What daemons start with, and where they are looked for: nothing of the test's own environment.
ENVIRON = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

# The first process of a host. It says by which id the outside knows it, lets the kernel reap every orphan, and
# ends when the test's process does, however that happens: then its pipe is closed.
INIT = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.readlink("/proc/self"), flush=True)
sys.stdin.read()
"""

SWITCH = "ip link set lo up; ip link add bridge type bridge; ip link set bridge up"
CABLE = 'ip link add "$1" type veth peer name eth0 netns "$2"; ip link set "$1" master bridge up'
NETWORK = """
ip link set lo up
ip address add "$1/24" dev eth0
ip -6 address add "$2/64" dev eth0 nodad
ip link set eth0 up
"""
MOUNTS = f"""
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/lock {INSIDE}
mount --bind "$1" {INSIDE}
mount --bind "$1/hosts-$2" /etc/hosts
shift 2
for directory in /dev/shm "$@"; do mount -t tmpfs -o mode=1777 tmpfs "$directory"; done
"""


class BedError(Exception):
    """A bed could not do what a test asked of it; says what, and shows what the bed's daemons said."""


def script(text: str, *arguments: object) -> list[str]:
    """The argv of a shell script that stops at its first error."""
    return ["sh", "-ec", text, "sh", *map(str, arguments)]


def command_pid(process: subprocess.Popen[Any]) -> int | None:
    """The process that runs a command in a host; ``process`` itself is only its parent outside."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if children else None


class Namespaces:
    """Some namespaces and the process that holds them."""

    def __init__(self, name: str, *kinds: str) -> None:
        self.name = name
        self.holder = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", sys.executable, "-I", "-S", "-c", INIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = 0
        self.ids: dict[str, Path] = {}

    def join(self) -> None:
        """Waits until the namespaces are there, which many beside each other reach sooner than in a row."""
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        answer = self.holder.stdout.readline()
        if not answer:
            raise BedError(f"{self.name}: no namespaces: {self.holder.stderr.read().strip()}")
        self.pid = int(answer)
        for kind in ("net", "uts", "mnt", "pid", "ipc"):
            held = Path(f"/proc/{self.pid}/ns/{kind}").readlink()
            if held != Path(f"/proc/self/ns/{kind}").readlink():
                self.ids[kind] = held

    def close(self) -> None:
        """Ends every process in here; the kernel answers only when the last one is gone."""
        for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            assert pipe is not None
            pipe.close()
        try:
            self.holder.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.holder.kill()
            raise BedError(
                f"{self.name}: not all processes ended within {LIMIT_S:.0f} s: {self.inhabitants()}"
            ) from None

    def inhabitants(self) -> list[str]:
        """The processes in any of these namespaces."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if any((directory / "ns" / kind).readlink() == held for kind, held in self.ids.items()):
                    found.append(f"{directory.name} {(directory / 'comm').read_text().strip()}")
        return found


class Host:
    """One host of a bed."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.port = f"port{number}"
        self.address = f"198.18.78.{10 + number}"
        self.address6 = f"fd78::{10 + number}"
        self.space = Namespaces(name, "--net", "--uts", "--mount", "--pid", "--ipc")
        self.started: list[subprocess.Popen[Any]] = []

    def argv(self, argv: Sequence[str], cwd: str | Path | None = None) -> list[str]:
        """The command as one that this machine starts. Nothing inside outlives the end of the outer process."""
        return [
            *("nsenter", "-t", str(self.space.pid), "-m", "-u", "-i", "-n", "-p", f"--wdns={cwd or Path.cwd()}"),
            *("setpriv", "--pdeathsig", "KILL", *argv),
        ]

    def run(
        self,
        argv: Sequence[str],
        *,
        check: bool = True,
        timeout: float = LIMIT_S,
        input: str | None = None,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the host to its end and returns what it printed."""
        what = f"{self.name}: {shlex.join(argv)}"
        try:
            ended = subprocess.run(
                self.argv(argv, cwd), input=input or "", capture_output=True, text=True, timeout=timeout, env=env
            )
        except subprocess.TimeoutExpired as error:
            raise BedError(f"{what}: no end within {timeout:.0f} s\n{error.stdout!r}\n{error.stderr!r}") from None
        if check and ended.returncode:
            raise BedError(f"{what}: ended with {ended.returncode}\n{ended.stdout}{ended.stderr}")
        return ended

    def popen(self, argv: Sequence[str], *, cwd: str | Path | None = None, **how: Any) -> subprocess.Popen[str]:
        """Starts a command in the host; to signal the command itself, see ``command_pid``."""
        process = subprocess.Popen(
            self.argv(argv, cwd), text=True, **{"stdin": subprocess.DEVNULL, "start_new_session": True, **how}
        )
        self.started.append(process)
        return process


class Daemon:
    """A daemon in the foreground of a host, and its log."""

    def __init__(self, host: Host, argv: Sequence[str], log: Path) -> None:
        self.log = log
        self.name = f"{Path(argv[0]).name} on {host.name}"
        with log.open("a") as file:
            self.process = host.popen(argv, cwd="/", env=ENVIRON, stdout=file, stderr=file)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def tail(self) -> str:
        end = self.process.poll()
        state = "runs" if end is None else f"ended with {end}"
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"{self.name} {state}, its log ends with:", *(f"    {line}" for line in lines)])

    def kill(self) -> None:
        """Ends it at once, and returns when its sockets are free again."""
        if not self.ended() and (pid := command_pid(self.process)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)


class Bed:
    """Hosts by name. As a context manager it is up inside and gone without a trace after it.

    ``private`` directories are empty and each host's own; everything else but /run and /dev/shm is shared, as if
    by a network file system.
    """

    PROGRAMS: ClassVar[tuple[str, ...]] = ("unshare", "nsenter", "setpriv", "mount", "ip", "hostname")

    def __init__(self, names: Sequence[str], *, private: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.private = tuple(private)
        self.hosts: dict[str, Host] = {}
        self.daemons: dict[tuple[str, str], Daemon] = {}
        self._spaces: list[Namespaces] = []
        self._undo = ExitStack()

    @classmethod
    def lacking(cls) -> str | None:
        """Why this machine cannot have such a bed; None if it can."""
        if os.geteuid() != 0:
            return "a test bed needs root"
        if missing := [name for name in cls.PROGRAMS if not shutil.which(name, path=ENVIRON["PATH"])]:
            return f"a test bed needs {', '.join(missing)}"
        probe = ["unshare", "--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "true"]
        refused = subprocess.run(probe, capture_output=True, text=True)
        return f"a test bed needs namespaces: {refused.stderr.strip()}" if refused.returncode else None

    def __enter__(self) -> Bed:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def close(self) -> None:
        """Ends everything; an error says what could not be ended."""
        self._undo.close()

    def _start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bed-"))
        self._undo.callback(self._assert_nothing_left)
        self._undo.callback(shutil.rmtree, self.directory)
        self._switch = self._hold(Namespaces("switch", "--net"))
        for number, name in enumerate(self.names):
            self.hosts[name] = Host(name, number)
            self._undo.callback(self._reap, self.hosts[name])
            self._hold(self.hosts[name].space)
        self._switch.join()
        self._in_switch(SWITCH)
        for host in self.hosts.values():
            host.space.join()
            self._write_hosts(host)
            self._in_switch(CABLE, host.port, host.space.pid)
            host.run(["hostname", host.name])
            host.run(script(NETWORK, host.address, host.address6))
            host.run(script(MOUNTS, self.directory, host.name, *self.private))

    def _hold(self, space: Namespaces) -> Namespaces:
        self._spaces.append(space)
        self._undo.callback(space.close)
        return space

    @staticmethod
    def _reap(host: Host) -> None:
        for process in host.started:
            process.wait(LIMIT_S)

    def _in_switch(self, text: str, *arguments: object) -> None:
        command = ["nsenter", "-t", str(self._switch.pid), "-n", *script(text, *arguments)]
        subprocess.run(command, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)

    def _assert_nothing_left(self) -> None:
        left = [process for space in self._spaces for process in space.inhabitants()]
        left += [
            line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.directory) in line
        ]
        left += [str(self.directory)] if self.directory.exists() else []
        if left:
            raise BedError(f"the bed left this behind: {left}")

    def _write_hosts(self, host: Host, own: Sequence[str] = ()) -> None:
        named = {name for line in own for name in line.split()[1:]}
        lines = [*own, "127.0.0.1 localhost", "::1 localhost ip6-localhost"]
        for other in self.hosts.values():
            lines += [f"{other.address} {other.name}"] if other.name not in named else []
            lines += [f"{other.address6} {other.name}-6"]
        # The file that is mounted keeps its identity: it is written, not replaced.
        (self.directory / f"hosts-{host.name}").write_text("\n".join(lines) + "\n")

    @contextmanager
    def own_hosts(self, name: str, *lines: str) -> Iterator[None]:
        """In the host's /etc/hosts these lines are in place of what the bed says about the same names."""
        self._write_hosts(self[name], lines)
        try:
            yield
        finally:
            self._write_hosts(self[name])

    def cable(self, name: str, *, up: bool) -> None:
        """Pulled, it is a power cut as the others see it; the host's processes live on."""
        self._in_switch('ip link set "$1" "$2"', self[name].port, "up" if up else "down")

    @contextmanager
    def unplugged(self, name: str) -> Iterator[None]:
        self.cable(name, up=False)
        try:
            yield
        finally:
            self.cable(name, up=True)

    def power_off(self, name: str) -> None:
        """The host is gone at once: no process of it lives on, and nobody hears a last word of any."""
        self.cable(name, up=False)
        # All but the namespace's first process, which belongs to the bed, and the shell.
        self[name].run(["sh", "-c", "kill -KILL -1"])
        for host, program in [key for key in self.daemons if key[0] == name]:
            self.kill(host, program)

    def power_on(self, name: str) -> None:
        """The host is back; its daemons are the caller's to start."""
        self.cable(name, up=True)

    def daemon(self, name: str, *argv: str) -> Daemon:
        """Starts a daemon that stays in the foreground; ``daemons`` has it by its host and program."""
        program = Path(argv[0]).name
        daemon = Daemon(self[name], argv, self.directory / f"{program}-{name}.log")
        self.daemons[name, program] = daemon
        return daemon

    def kill(self, name: str, program: str) -> None:
        """Ends a daemon; one that ends otherwise is taken for broken."""
        self.daemons.pop((name, program)).kill()

    def wait_for(self, what: str, ready: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Waits for a condition; gives up, with the daemons' logs, when time is up or one of them has ended."""
        deadline = time.monotonic() + limit_s
        while True:
            try:
                if ready():
                    return
                reason = ""
            except BedError as error:
                reason = f": {error}"
            broken = [daemon for daemon in self.daemons.values() if daemon.ended()]
            if broken or time.monotonic() > deadline:
                tails = (daemon.tail() for daemon in broken or self.daemons.values())
                raise BedError("\n".join([f"waited for {what}, limit {limit_s:.0f} s{reason}", *tails]))
            time.sleep(0.05)
