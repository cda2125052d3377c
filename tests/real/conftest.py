"""What all tests with real processes share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from beds.fixtures import need, slurm_bed, ssh_bed
from beds.slurm import SlurmBed
from beds.ssh import SshBed
from simulation import Simulator, in_folder
from slurm_groups import SlurmDriver, in_allocations
from ssh_groups import SshGroups, on_bed

# In the background of a shell without job control SIGINT is ignored, and would be by all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["simulator", "slurm_bed", "ssh_bed"]


@pytest.fixture
def simulator(tmp_path: Path) -> Iterator[Simulator]:
    with in_folder(tmp_path) as simulator:
        yield simulator


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that is each host's own on the bed of ``groups``."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def groups_bed(own: Path) -> Iterator[SshBed]:
    need(SshBed)
    with SshBed(private=[str(own)]) as bed:
        yield bed


@pytest.fixture
def groups(groups_bed: SshBed, own: Path, tmp_path: Path) -> Iterator[SshGroups]:
    with on_bed(groups_bed, tmp_path, own) as groups:
        yield groups


@pytest.fixture
def driver(slurm_bed: SlurmBed, tmp_path: Path) -> Iterator[SlurmDriver]:
    with in_allocations(slurm_bed, tmp_path) as driver:
        yield driver
