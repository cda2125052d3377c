"""What an agent finds on its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_torchrun_plugin.node import node_facts

V1 = "9:name=systemd:/\n4:cpu,memory:/job/step\n0::/\n"


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        pytest.param({"proc/self/cgroup": "0::/job\n"}, 0, id="no counter"),
        pytest.param({}, 0, id="no cgroups"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.events": "low 0\noom 5\noom_kill 2\noom_group_kill 9\n",
                "sys/fs/cgroup/memory.events": "oom_kill 7\n",
            },
            2,
            id="v2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/job/step/memory.oom_control": "under_oom 0\noom_kill 3\n",
            },
            3,
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/job/step/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n",
            },
            0,
            id="v1 of an old kernel",
        ),
    ],
)
def test_how_often_memory_was_short(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert node_facts.oom_kills(str(tmp_path)) == kills
