from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin import torchrun_node
from nvflare_torchrun_plugin.contract import ContractError
from nvflare_torchrun_plugin.node.cores import allotted_cores
from nvflare_torchrun_plugin.node.inherited_environ import clean_environ
from nvflare_torchrun_plugin.torchrun_node import (
    TORCHRUN_OPTIONS,
    UsageError,
    build_torchrun_argv,
    check_options,
)

TORCHRUN = [sys.executable, "-u", "-m", "torch.distributed.run"]
GROUP = {
    "NVFL_NNODES": "2",
    "NVFL_NODE_RANK": "1",
    "NVFL_MASTER_ADDR": "gpu-0",
    "NVFL_MASTER_PORT": "29511",
    "NVFL_RUN_ID": "run 7",
}


def test_one_node() -> None:
    argv = build_torchrun_argv(["train.py", "--epochs", "2"], {})
    assert argv == [*TORCHRUN, "--nproc_per_node=auto", "--standalone", "train.py", "--epochs", "2"]


def test_more_nodes() -> None:
    argv = build_torchrun_argv(["--nproc-per-node", "4", "--join-timeout=30", "train.py", "--nnodes=9"], GROUP)
    assert argv == [
        *TORCHRUN,
        "--nproc_per_node=4",
        "--nnodes=2",
        "--node_rank=1",
        "--rdzv_backend=static",
        "--rdzv_endpoint=gpu-0:29511",
        "--rdzv_id=run 7",
        "--rdzv_conf=timeout=30",
        "train.py",
        "--nnodes=9",
    ]


def test_defaults_of_port_and_join_timeout() -> None:
    environ = {"NVFL_NNODES": "2", "NVFL_MASTER_ADDR": "[::1]", "NVFL_RUN_ID": "r"}
    argv = build_torchrun_argv(["train.py"], environ)
    assert {"--node_rank=0", "--rdzv_endpoint=[::1]:29400", "--rdzv_conf=timeout=600"} <= set(argv)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--n", "3"], "--nproc_per_node=3"),
        (["--nproc=3"], "--nproc_per_node=3"),
        (["--nproc_per_node=3"], "--nproc_per_node=3"),
        (["--nproc_p", "gpu"], "--nproc_per_node=gpu"),
        (["--nproc-per-node=1", "--nproc-per-node=3"], "--nproc_per_node=3"),
        (["--j", "7"], "--rdzv_conf=timeout=7"),
        (["--join_timeout= 7 "], "--rdzv_conf=timeout=7"),
    ],
)
def test_spellings_of_our_two_options(words: list[str], option: str) -> None:
    argv = build_torchrun_argv([*words, "train.py"], GROUP)
    assert option in argv
    assert argv[-1] == "train.py"


def test_torchruns_options_stand_between_ours_and_the_script() -> None:
    argv = build_torchrun_argv(["--tee", "3", "-m", "--n", "2", "--log-dir=/a b", "pkg.train", "-m", "--tee"], {})
    assert argv == [
        *TORCHRUN,
        "--nproc_per_node=2",
        "--standalone",
        "--tee",
        "3",
        "-m",
        "--log-dir=/a b",
        "pkg.train",
        "-m",
        "--tee",
    ]


def test_two_dashes_end_the_options() -> None:
    argv = build_torchrun_argv(["--tee=3", "--", "--nnodes", "x"], {})
    assert argv[5:] == ["--standalone", "--tee=3", "--", "--nnodes", "x"]


