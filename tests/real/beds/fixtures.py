"""Beds for tests, one for each module that uses them; where one cannot be, the tests are skipped and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from beds.hosts import Bed
from beds.slurm import SlurmBed
from beds.ssh import SshBed


def need(kind: type[Bed]) -> None:
    if reason := kind.lacking():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def ssh_bed() -> Iterator[SshBed]:
    need(SshBed)
    with SshBed() as bed:
        yield bed


@pytest.fixture(scope="module")
def slurm_bed() -> Iterator[SlurmBed]:
    need(SlurmBed)
    with SlurmBed() as bed:
        yield bed
