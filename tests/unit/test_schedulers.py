"""From environment to hosts: what schedulers give, what does not add up, and whatever else there may be.

A file in ``schedulers/`` is a case: the environment (``\\n`` is a line break), then sections. ``file PATH`` is a
file, ``scontrol`` what the fake prints, ``this`` a name of this host, and ``allocation`` or ``error`` the result.
``scontrol`` is a fake throughout: it checks how it is called and prints what the case says. Slurm's own is
tested where a Slurm runs.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvflare_torchrun_plugin import schedulers
from nvflare_torchrun_plugin.group_values import NodeGroupError
from nvflare_torchrun_plugin.schedulers import Allocation, Host, discover

CASES = sorted((Path(__file__).parent / "schedulers").glob("*.txt"))
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
FAKE_SCONTROL = """#!/bin/sh
[ "$#:$1 $2:$3" = "3:show hostnames:$SLURM_JOB_NODELIST" ] || exit 99
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def executable(name: str, script: str) -> dict[str, str]:
    """A PATH that has a script of that name in front."""
    path = Path("bin", name).absolute()
    path.parent.mkdir(exist_ok=True)
    path.write_text(script)
    path.chmod(0o700)
    return {"PATH": f"{path.parent}:{os.environ['PATH']}"}


def scontrol(script: str) -> dict[str, str]:
    return executable("scontrol", FAKE_SCONTROL + script)


def failure(environ: Mapping[str, str], this: str = "n1") -> str:
    with pytest.raises(NodeGroupError) as caught:
        discover(environ, this.__eq__)
    return str(caught.value)


def said(value: object) -> str:
    return "-" if value is None else str(value)


def described(allocation: Allocation) -> list[str]:
    """The allocation in the form of the case files."""
    transport = allocation.transport
    return [
        f"scheduler: {allocation.scheduler}",
        f"source: {allocation.source}",
        f"transport: {transport if isinstance(transport, str) else ' '.join(transport)}",
        *(f"host: {' '.join(map(said, astuple(host)))}" for host in allocation.hosts),
    ]


def test_there_are_cases() -> None:
    assert len(CASES) > 80


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path) -> None:
    first, *sections = path.read_text().split("\n--- ")
    lines = [line for line in first.splitlines() if line and not line.startswith("#")]
    environ = dict(line.replace("\\n", "\n").split("=", 1) for line in lines)
    content = dict(section.partition("\n")[::2] for section in sections)
    for title, text in content.items():
        if title.startswith("file "):
            Path(title[5:]).parent.mkdir(parents=True, exist_ok=True)
            Path(title[5:]).write_text(text)
    if "scontrol" in content:
        Path("hosts.txt").write_text(content["scontrol"])
        environ |= scontrol("cat hosts.txt")

    def this_host(name: str) -> bool:
        assert "this" in content, "the scheduler has told which host this is"
        return name == content["this"].strip()

    if "error" in content:
        with pytest.raises(NodeGroupError) as caught:
            discover(environ, this_host)
        assert str(caught.value) == content["error"].strip()
    else:
        assert described(discover(environ, this_host)) == content["allocation"].splitlines()