def test_restarts_on_one_node_only() -> None:
    assert "--max-restarts=2" in build_torchrun_argv(["--max-restarts=2", "train.py"], {})
    with pytest.raises(UsageError, match=r"option --max-restarts is refused: .* more than one node"):
        build_torchrun_argv(["--max_restarts", "2", "train.py"], GROUP)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes=2", "t.py"], "option --nnodes is refused: the number of nodes comes from NVFL_NNODES"),
        (["--nn", "2", "t.py"], "option --nnodes is refused"),
        (
            ["--node_rank", "0", "t.py"],
            "option --node-rank is refused: the node rank comes from NVFL_NODE_RANK",
        ),
        (["--master_addr=a", "t.py"], "option --master-addr is refused: the address of node rank 0 comes"),
        (["--master-port=1", "t.py"], "option --master-port is refused"),
        (["--rdzv_endpoint", "a:1", "t.py"], "option --rdzv-endpoint is refused"),
        (["--rdzv-id=1", "t.py"], "option --rdzv-id is refused: the rendezvous id comes from NVFL_RUN_ID"),
        (["--rdzv_backend=c10d", "t.py"], "option --rdzv-backend is refused: only the static rendezvous"),
        (
            ["--rdzv-conf=a=b", "t.py"],
            "option --rdzv-conf is refused: the rendezvous is configured by --join-",
        ),
        (["--stand", "t.py"], "option --standalone is refused: it is chosen whenever NVFL_NNODES is 1"),
        ([], "SCRIPT is missing"),
        (["--tee=3"], "SCRIPT is missing"),
        (["--n", "2"], "SCRIPT is missing"),
        (["--"], "SCRIPT is missing"),
        (["", "x"], "SCRIPT is ''"),
        (["--nproc-per-node"], "option '--nproc-per-node' has no value"),
        (["--nproc-per-node", "--tee=3", "t.py"], "option '--nproc-per-node' has no value"),
        (["--log-dir", "--", "t.py"], "option '--log-dir' has no value"),
        (["-t"], "option '-t' has no value"),
        (["--nproc-per-node=", "t.py"], "--nproc-per-node is '': must be a number of at least 1"),
        (["--nproc-per-node=0", "t.py"], "--nproc-per-node is '0': must be"),
        (["--nproc-per-node", "-1", "t.py"], "--nproc-per-node is '-1': must be"),
        (["--n", "2x", "t.py"], "--nproc-per-node is '2x': must be"),
        (["--n", "größe", "t.py"], "--nproc-per-node is 'größe': must be"),
        (["--join-timeout=0", "t.py"], "--join-timeout is '0': must be a positive integer"),
        (["--join-timeout=1.5", "t.py"], "--join-timeout is '1.5': must be a positive integer"),
        (["--join-timeout", "a\nb", "t.py"], r"--join-timeout is 'a\nb': must be a positive integer"),
        (["--nodes=2", "t.py"], "option '--nodes=2' is not known"),
        (["-x", "t.py"], "option '-x' is not known"),
        (["--log=x", "t.py"], "option '--log=x' can mean --log-dir, --logs-specs: write it out"),
        (["--=x", "t.py"], "option '--=x' can mean --nproc-per-node, --join-timeout: write it out"),
        (["--module=pkg", "t.py"], "option '--module=pkg' takes no value: write only --module"),
        (["-mpkg", "t.py"], "option '-mpkg' takes no value: write only --module"),
    ],
)
def test_bad_command_lines(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_torchrun_argv(words, {})
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()


def test_bad_contract() -> None:
    with pytest.raises(ContractError, match="NVFL_NODE_RANK is 1"):
        build_torchrun_argv(["train.py"], {"NVFL_NODE_RANK": "1"})


@given(
    st.lists(
        st.text(max_size=5) | st.sampled_from([*TORCHRUN_OPTIONS, "--n=2", "--", "-m", "-t", "a b", "-a b"]),
        max_size=6,
    )
)
def test_any_words_are_a_command_line_or_a_one_line_error(words: list[str]) -> None:
    message = ""
    try:
        argv = build_torchrun_argv(words, {})
    except UsageError as error:
        message = str(error)
    except SystemExit as end:
        assert end.code == 0  # noqa: PT017 - --help among the words
    else:
        assert argv[:4] == TORCHRUN
        assert argv[-1] == words[-1]
    assert not message or message.isprintable()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--tee", "3"],
        ["--tee=3", "-r", "1", "-t3", "--log_dir", "/a b"],
        ["--local-ranks-filter=0", "--local-addr=10.0.0.1", "--numa-binding=node", "--virtual-local-rank"],
        ("--role", "trainer"),
    ],
)
def test_options_that_may_be_given_to_the_executor(options: list[str]) -> None:
    check_options(options)
    argv = build_torchrun_argv([*options, "train.py"], GROUP)
    assert argv[-1 - len(options) :] == [*options, "train.py"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["train.py"], "torchrun option 'train.py': not an option"),
        (["--tee", "3", "4"], "torchrun option '4': not an option"),
        (["--"], "torchrun option '--': not an option"),
        (["--tee"], "option '--tee' has no value"),
        (["-m"], "torchrun option --module: says what to run"),
        (["--no-python"], "torchrun option --no-python: says what to run"),
        (["--run_path"], "torchrun option --run-path: says what to run"),
        (["--help"], "torchrun option --help: says what to run"),
        (["--nproc-per-node=2"], "torchrun option --nproc-per-node: has an argument of its own"),
        (["--j=2"], "torchrun option --join-timeout: has an argument of its own"),
        (["--max-restarts=1"], "option --max-restarts is refused"),
        (["--nnodes=2"], "option --nnodes is refused"),
        (["--rdzv-conf", "a=b"], "option --rdzv-conf is refused"),
        (["--nonsense"], "option '--nonsense' is not known"),
        ("--tee=3", "torchrun options are '--tee=3': must be a list"),
        (["--tee", 3], "torchrun option 3: must be a string"),
        (["--role=a\0b"], r"torchrun option '--role=a\x00b': must be a string without NUL"),
    ],
)
def test_options_that_the_executor_refuses(options: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(options)
    assert str(caught.value).startswith(message)


DROPPED = """
PET_STANDALONE PET_NNODES RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME
GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_USE_AGENT_STORE
SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_TASKS_PER_NODE
SLURM_STEP_ID SLURM_STEP_NUM_TASKS SLURM_GTIDS SLURM_TASK_PID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK
MPI_LOCALRANKID MPI_LOCALNRANKS PALS_RANKID FLUX_TASK_RANK
"""
KEPT = """
PATH SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NODELIST PBS_JOBID LSB_JOBID FLUX_JOB_ID CUDA_VISIBLE_DEVICES
NVFL_NNODES NVFL_MASTER_ADDR OMP_NUM_THREADS MY_RANK NCCL_DEBUG TORCH_ELASTIC_SHUTDOWN_TIMEOUT
"""


def test_misleading_variables_are_dropped() -> None:
    environ = {name: name.lower() for name in f"{DROPPED} {KEPT}".split()}
    before = dict(environ)
    assert clean_environ(environ) == {name: name.lower() for name in KEPT.split()}
    assert environ == before


Execs = list[tuple[str, list[str], dict[str, str]]]


@pytest.fixture
def execs(monkeypatch: pytest.MonkeyPatch) -> Execs:
    """What main() wants this process to become; nothing is started."""
    calls: Execs = []

    def execve(path: str, argv: list[str], environ: dict[str, str]) -> None:
        calls.append((path, argv, environ))
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", execve)
    for name in [name for name in os.environ if name.startswith("NVFL_") or name == "OMP_NUM_THREADS"]:
        monkeypatch.delenv(name)
    return calls


def run_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["torchrun_node", *words])
    with pytest.raises(SystemExit) as caught:
        torchrun_node.main()
    return caught.value.code


