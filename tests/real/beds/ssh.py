"""Hosts that reach each other by ssh as root: a real sshd each, keys, no prompts, and ways to spoil it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from beds.hosts import INSIDE, LIMIT_S, Bed, script

SSHD_CONFIG = f"""
Port 22
HostKey {INSIDE}/host-key-{{name}}
AuthorizedKeysFile {INSIDE}/authorized-keys-{{name}}
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
MaxStartups 100
AcceptEnv LANG LC_*
"""

SSH_CONFIG = f"""
Host *
  User root
  BatchMode yes
  IdentityFile {INSIDE}/id
  IdentitiesOnly yes
  StrictHostKeyChecking yes
  UserKnownHostsFile {INSIDE}/known-hosts
  GlobalKnownHostsFile /dev/null
  ConnectTimeout 5
  LogLevel ERROR
"""

# What root has set up on this machine, for ssh or in the start-up files of a shell, is none of a test's business.
MOUNTS = f"""
mkdir /run/sshd
mount --bind {INSIDE}/ssh-config /etc/ssh/ssh_config
mount --bind {INSIDE}/passwd-$1 /etc/passwd
chmod 755 {INSIDE}/shell-$1
if [ -d ~/.ssh ]; then mount -t tmpfs tmpfs ~/.ssh; fi
"""


class SshBed(Bed):
    """In every host plain ``ssh NAME command`` works, for its own name too."""

    PROGRAMS: ClassVar[tuple[str, ...]] = (*Bed.PROGRAMS, "sshd", "ssh", "ssh-keygen")

    def __init__(self, names: Sequence[str] = ("h0", "h1", "h2"), *, private: Sequence[str] = ()) -> None:
        super().__init__(names, private=private)

    def __enter__(self) -> SshBed:
        super().__enter__()
        return self

    def _start(self) -> None:
        super()._start()
        (self.directory / "ssh-config").write_text(SSH_CONFIG)
        self._new_key(self.directory / "id")
        known = []
        for host in self.hosts.values():
            self._new_key(self.directory / f"host-key-{host.name}")
            key = (self.directory / f"host-key-{host.name}.pub").read_text()
            known.append(f"{host.name},{host.name}-6,{host.address},{host.address6} {key}")
            shutil.copy(self.directory / "id.pub", self.directory / f"authorized-keys-{host.name}")
            (self.directory / f"sshd-config-{host.name}").write_text(SSHD_CONFIG.format(name=host.name))
            self._write_shell(host.name)
            self._write_passwd(host.name)
        (self.directory / "known-hosts").write_text("".join(known))
        for host in self.hosts.values():
            host.run(script(MOUNTS, host.name))
            self._start_sshd(host.name)
        for host in self.hosts.values():
            self._wait_for_sshd(host.name)

    @staticmethod
    def _new_key(path: Path) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
        subprocess.run(command, check=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)

    def _start_sshd(self, name: str) -> None:
        program = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
        assert program is not None  # sshd starts itself anew for each client and wants its full path for that
        self.daemon(name, program, "-D", "-e", "-f", f"{INSIDE}/sshd-config-{name}")

    def _wait_for_sshd(self, name: str) -> None:
        listening = ["ss", "-Hltn", "sport = :22"]
        self.wait_for(f"sshd on {name} to listen", lambda: bool(self[name].run(listening).stdout))

    def power_on(self, name: str) -> None:
        super().power_on(name)
        self._start_sshd(name)
        self._wait_for_sshd(name)

    @contextmanager
    def key_refused(self, name: str) -> Iterator[None]:
        """The host lets nobody in."""
        accepted = self.directory / f"authorized-keys-{name}"
        keys = accepted.read_text()
        accepted.write_text("")
        try:
            yield
        finally:
            accepted.write_text(keys)

    @contextmanager
    def host_key_changed(self, name: str) -> Iterator[None]:
        """The host has another key than the one its clients know, as after a new installation."""
        key = self.directory / f"host-key-{name}"
        known = key.read_bytes()
        with tempfile.TemporaryDirectory(dir=self.directory) as directory:
            self._new_key(Path(directory, "key"))
            key.write_bytes(Path(directory, "key").read_bytes())
        self._restart_sshd(name)
        try:
            yield
        finally:
            key.write_bytes(known)
            self._restart_sshd(name)

    def _restart_sshd(self, name: str) -> None:
        self.kill(name, "sshd")
        self._start_sshd(name)
        self._wait_for_sshd(name)

    @contextmanager
    def login_shell(self, name: str, lines: str) -> Iterator[None]:
        """root's login shell in the host runs these lines before each command, as start-up files do."""
        self._write_shell(name, lines)
        try:
            yield
        finally:
            self._write_shell(name)

    def _write_shell(self, name: str, lines: str = "") -> None:
        (self.directory / f"shell-{name}").write_text(f'#!/bin/sh\n{lines}\nexec /bin/sh "$@"\n')

    def _write_passwd(self, name: str) -> None:
        shell = f"{INSIDE}/shell-{name}"
        users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
        lines = [":".join([*user[:-1], shell] if user[0] == "root" else user) for user in users]
        (self.directory / f"passwd-{name}").write_text("\n".join(lines) + "\n")
