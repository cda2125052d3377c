"""What needs neither PyTorch nor NVFlare, under the other versions of Python that this host has.

``make support`` tries a whole release under one of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nvflare_torchrun_plugin.join_file import NAME, JoinFile

ROOT = Path(__file__).parents[2]
VERSIONS = [f"3.{minor}" for minor in range(10, 16) if minor != sys.version_info.minor]

JOIN = """
import sys
from pathlib import Path

from joining import Client, Node

folder = Path(sys.argv[1])
client = Client(folder, file=str(folder / "client.json"))
try:
    node = Node(folder, 1)
    try:
        client.wait_for("node-rank-1 has joined")
        bridge = client.bridge("node-rank-1")
        print(bridge.hello().python)
        bridge.process.stdin.close()
        bridge.process.wait(60)
    finally:
        client.end()
    print(node.ended())
finally:
    node.process.kill()
"""


def interpreter(version: str) -> str | None:
    """Return the path of one that runs, on the PATH or of pyenv's."""
    name = f"python{version}"
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    on_path = shutil.which(name)
    for found in ([on_path] if on_path else []) + sorted(map(str, root.glob(f"versions/{version}.*/bin/{name}"))):
        if subprocess.run([found, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            return found
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_a_node_joins_a_client_job(version: str, tmp_path: Path) -> None:
    """Supervisor, reception, dial-in, bridge and agent, each a part that depends on asyncio or on the kernel."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    # PyYAML does without its compiled part, which is another version's.
    shutil.copytree(Path(yaml.__file__).parent, tmp_path / "lib" / "yaml", ignore=shutil.ignore_patterns("*.so"))
    # A new identity needs a library that is compiled, too.
    first = 29000 + 10 * int(version.partition(".")[2])
    file = JoinFile.make((first, first + 9), "127.0.0.1")
    file.write(str(tmp_path / "client.json"), identity=True)
    file.write(str(tmp_path / NAME))
    path = os.pathsep.join(map(str, [ROOT, ROOT / "tests" / "unit", tmp_path / "lib"]))
    done = subprocess.run(
        [python, "-B", "-c", JOIN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    found, code = done.stdout.split()
    assert found.startswith(version)
    assert code == "0"
