"""The group that a job starts ahead of its next task, and whether the task can have it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from nvflare.client.api_spec import CLIENT_API_TYPE_KEY
from nvflare.utils.job_launcher_utils import add_custom_dir_to_path

from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.description.group_description import Node
from nvflare_torchrun_plugin.job import script_imports
from nvflare_torchrun_plugin.job.warm_start import WarmStart
from nvflare_torchrun_plugin.launching import planning, ports
from nvflare_torchrun_plugin.launching.planning import Plan
from nvflare_torchrun_plugin.node.staging import FOLDER
from nvflare_torchrun_plugin.supervision.group_ahead import Ahead
from nvflare_torchrun_plugin.supervisor import Supervisor
from nvflare_torchrun_plugin.verdict import Verdict

_Fingerprint = tuple[tuple[str, int, int], ...]
HEAD_START = 1.0
"""Seconds that a task has for itself, to receive its model, before the next one's group is started."""
_BOUND = 5.0
"""Seconds for a group that is just being planned when its task comes; a name server may take its time."""


class WarmGroups:
    """Keeps one group ahead.

    Args:
        plan: what all attempts have in common.
        supervisor: starts the groups.
        settings: the job's.
        number: gives each group its number.
        sitting_out: gives the nodes that an attempt would do without now.
        learn: is called with each group that is to be had, and with each that has ended.
    """

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor,
        settings: WarmStart,
        *,
        number: Callable[[], int],
        sitting_out: Callable[[], list[Node]],
        learn: Callable[[Ahead], None],
    ) -> None:
        self._plan = plan
        self._supervisor = supervisor
        self._settings = settings
        self._number = number
        self._sitting_out = sitting_out
        self._learn = learn
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._closed = False
        self._ahead: Ahead | None = None
        self._gone = threading.Event()
        self._dropped: threading.Event | None = None
        self._files: _Fingerprint = ()
        self._files_of_task: _Fingerprint | None = None
        self._why_none = "no group was started ahead"

    def prepare(self, after: float = 0.0) -> None:
        """Begin to start a group for the next task, unless there is one.

        Args:
            after: seconds to wait before, unless the task comes earlier.
        """
        with self._lock:
            if self._closed or self._ahead is not None or (self._thread is not None and self._thread.is_alive()):
                return
            self._hurry.clear()
            self._thread = threading.Thread(
                target=self._start, args=(after,), name="torchrun_warm_start", daemon=True
            )
            self._thread.start()

    def take(self) -> Ahead | str:
        """Return the group for the task that has come, or why it starts without."""
        self._hurry.set()
        thread = self._thread
        if thread is not None:
            thread.join(_BOUND)
        self._files_of_task = _fingerprint(self._plan)
        with self._lock:
            ahead, self._ahead = self._ahead, None
            self._dropped = self._gone if ahead is not None else None
            if ahead is None:
                planning = thread is not None and thread.is_alive()
                return "its group is still being planned" if planning else self._why_none
        self._learn(ahead)
        stale = self._stale(ahead)
        if stale is None:
            return ahead
        ahead.stop(stale)
        return stale

    def dropped_ends(self, timeout: float) -> bool:
        """Wait until the group that the last task could not have gives back its port; return whether it has."""
        dropped, self._dropped = self._dropped, None
        return dropped is not None and dropped.wait(timeout)

    def close(self) -> None:
        """Start no more; the supervisor ends what is there. What is still being planned comes to nothing."""
        with self._lock:
            self._closed = True
        self._hurry.set()

    def _start(self, after: float) -> None:
        self._hurry.wait(after)
        if self._closed:
            return
        plan = self._plan
        reservation: ports.Reservation | None = None
        ahead = None
        gone = threading.Event()
        try:
            files = _fingerprint(plan)
            if self._files_of_task not in (None, files):
                # A node that has a copy of them has one, and the ranks of the task are at work in it.
                self._why_none = "the job's files have changed while the last task was running"
                return
            launch, reservation = planning.launch(
                plan, self._number(), self._sitting_out(), preload=self._preload()
            )
            environ = relay_environ(_custom(plan))
            with self._lock:
                if self._closed:
                    return
                ahead = self._ahead = self._supervisor.start_ahead(launch, environ)
                self._files, self._gone = files, gone
                self._why_none = "no group was started ahead since the last task"
        except Exception as e:  # noqa: BLE001 - whatever it is, the task does without, and meets it again if it must
            self._why_none = f"no group could be started ahead: {e}"
        finally:
            if ahead is None and reservation is not None:
                reservation.release()
        if ahead is None:
            return
        started, claim = ahead, reservation

        def release(_decided: Future[Verdict | None]) -> None:
            if claim is not None:
                claim.release()
            gone.set()
            self._learn(started)

        ahead.decided.add_done_callback(release)

    def _preload(self) -> tuple[str, ...]:
        if self._settings.preload is not None:
            return self._settings.preload
        plan = self._plan
        return script_imports.ahead_of(
            plan.target, module=plan.program.module is not None, folders=[_custom(plan), plan.app_dir]
        )

    def _stale(self, ahead: Ahead) -> str | None:
        age = time.monotonic() - ahead.began
        unfit = ahead.unfit()
        if unfit is not None:
            return unfit
        if age > self._settings.max_age:
            return f"the group started ahead is {age:.0f} s old (max_age is {self._settings.max_age:g})"
        if self._files_of_task != self._files:
            return "the job's files have changed since the group was started ahead"
        without = {node.host for node in self._sitting_out()}
        wanted = sorted(node.host for node in self._plan.group.nodes if node.host not in without)
        absent = [host for host, _ in ahead.left_out]
        if wanted != sorted(member.host for member in ahead.launch.members if member.host not in absent):
            return "other nodes can take part now than when the group was started ahead"
        return None


def relay_environ(custom: str) -> dict[str, str]:
    """Return the environment that a task's relay will have, but for the bootstrap, if nothing changes until then.

    Args:
        custom: the job's ``custom`` folder.
    """
    environ = {
        name: value for name, value in os.environ.items() if name not in (relay.DIR_VARIABLE, CLIENT_API_TYPE_KEY)
    }
    add_custom_dir_to_path(custom, environ)
    return environ


def _custom(plan: Plan) -> str:
    return str(Path(plan.app_dir, FOLDER))


def _fingerprint(plan: Plan) -> _Fingerprint:
    """Return by what a change of the job's files shows: each one's name, size and time."""
    # The script's own folder may be one in which it works: of that it is what it may import.
    files = (
        [] if plan.program.module is not None else [plan.target, *map(str, Path(plan.target).parent.glob("*.py"))]
    )
    for folder, below, names in os.walk(_custom(plan)):
        # Importing writes these.
        below[:] = sorted(set(below) - {"__pycache__"})
        files += [os.path.join(folder, name) for name in names]  # noqa: PTH118 - many files, and pathlib is slower
    found = []
    for file in files:
        try:
            status = os.stat(file)  # noqa: PTH116 - as above
        except OSError:
            continue
        found.append((file, status.st_size, status.st_mtime_ns))
    return tuple(sorted(set(found)))
