"""A script must not be able to tell that a rank runs it: the processes that it starts, by each method."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_runs import both, same, write

pytestmark = pytest.mark.usefixtures("cold_and_warm")

CHILDREN = """
import functools, inspect, json, multiprocessing, os, pickle, sys
print("top level of", __name__) if __name__ != "__main__" else None
class Sample:
    def __init__(self, value): self.value = value
    def __reduce__(self): return (Sample, (self.value,))
def collate(samples, scale):
    found = __name__, sys.argv, sys.path[0], Sample.__module__, sorted(globals())
    return [s.value * scale for s in samples], *found
if __name__ == "__main__":
    with multiprocessing.get_context(METHOD).Pool(1) as pool:
        batches = [[Sample(1)], [Sample(3), Sample(4)]]
        print(json.dumps(pool.map(functools.partial(collate, scale=2), batches)))
        pool.close(), pool.join()  # a SIGTERM at its end would hit coverage at work
    print(pickle.loads(pickle.dumps(collate)) is collate, pickle.loads(pickle.dumps(Sample(5))).value)
    print(inspect.getsource(collate), inspect.getsourcefile(Sample))
    print(len(inspect.getsource(sys.modules["__main__"])))
"""


@pytest.mark.parametrize("words", [["my job/script.py"], ["-m", "script"]], ids=["script", "module"])
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_worker_processes(tmp_path: Path, words: list[str], method: str) -> None:
    source = CHILDREN.replace("METHOD", repr(method))
    write(tmp_path, {"my job/script.py": source, "script.py": source})
    rank = same([*words, "--epochs", "2"], tmp_path)
    assert rank.code == 0
    assert b"[[[2], " in rank.output


@pytest.mark.parametrize("end", ["pass", "sys.exit(7)", "1 / 0"])
def test_a_forked_child_that_comes_back_does_not_speak_for_the_rank(tmp_path: Path, end: str) -> None:
    write(
        tmp_path,
        {
            "nvflare/__init__.py": "",
            "nvflare/client/__init__.py": "import os\n"
            "def shutdown(): print('left by child', os.getpid() != parent)",
            "nvflare/client/api.py": "default_context = object()",
            "script.py": f"""
import os, sys, nvflare.client.api
nvflare.client.parent = os.getpid()
if os.fork():
    print(os.wait()[1])
else:
    {end}
""",
        },
    )
    plain, rank = both(["script.py"], tmp_path)
    assert rank.output == plain.output + b"left by child False\n"
    assert rank.messages == []
