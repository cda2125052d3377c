"""What the two sides of a join know of each other beforehand (standard library; ``cryptography`` to make one).

The client job proves itself by a certificate, of which the nodes know the fingerprint, and the nodes by a secret.
A client job makes both anew and leaves what its nodes need in a file in the job's folder, which only this user can
read. Where there is no common folder, ``python -m nvflare_torchrun_plugin.join_file DIR`` makes two files ahead,
one for the client and one for its nodes.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import secrets
import ssl
import stat
import sys
from dataclasses import dataclass, field

NAME = ".nvfl-join.json"
"""Name of the file that a client job leaves in the job's folder."""
CLIENT_FILE = "client.json"
NODES_FILE = "nodes.json"
DEFAULT_PORTS = (30400, 30403)
"""Ports in files made beforehand: the nodes try each, all the time."""
_MAX_PORTS = 100
"""Most ports in a file: a node dials all of them, all the time."""
_PORTS_RULE = f"must be the first and the last port, from 1 to 65535, and no more than {_MAX_PORTS} of them"
_SECRET_BYTES = 32
_YEARS = 10


class JoinFileError(ValueError):
    """The file is not what it must be; one clear sentence, without anything secret."""


@dataclass(frozen=True)
class JoinFile:
    """The contents.

    Attributes:
        fingerprint: SHA-256 of the client job's certificate, in hexadecimal digits.
        secret: what the nodes prove that they know.
        ports: first and last port on which client jobs listen.
        address: of the client job's host; None: the nodes find it in their environment.
        identity: certificate and private key as PEM, in the client's own file alone.
    """

    fingerprint: str
    secret: bytes = field(repr=False)
    ports: tuple[int, int]
    address: str | None = None
    identity: str | None = field(default=None, repr=False)

    @classmethod
    def make(cls, ports: tuple[int, int], address: str | None = None) -> JoinFile:
        """Return one with a new certificate and a new secret, the client's own."""
        identity = _identity()
        return cls(_fingerprint(identity), secrets.token_bytes(_SECRET_BYTES), ports, address, identity)

    @classmethod
    def read(cls, path: str) -> JoinFile:
        """Read a file.

        Whoever can write it decides whom a node obeys, so that must be nobody but this user and root.

        Raises:
            OSError: it cannot be read.
            JoinFileError: it is none, or others may have written it; the message names it.
        """
        try:
            # A pipe in its place would keep whoever opens it without this flag.
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
                _check_owner(os.fstat(file.fileno()))
                return cls.parse(file.read())
        except ValueError as e:
            raise JoinFileError(f"join file {path}: {e}") from None

    @classmethod
    def parse(cls, text: str) -> JoinFile:
        """Return the contents of a file with this text.

        Raises:
            ValueError: it is none.
        """
        try:
            given = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError("it is no JSON") from None
        if not isinstance(given, dict):
            raise ValueError("it holds no JSON object")
        fingerprint, secret, ports = given.get("fingerprint"), given.get("secret"), given.get("ports")
        address, identity = given.get("address"), given.get("identity")
        if not (isinstance(fingerprint, str) and _is_hex(fingerprint, hashlib.sha256().digest_size)):
            raise ValueError("fingerprint must be a SHA-256 in hexadecimal digits")
        if not (isinstance(secret, str) and _is_hex(secret, _SECRET_BYTES)):
            raise ValueError(f"secret must be {_SECRET_BYTES} bytes in hexadecimal digits")
        if not (isinstance(ports, list) and len(ports) == 2 and _are_ports(*ports)):
            raise ValueError(f"ports {_PORTS_RULE}")
        if not isinstance(address, str | None) or address == "":
            raise ValueError("address must be a host name or an address")
        if not isinstance(identity, str | None):
            raise ValueError("identity must be a certificate and its key as PEM")
        return cls(fingerprint.lower(), bytes.fromhex(secret), (ports[0], ports[1]), address, identity)

    def write(self, path: str, *, identity: bool = False) -> None:
        """Write the file, which only this user can read, all of it at once.

        Args:
            path: the file.
            identity: whether it is the client's own.

        Raises:
            OSError: it cannot be written.
        """
        contents = {"fingerprint": self.fingerprint, "secret": self.secret.hex(), "ports": list(self.ports)}
        more = {"address": self.address, "identity": self.identity if identity else None}
        contents |= {key: value for key, value in more.items() if value is not None}
        new = f"{path}.{secrets.token_hex(4)}"
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                json.dump(contents, file)
            os.replace(new, path)  # noqa: PTH105 - the agents' side does without pathlib
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)  # noqa: PTH108
            raise


def _check_owner(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise ValueError(f"it belongs to user {found.st_uid}: it must belong to this user or to root")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("others than its owner may write it: chmod go-w")


def _are_ports(first: object, last: object) -> bool:
    numbers = [port for port in (first, last) if isinstance(port, int) and not isinstance(port, bool)]
    return len(numbers) == 2 and 1 <= numbers[0] <= numbers[1] <= min(65535, numbers[0] + _MAX_PORTS - 1)


def _is_hex(text: str, size: int) -> bool:
    return len(text) == 2 * size and all(digit in "0123456789abcdefABCDEF" for digit in text)


def _fingerprint(identity: str) -> str:
    end = "-----END CERTIFICATE-----"
    certificate = identity[: identity.index(end) + len(end)]
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()


def _identity() -> str:
    # NVFlare needs it, and only the client's side comes here.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nvflare-torchrun-plugin")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Nobody looks at the dates: the nodes know the certificate itself, and their clocks may differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (certificate.public_bytes(pem) + private).decode()


def main(argv: list[str]) -> int:
    """Make the two files; return the exit code."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m nvflare_torchrun_plugin.join_file",
        description=f"Makes DIR/{CLIENT_FILE}, for the client, and DIR/{NODES_FILE}, for its nodes.",
    )
    parser.add_argument("directory", metavar="DIR", help="an existing directory")
    parser.add_argument(
        "--ports",
        nargs=2,
        type=int,
        metavar=("FIRST", "LAST"),
        default=DEFAULT_PORTS,
        help="on which client jobs listen, one port per job at a time (default %(default)s)",
    )
    parser.add_argument("--address", help="of the client, where its nodes do not find it in their environment")
    given = parser.parse_args(argv)
    if not _are_ports(*given.ports):
        parser.error(f"--ports {_PORTS_RULE}")
    made = JoinFile.make(tuple(given.ports), given.address)
    try:
        made.write(f"{given.directory}/{CLIENT_FILE}", identity=True)
        made.write(f"{given.directory}/{NODES_FILE}")
    except OSError as e:
        parser.error(f"{given.directory}: {e.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
