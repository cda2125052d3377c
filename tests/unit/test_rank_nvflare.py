"""A rank leaves NVFlare's API when its script has ended."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from fake_agent import run_rank
from rank_runs import same, write

pytestmark = pytest.mark.usefixtures("cold_and_warm")

# The real API with a context of ours in place of a session: one non-daemon thread, as NVFlare's own, that only
# its shutdown ends.
NVFLARE = """
import sys, threading, types
import nvflare.client as flare
import nvflare.client.api
left = threading.Event()
class Api:
    def get_config(self):
        return CONFIG
    def receive(self, timeout):
        print("received", timeout, flush=True)
        RECEIVES
    def shutdown(self):
        print("left the API", flush=True)
        left.set()
        FAILS
nvflare.client.api.default_context = types.SimpleNamespace(api=Api())
threading.Thread(target=left.wait).start()
END
"""


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs nvflare")
@pytest.mark.parametrize(
    ("end", "fails", "code", "output"),
    [
        ("pass", "", 0, ["left the API"]),
        ("sys.exit(3)", "", 3, ["left the API"]),
        ("raise ValueError('bad')", "", 1, ["ValueError: bad", "left the API"]),
        ("raise KeyboardInterrupt", "", -2, ["KeyboardInterrupt", "left the API"]),
        ("flare.shutdown()", "", 0, ["left the API", "left the API"]),
        (
            "sys.exit(3)",
            "raise OSError('gone')",
            3,
            ["left the API", "leaving NVFlare's Client API failed: OSError: gone"],
        ),
        ("pass", "sys.exit(9)", 0, ["left the API", "leaving NVFlare's Client API failed: SystemExit: 9"]),
    ],
)
def test_nvflare_is_left_after_the_traceback(
    tmp_path: Path, end: str, fails: str, code: int, output: list[str]
) -> None:
    assert run_on_nvflare(tmp_path, END=end, FAILS=fails) == (code, output)


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs nvflare")
@pytest.mark.parametrize(
    ("config", "receives", "output"),
    [
        ("{'TASK_EXCHANGE': {'launch_once': False}}", "", ["received 10.0", "left the API"]),
        ("{'TASK_EXCHANGE': {'launch_once': True}}", "", ["left the API"]),
        ("{'TASK_EXCHANGE': {'launch_once': False}}", "raise OSError('gone')", ["received 10.0", "left the API"]),
    ],
)
def test_the_task_of_a_launch_arrives_before_nvflare_is_left(
    tmp_path: Path, config: str, receives: str, output: list[str]
) -> None:
    assert run_on_nvflare(tmp_path, CONFIG=config, RECEIVES=receives) == (0, output)


def run_on_nvflare(cwd: Path, **given: str) -> tuple[int, list[str]]:
    """Return the exit code of a script on NVFLARE, and its lines but those of tracebacks."""
    source = NVFLARE
    for word in ("CONFIG", "RECEIVES", "FAILS", "END"):
        source = source.replace(word, given.get(word, "{}" if word == "CONFIG" else ""))
    write(cwd, {"script.py": source})
    rank = run_rank(["script.py"], cwd)
    return rank.code, [line for line in rank.output.decode().splitlines() if line[0] not in " T"]


@pytest.mark.skipif(importlib.util.find_spec("nvflare") is None, reason="needs nvflare")
def test_nvflare_that_the_script_never_joined_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, {"script.py": "import nvflare.client as flare\nprint(flare.__name__)"})
    assert same(["script.py"], tmp_path).output == b"nvflare.client\n"