def test_main_becomes_torchrun(execs: Execs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_STANDALONE", "1")
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    assert run_main(monkeypatch, "--n=1", "train.py") == 0
    [(path, argv, environ)] = execs
    assert path == sys.executable
    assert argv == build_torchrun_argv(["--n=1", "train.py"], GROUP)
    expected = {**clean_environ(os.environ), "OMP_NUM_THREADS": str(allotted_cores())}
    assert environ == expected
    assert "PET_STANDALONE" not in environ


@pytest.mark.parametrize(
    ("nproc", "devices", "threads"),
    [
        ("1", "", "12"),
        ("5", "", "2"),
        ("100", "", "1"),
        ("auto", "0,1,2", "4"),
        ("gpu", "0,1", "6"),
        ("cpu", "0,1", "1"),
        ("auto", "", "1"),
        ("xpu", "", None),
    ],
)
def test_threads_per_process(
    execs: Execs, monkeypatch: pytest.MonkeyPatch, nproc: str, devices: str, threads: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(torchrun_node, "allotted_cores", lambda: 12)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    run_main(monkeypatch, "--nproc-per-node", nproc, "train.py")
    assert execs[0][2].get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize("threads", ["7", ""])
def test_threads_set_by_the_user_stay(execs: Execs, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    run_main(monkeypatch, "--n=1", "train.py")
    assert execs[0][2]["OMP_NUM_THREADS"] == threads


def test_an_interpreter_that_is_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert run_main(monkeypatch, "train.py") == 2
    assert (
        capsys.readouterr().err == "torchrun_node: cannot start '/nonexistent/python': No such file or directory\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--h", "train.py"], ["--tee=3", "--he", "--nonsense"]])
def test_help(
    execs: Execs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run_main(monkeypatch, *words) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: python -m nvflare_torchrun_plugin.torchrun_node [options] SCRIPT [ARGS...]\n")
    assert "--join-timeout S" in out
    assert err == ""
    assert execs == []


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        ([], {}, "SCRIPT is missing"),
        (["train.py"], {"NVFL_NNODES": "x\ny"}, r"NVFL_NNODES is 'x\ny'"),
        (["train.py"], {**GROUP, "NVFL_MASTER_ADDR": "::1"}, "NVFL_MASTER_ADDR is '::1'"),
        (["--nnodes=2", "train.py"], {}, "option --nnodes is refused"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], environ: dict[str, str], message: str) -> None:
    command = [sys.executable, "-m", "nvflare_torchrun_plugin.torchrun_node", *words]
    ended = subprocess.run(
        command,
        env={**clean_environ(os.environ), **environ},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"torchrun_node: {message}")
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.endswith("\n")


def test_imports_nothing_heavy() -> None:
    code = "import sys, nvflare_torchrun_plugin.torchrun_node; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    loaded = {name.partition(".")[0] for name in ended.stdout.split()}
    assert "nvflare_torchrun_plugin" in loaded
    assert not loaded & {"torch", "nvflare", "numpy", "yaml", "argparse", "subprocess", "logging", "asyncio"}
