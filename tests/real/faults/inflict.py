"""Inflicts the fault of a row, from inside of the processes of the row's group (standard library only).

Every Python process of the group loads this when it starts, through a ``sitecustomize`` module. Any fault is a
signal, sent by the rank (or torchrun) that is on the host of the process that dies: SIGKILL, SIGSTOP, or one that
nobody else uses, upon which the process does to itself what the row says.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

ROWS, FOLDER, NODE, CHILD = "FAULT_ROWS", "FAULT_FOLDER", "FAULT_NODE", "FAULT_CHILD"
"""Variables: the file with the rows, where they leave their marks, an agent's node rank, a rank's child."""
PATIENCE = 600.0
"""Seconds for which a process stays that its group's end is to end."""
SIGNALS: dict[str, int] = {
    "SIGKILL": signal.SIGKILL,
    "SIGSTOP": signal.SIGSTOP,
    "SIGTERM": signal.SIGTERM,
    "exit 1": signal.SIGRTMIN + 1,
    "exception": signal.SIGRTMIN + 2,
    "os._exit(0)": signal.SIGRTMIN + 3,
    "closed channel": signal.SIGRTMIN + 4,
}
MODULES = {
    "nvflare_torchrun_plugin.node_agent": "agent",
    "nvflare_torchrun_plugin.rank": "rank",
    "nvflare_torchrun_plugin.relay": "relay",
    "torch.distributed.run": "torchrun",
}
TRANSPORTS = (b"pump.py", b"ssh", b"srun")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what dies.
        where: the node rank on which it does.
        when: the moment at which it does.
        how: what happens to it.
        blame: how the verdict begins, after ``ok:`` for a fault that costs the task nothing; nothing after it
            where it depends on the moment. Where two notice at the same time, what each says: ``one or other``.
        bound: seconds from the fault until the verdict, when nothing of the group is left.
    """

    what: str
    where: int
    when: str
    how: str
    blame: str
    bound: float

    @property
    def spares(self) -> bool:
        """Whether the task has a result all the same."""
        return self.blame.startswith("ok")

    def agrees(self, said: str) -> bool:
        """Whether a verdict may begin so."""
        return said.startswith(tuple(map(str.strip, self.blame.removeprefix("ok:").split(" or "))))


def write(rows: list[Row], folder: Path) -> dict[str, str]:
    """Write the rows for a run, whose first attempt gets the first one; its processes need these variables."""
    (folder / "rows.json").write_text(json.dumps([astuple(row) for row in rows]))
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("from faults import inflict\ninflict.arm()\n")
    here = Path(__file__).parents[1]
    return {ROWS: str(folder / "rows.json"), FOLDER: str(folder), "PYTHONPATH": f"{folder / 'site'}:{here}"}


def marks(folder: Path, number: int) -> Path:
    """Where the row of the attempt with this number leaves its marks."""
    return folder / f"row-{number}"


def inflicted(folder: Path, number: int) -> float | None:
    """When the fault came, in monotonic seconds; None when it has not."""
    file = marks(folder, number) / "inflicted"
    return float(file.read_text()) if file.exists() else None


def arm() -> None:
    """Prepare this process for its end; inflict what is due when it starts."""
    if ROWS not in os.environ:
        return
    for how in ("exit 1", "exception", "os._exit(0)", "closed channel"):
        signal.signal(SIGNALS[how], _in_process)
    row, role = _row(), _role()
    if row.when == "at start" and role == row.what and os.environ.get(NODE, "1") == str(row.where):
        _strike(row, os.getpid())
    if row.when == "before join" and role == "torchrun" and _node() == _inflicter(row):
        _strike(row, _victim(row))


def moment(name: str) -> None:
    """Tell that rank 0 has come to this point. If the row's fault is due now, it strikes before this returns."""
    row = _row()
    if row.when in ("at start", "before join") and name == "in training" and not row.spares:
        # The ranks have started all the same: a stopped transport may have let the order pass before.
        time.sleep(PATIENCE)
    if row.when != name:
        return
    here = _marks() / name.replace(" ", "-")
    if _node() == 0:
        here.touch()
    if _node() == _inflicter(row):
        _wait_for(here)
        _strike(row, _victim(row))
        if row.what == "rank":
            return  # and lives on, or its main thread ends it
    if row.spares:
        _wait_for(_marks() / "inflicted")
    else:
        time.sleep(PATIENCE)