class TestScontrol:
    def test_missing(self) -> None:
        assert failure({**SLURM, "PATH": "/nowhere"}) == (
            "Slurm: SLURM_JOB_NODELIST is 'n[1-3]', but there is no scontrol in PATH to expand it: add Slurm's"
        )

    def test_failing(self) -> None:
        script = "printf 'scontrol: error:\\nInvalid hostlist\\n' >&2; exit 1"
        assert failure(SLURM | scontrol(script)) == (
            "Slurm: SLURM_JOB_NODELIST is 'n[1-3]', but 'scontrol show hostnames' fails with exit status 1 and"
            r" says 'scontrol: error:\nInvalid hostlist': leave the list as Slurm sets it"
        )

    def test_hanging(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(schedulers.slurm, "SCONTROL_TIMEOUT", 0.5)
        began = time.monotonic()
        message = failure(SLURM | scontrol("echo $$ >pid; exec sleep 60"))
        assert time.monotonic() - began < 20
        assert message == (
            "Slurm: SLURM_JOB_NODELIST is 'n[1-3]', but 'scontrol show hostnames' did not end in 0.5 s: find out"
            " what it waits for"
        )
        with pytest.raises(ProcessLookupError):
            os.kill(int(Path("pid").read_text()), 0)

    def test_no_utf_8(self) -> None:
        assert failure(SLURM | scontrol("printf '\\377'")) == (
            "Slurm: SLURM_JOB_NODELIST is 'n[1-3]', but 'scontrol show hostnames' prints no UTF-8: correct the"
            " list"
        )

    def test_no_program(self) -> None:
        environ = SLURM | scontrol("")
        Path("bin/scontrol").chmod(0o600)
        environ["PATH"] = str(Path("bin").absolute())
        assert "cannot be started: " in failure(environ)

    def test_an_environment_that_cannot_be(self) -> None:
        assert "cannot be started: embedded null byte" in failure({**SLURM, "OTHER": "\0"})

    def test_it_reads_no_input(self) -> None:
        own, (reader, writer) = os.dup(0), os.pipe()
        os.write(writer, b"n2\n")
        os.close(writer)
        os.dup2(reader, 0)
        try:
            allocation = discover(SLURM | scontrol("cat; echo n1"), "n1".__eq__)
        finally:
            os.dup2(own, 0)
            os.close(own)
            os.close(reader)
        assert allocation.hosts == (Host("n1"),)


class TestFile:
    @pytest.mark.parametrize("size", [0, 1])
    def test_size(self, size: int) -> None:
        Path("nodes").write_bytes(b"n1\n".ljust(schedulers.MAX_FILE_SIZE + size))
        environ = {"PBS_NODEFILE": "nodes"}
        if size:
            assert failure(environ) == (
                "PBS: PBS_NODEFILE 'nodes' has more than 1048576 bytes: it lists no hosts, correct it"
            )
        else:
            assert discover(environ, "n1".__eq__).hosts == (Host("n1"),)

    def test_no_utf_8(self) -> None:
        Path("nodes").write_bytes(b"n1\nn\xff2\n")
        assert failure({"PBS_NODEFILE": "nodes"}) == (
            r"PBS: PBS_NODEFILE 'nodes' line 2 is b'n\xff2': must be UTF-8, correct it"
        )

    def test_line_ends_of_windows(self) -> None:
        Path("nodes").write_bytes(b"n1\r\nn2\r\n")
        assert discover({"PBS_NODEFILE": "nodes"}, "n1".__eq__).hosts == (Host("n1"), Host("n2"))

    def test_a_pipe_that_nobody_writes_to(self) -> None:
        os.mkfifo("nodes")
        assert failure({"PBS_NODEFILE": "nodes"}) == "PBS: PBS_NODEFILE 'nodes' is no regular file: correct it"

    @pytest.mark.parametrize("path", ["a\0b", "\ud800"])
    def test_no_path(self, path: str) -> None:
        assert failure({"PBS_NODEFILE": path}) == f"PBS: PBS_NODEFILE {path!r} is no path: correct it"

    def test_no_file_stays_open(self) -> None:
        before = sorted(Path("/proc/self/fd").iterdir())
        failure({"PBS_NODEFILE": "."})
        failure({"PBS_NODEFILE": "/dev/null"})
        assert sorted(Path("/proc/self/fd").iterdir()) == before

    def test_long_lines_cost_no_time(self) -> None:
        Path("nodes").write_text("n1" + " " * 500_000 + "=" * 500_000)
        began = time.monotonic()
        failure({"DLTS_HOSTFILE": "nodes"})
        assert time.monotonic() - began < 10


class TestNumbers:
    def test_most_hosts(self) -> None:
        names = [f"n{index}" for index in range(schedulers.MAX_HOSTS)]
        Path("nodes").write_text("\n".join(names))
        assert [host.name for host in discover({"PBS_NODEFILE": "nodes"}, "n0".__eq__).hosts] == names

    def test_too_many_hosts(self) -> None:
        Path("nodes").write_text("".join(f"n{index}\n" for index in range(schedulers.MAX_HOSTS + 1)))
        assert failure({"PBS_NODEFILE": "nodes"}) == (
            "PBS: PBS_NODEFILE 'nodes' has 4097 hosts: must be at most 4096, ask for fewer"
        )

    def test_too_many_processes(self) -> None:
        Path("nodes").write_text("n1\n" * 65537)
        assert failure({"PBS_NODEFILE": "nodes"}) == (
            "PBS: PBS_NODEFILE 'nodes' line 65537 gives host 'n1' more than 65536 slots: correct it"
        )


class TestExecInAJob:
    """The transport of an Indexed Job, with a fake ``kubectl`` that prints how it is called."""

    def run(self, pods: str) -> tuple[int, list[str]]:
        environ = {"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "my-train-0.svc", "NNODES": "12"}
        allocation = discover(environ, lambda name: pytest.fail(f"asked for {name}"))
        kubectl = f"printf '%s|' \"$@\" >>calls\necho >>calls\n[ $1 != get ] || {pods}\n"
        argv = [word.replace("{host}", allocation.hosts[11].name) for word in allocation.transport]
        done = subprocess.run(
            [*argv, "python3", "-c", 'print("a  b")'],
            env=executable("kubectl", "#!/bin/sh\n" + kubectl),
            timeout=60,
        )
        return done.returncode, Path("calls").read_text().splitlines()

    def test_it_finds_the_pod_by_its_labels(self) -> None:
        code, calls = self.run("echo pod/my-train-11-x2vq9")
        labels = "batch.kubernetes.io/job-name=my-train,batch.kubernetes.io/job-completion-index=11"
        assert calls == [
            f"get|pods|-o|name|--field-selector|status.phase=Running|-l|{labels}|",
            'exec|-i|pod/my-train-11-x2vq9|--|python3|-c|print("a  b")|',
        ]
        assert code == 0

    def test_it_fails_where_kubectl_does(self) -> None:
        code, calls = self.run("exit 3")
        assert (code, len(calls)) == (3, 1)


# fmt: off
FAMILIES = (
    ("PBS_NODEFILE", "PBS_JOBID"),
    ("LSB_DJOB_HOSTFILE", "LSB_DJOB_NUMPROC", "LSB_JOBID"),
    ("LSB_HOSTS", "LSB_DJOB_NUMPROC"),
    ("PE_HOSTFILE", "JOB_ID", "NHOSTS", "NSLOTS"),
    ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"),
    ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"),
    ("JOB_COMPLETION_INDEX", "MASTER_ADDR", "NNODES"),
    ("DLTS_HOSTFILE", "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
)
SLURM_NAMES = (
    "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_GPUS",
    "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_ID", "SLURMD_NODENAME",
)
PIECES = (
    "n1", "n2", "n1", "0", "1", "2", "4", "slots=2", ":", "=", ",", "(x2)", "a100:", "-", "#", "\n", "\n", " ",
    " ", "train-0.svc", "-1", "\r", "\u2028", "\0", "9" * 5000,
)
# fmt: on
ANY_TEXT = st.text(st.characters(codec=None), max_size=30)  # lone surrogates included
WORDS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
GOOD = st.sampled_from(["nodes", "train-0.svc", "n1"])
VALUE = st.integers(0, 2).map(str) | GOOD | WORDS | ANY_TEXT
LINE = st.sampled_from(["n1", "n2", "n3 slots=2", "n3 2 q U", "", "# n4"])
CONTENT = st.lists(LINE).map("\n".join).map(str.encode) | WORDS.map(str.encode) | st.binary(max_size=40)


def any_of(names: Iterable[str]) -> st.SearchStrategy[dict[str, str]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, VALUE))


def all_of(names: Iterable[str]) -> st.SearchStrategy[dict[str, str]]:
    return st.fixed_dictionaries(dict.fromkeys(names, st.integers(0, 2).map(str) | GOOD))


ENVIRON = st.one_of(
    st.sampled_from(FAMILIES).flatmap(all_of),
    st.sampled_from(FAMILIES).flatmap(any_of),
    any_of(chain(SLURM, SLURM_NAMES, *FAMILIES)),
)


def check(environ: Mapping[str, str], this: str | None) -> None:
    """Whatever the environment: an allocation in which all holds that is promised, or an error of one line."""
    allocation: Allocation | None = None
    message = ""
    try:
        allocation = discover(environ, lambda name: this in (None, name))
    except NodeGroupError as error:
        message = str(error)
    if allocation is None:
        assert len(message.splitlines()) == 1
        assert len(message) < 1000
        assert message.isprintable()
        return
    names = [host.name for host in allocation.hosts]
    assert 1 <= len(names) == len(set(names)) <= schedulers.MAX_HOSTS
    assert not any(name.startswith("-") or not name.isprintable() or " " in name for name in names)
    assert all(host.processes is None or 1 <= host.processes <= 65536 for host in allocation.hosts)
    assert len(allocation.source.splitlines()) == 1
    assert allocation.source.isprintable()


class TestWhateverTheEnvironment:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
    @given(environ=ENVIRON, content=CONTENT, this=st.sampled_from([None, "n1"]))
    def test_it_ends_well(self, environ: dict[str, str], content: bytes, this: str | None) -> None:
        Path("nodes").write_bytes(content)
        check({**environ, "PATH": "/nowhere"}, this)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
    @given(
        environ=st.just({})
        | st.sampled_from(SLURM_NAMES).flatmap(lambda name: any_of([name]))
        | any_of(SLURM_NAMES),
        node_list=GOOD | VALUE,
        output=CONTENT,
        this=st.sampled_from([None, "n1"]),
    )
    def test_it_ends_well_in_slurm(
        self, environ: dict[str, str], node_list: str, output: bytes, this: str | None
    ) -> None:
        Path("output").write_bytes(output)
        environ = {**environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": node_list}
        check(environ | scontrol("cat output"), this)
