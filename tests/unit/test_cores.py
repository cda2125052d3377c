from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvflare_torchrun_plugin.node.cores import allotted_cores, count_processes


def lay_out(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("files", "cores"),
    [
        pytest.param({}, 16, id="no cgroups"),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"},
            16,
            id="v2 no limit",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "400000 100000\n"}, 4, id="v2"
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"},
            2,
            id="rounded up",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "1000 100000\n"},
            1,
            id="at least 1",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "6400000 100000\n"},
            16,
            id="v2 wide",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b/c\n",
                "sys/fs/cgroup/a/b/c/cpu.max": "max 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "150000 50000\n",
                "sys/fs/cgroup/other/cpu.max": "100000 100000\n",
            },
            3,
            id="v2 the tightest parent",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2,
            id="v2 path of the host, seen in a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../../up\n",
                "sys/fs/cgroup/cpu.max": "500000 100000\n",
                "sys/up/cpu.max": "100000 100000\n",
                "sys/fs/cpu.max": "100000 100000\n",
            },
            5,
            id="v2 path outside the namespace",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/unified/a/cpu.max": "300000 100000\n"},
            3,
            id="unified",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpuset:/x\n2:cpu:/job:1\n0::/\n",
                "sys/fs/cgroup/cpu/job:1/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu/job:1/cpu.cfs_period_us": "100000\n",
            },
            3,
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/a/b\n",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "700000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            7,
            id="v1 parent, controllers mounted together",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "0\n",
            },
            16,
            id="v1 nonsense",
        ),
        pytest.param(
            {"proc/self/cgroup": "nonsense\n\n0::/a\n", "sys/fs/cgroup/a/cpu.max": "lots\n"},
            16,
            id="v2 nonsense",
        ),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert allotted_cores(lay_out(tmp_path, files)) == cores


def test_affinity_of_this_process(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allotted_cores(str(tmp_path)) == 1
    finally:
        os.sched_setaffinity(0, before)
    assert allotted_cores(str(tmp_path)) == len(before)


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("nproc", "visible", "devices", "count"),
    [
        ("3", None, 0, 3),
        (" +4 ", None, 8, 4),
        ("cpu", None, 8, 16),
        ("gpu", None, 8, 8),
        ("auto", None, 8, 8),
        ("auto", None, 0, 16),
        ("gpu", None, 0, None),
        ("auto", "", 8, 16),
        ("gpu", "", 8, None),
        ("gpu", "1", 8, 1),
        ("auto", "0,1,5", 8, 3),
        ("gpu", "GPU-8932f937,MIG-1234", 8, 2),
        ("gpu", "0,-1,2", 8, 1),
        ("xpu", None, 8, None),
    ],
)
def test_processes(tmp_path: Path, nproc: str, visible: str | None, devices: int, count: int | None) -> None:
    files = {f"dev/nvidia{number}": "" for number in range(devices)}
    root = lay_out(tmp_path, {**files, "dev/nvidiactl": "", "dev/nvidia-uvm": "", "dev/nvidia-caps/x": ""})
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_processes(nproc, environ, root) == count
