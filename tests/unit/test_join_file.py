"""Join files: who may read them, what is in them, and what is said of a wrong one."""

from __future__ import annotations

import hashlib
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin.join_file import JoinFile, JoinFileError

GOOD: dict[str, Any] = {"fingerprint": "ab" * 32, "secret": "cd" * 32, "ports": [30400, 30409]}


def make(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nvflare_torchrun_plugin.join_file", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_makes_one_for_each_side(tmp_path: Path) -> None:
    made = make(tmp_path, "--ports", "31000", "31001", "--address", "leader.svc")

    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    client, nodes = JoinFile.read(f"{tmp_path}/client.json"), JoinFile.read(f"{tmp_path}/nodes.json")
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {
        "client.json": "0o600",
        "nodes.json": "0o600",
    }
    assert (nodes.ports, nodes.address, nodes.identity) == ((31000, 31001), "leader.svc", None)
    assert (nodes.fingerprint, nodes.secret) == (client.fingerprint, client.secret)
    # The fingerprint is that of the certificate, which comes with the key that belongs to it.
    assert client.identity is not None
    certificate = client.identity[: client.identity.index("-----BEGIN PRIVATE KEY")]
    assert hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest() == client.fingerprint
    (tmp_path / "pem").write_text(client.identity)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(str(tmp_path / "pem"))


def test_no_two_are_the_same_and_none_shows_what_is_secret() -> None:
    one, other = JoinFile.make((1, 2)), JoinFile.make((1, 2))

    assert one.fingerprint != other.fingerprint
    assert one.secret != other.secret
    assert "PRIVATE" not in repr(one)
    assert one.secret.hex() not in repr(one)
    assert repr(one.secret) not in repr(one)


@pytest.mark.parametrize("ports", [("0", "5"), ("5", "4"), ("65530", "65536"), ("1", "101")])
def test_the_command_refuses_wrong_ports(tmp_path: Path, ports: tuple[str, str]) -> None:
    made = make(tmp_path, "--ports", *ports)

    assert made.returncode == 2
    assert made.stderr.endswith(
        "error: --ports must be the first and the last port, from 1 to 65535, and no more than 100 of them\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": "ab"}, "fingerprint must be"),
        ({"fingerprint": None}, "fingerprint must be"),
        ({"secret": "x" * 64}, "secret must be"),
        ({"secret": ""}, "secret must be"),
        ({"ports": [1]}, "ports must be"),
        ({"ports": [True, 5]}, "ports must be"),
        ({"ports": [9, 5]}, "ports must be"),
        (
            {"ports": [1, 65535]},
            "ports must be the first and the last port, from 1 to 65535, and no more than 100 of",
        ),
        ({"address": ""}, "address must be"),
        ({"identity": 5}, "identity must be"),
    ],
)
def test_what_is_wrong_is_named_and_not_shown(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "file"
    path.write_text(json.dumps({**GOOD, **change}))

    with pytest.raises(JoinFileError, match=f"join file {path}: {said}") as caught:
        JoinFile.read(str(path))
    assert "cdcd" not in str(caught.value)


@given(st.text(max_size=80))
def test_any_other_text_is_no_join_file(text: str) -> None:
    with pytest.raises(ValueError, match="it "):
        JoinFile.parse(text)


def test_a_file_may_have_100_ports() -> None:
    assert JoinFile.parse(json.dumps({**GOOD, "ports": [65436, 65535]})).ports == (65436, 65535)


def test_writing_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    made = JoinFile.make((5, 6))

    made.write(str(path))

    assert JoinFile.read(str(path)).secret == made.secret
    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [(0o660, "others than its owner may write it"), (0o606, "others than its owner may write it"), (0o440, None)],
)
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int, sentence: str | None) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(GOOD))
    file.chmod(mode)
    if sentence is None:
        assert JoinFile.read(str(file)).ports == (30400, 30409)
        return
    with pytest.raises(JoinFileError, match=sentence):
        JoinFile.read(str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps(GOOD))
    os.chown(file, 12345, 12345)
    with pytest.raises(JoinFileError, match="it belongs to user 12345"):
        JoinFile.read(str(file))


def test_a_pipe_in_its_place_keeps_nobody(tmp_path: Path) -> None:
    pipe = tmp_path / "nodes.json"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(JoinFileError, match="it is no regular file"):
        JoinFile.read(str(pipe))