def child_environ() -> Mapping[str, str]:
    """Variables of a child of a rank, by which it is known afterwards."""
    return {**os.environ, CHILD: f"{_marks()}/"}


def is_deaf() -> bool:
    """Whether this rank is to ignore SIGTERM."""
    return _row().how.endswith("beside a deaf rank") and _node() != _row().where


def _in_process(number: int, _frame: object) -> None:
    if number == SIGNALS["exit 1"]:
        raise SystemExit(1)
    if number == SIGNALS["exception"]:
        raise RuntimeError("inflicted")
    if number == SIGNALS["os._exit(0)"]:
        os._exit(0)
    os.closerange(3, 1024)


def _role() -> str:
    words = sys.orig_argv
    if any(word.endswith("pump.py") for word in words[:4]):
        return "transport"
    return next((role for module, role in MODULES.items() if module in words[:5]), "")


def _node() -> int:
    return int(os.environ["NVFL_NODE_RANK"])


def _number() -> int:
    """The attempt's number, with which its run id begins; only what knows it already needs it."""
    return int(os.environ.get("NVFL_RUN_ID", "1-").partition("-")[0])


def _row() -> Row:
    rows = json.loads(Path(os.environ[ROWS]).read_text())
    return Row(*rows[_number() - 1])


def _marks() -> Path:
    folder = marks(Path(os.environ[FOLDER]), _number())
    folder.mkdir(exist_ok=True)
    return folder


def _inflicter(row: Row) -> int:
    return row.where if row.what in ("rank", "torchrun", "agent") else 0


def _wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _strike(row: Row, pid: int) -> None:
    file = _marks() / "inflicted"
    file.with_suffix(".new").write_text(repr(time.monotonic()))
    file.with_suffix(".new").rename(file)
    os.kill(pid, SIGNALS[row.how.removesuffix(" beside a deaf rank")])


def _victim(row: Row) -> int:
    me = os.getpid()
    if row.what == "rank":
        return me
    torchrun = me if _role() == "torchrun" else os.getppid()
    agent = _parent(torchrun)
    if row.what in ("torchrun", "agent"):
        return {"torchrun": torchrun, "agent": agent}[row.what]
    # Only node 0 has the client job beside it.
    client_job = _client_job(agent)
    if row.what == "CJ":
        return client_job
    return _child(client_job, TRANSPORTS if row.what == "transport" else (b"nvflare_torchrun_plugin.relay",))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _client_job(agent: int) -> int:
    """Who has started the agent of node 0; through Slurm that is not its parent."""
    parent = _parent(agent)
    if b"slurmstepd" not in Path(f"/proc/{parent}/cmdline").read_bytes():
        return parent
    return next(
        pid for pid in _pids_of(b"group_driver.py") if Path(f"/proc/{pid}/cwd").samefile(os.environ[FOLDER])
    )


def _pids_of(word: bytes) -> Iterator[int]:
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (directory / "cmdline").read_bytes():
                yield int(directory.name)


def _child(of: int, marked: tuple[bytes, ...]) -> int:
    """The child that was started with one of these words in its command, and not for this very host."""
    here = f"--nodelist={socket.gethostname()}".encode()
    for word in marked:
        for pid in _pids_of(word):
            with contextlib.suppress(OSError):
                if _parent(pid) == of and here not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    return pid
    raise LookupError(f"process {of} has no child with {marked} in its command")
