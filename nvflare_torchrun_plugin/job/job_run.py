"""What lives from a job's start to its end at a site: its attempts, the locks on its nodes, their health."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path

from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.description.group_description import Node
from nvflare_torchrun_plugin.job.retries import NodeHealth
from nvflare_torchrun_plugin.job.warm_groups import HEAD_START, WarmGroups
from nvflare_torchrun_plugin.job.warm_start import WarmStart
from nvflare_torchrun_plugin.launching import planning
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.launching.node_locks import NodeLocks
from nvflare_torchrun_plugin.launching.planning import Plan, PlanError
from nvflare_torchrun_plugin.launching.ports import Reservation
from nvflare_torchrun_plugin.supervision import group
from nvflare_torchrun_plugin.supervision.attempt import Attempt
from nvflare_torchrun_plugin.supervision.events import TASKS_FILE, EventLog
from nvflare_torchrun_plugin.supervision.group_ahead import Ahead
from nvflare_torchrun_plugin.supervisor import Supervisor
from nvflare_torchrun_plugin.verdict import Verdict

_POLL = 0.1
"""Seconds between two looks at hosts on which the end of an attempt is still seen to."""


class JobRun:
    """One run of a job.

    Attributes:
        attempt: the latest one, None before the first.
        tasks: where it is told when each task came and how it ended.
    """

    def __init__(
        self,
        plan: Plan,
        supervisor: Supervisor,
        launch_once: bool,
        locks: NodeLocks,
        warn: Callable[[str], None],
        warm_start: WarmStart | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.attempt: Attempt | None = None
        self.tasks = EventLog(Path(plan.log_dir, TASKS_FILE), warn)
        self._warn = warn
        self._plan = plan
        self._supervisor = supervisor
        self._launch_once = launch_once
        self._locks = locks
        self._health = NodeHealth(time.monotonic)
        self._numbers = itertools.count(1)
        self._tell = tell
        self._lock = threading.Lock()
        self._noted: set[tuple[str, str]] = set()
        self._unlearnt: set[Attempt] = set()
        self._unended: set[Attempt | Ahead] = set()
        self._warm = (
            WarmGroups(
                plan,
                supervisor,
                warm_start,
                number=lambda: next(self._numbers),
                sitting_out=self._sitting_out,
                learn=self._learn_of_waiting,
            )
            if warm_start is not None and not launch_once
            else None
        )

    @classmethod
    def begin(
        cls,
        plan: Plan,
        supervisor: Supervisor,
        launch_once: bool,
        locks: NodeLocks,
        warn: Callable[[str], None],
        warm_start: WarmStart | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> JobRun:
        """Begin the run; with launch once, arm the launch that serves the whole job.

        With warm start, the first task's group is started now; with launch once NVFlare does that itself.

        Args:
            plan: what all attempts have in common.
            supervisor: starts the groups; ended with the run.
            launch_once: whether one launch serves all tasks.
            locks: those of the nodes, for groups that span several hosts.
            warn: gets a sentence for each node that an attempt does without from the start.
            warm_start: how groups are started ahead of their tasks; None: they are not.
            tell: gets a sentence for each task that starts cold all the same.

        Raises:
            PlanError, ProgramError, BusyError: it cannot be planned; the message is one clear sentence.
        """
        # NVFlare's backend hands this process's environment to the relay, which takes the variable out again.
        os.environ[relay.DIR_VARIABLE] = supervisor.directory
        run = cls(plan, supervisor, launch_once, locks, warn, warm_start, tell)
        if run._warm is not None:
            run._warm.prepare()
        if launch_once:
            try:
                run.attempt = run._arm(lambda: False)
            except BaseException:
                run.end()
                raise
        return run

    @property
    def bound(self) -> float:
        """Seconds in which a group that was told to end must be gone."""
        return self._plan.options.grace + group.END_BOUND

    def attempt_for_task(self, cancelled: Callable[[], bool]) -> Attempt:
        """Return the attempt that serves the next task.

        Args:
            cancelled: whether to stop waiting for busy nodes.

        Raises:
            PlanError, ProgramError, BusyError: it cannot be planned; the message is one clear sentence.
        """
        if self.attempt is not None and self._launch_once:
            self.attempt.resume()
        else:
            self.attempt = self._arm(cancelled)
        return self.attempt

    def node_returned(self, host: str) -> None:
        """A node that was lost has been started anew; any thread may call it."""
        self._health.returned(host)

    def stop(self, reason: str) -> None:
        """End the group of the latest attempt; a signal handler may call it."""
        if self.attempt is not None:
            self.attempt.stop(reason)

    def end(self) -> None:
        """End all groups and the supervisor."""
        if self._warm is not None:
            self._warm.close()
        self._supervisor.close("the run ended", self.bound)
        self.tasks.close()
        os.environ.pop(relay.DIR_VARIABLE, None)

    def _sitting_out(self) -> list[Node]:
        return self._health.sitting_out(self._plan.group.nodes, self._plan.group.least, self._unswept())

    def _unswept(self) -> set[str]:
        """Return the hosts on which the end of a group is decided, but still seen to."""
        return {host for one in tuple(self._unended) for host in one.unswept}

    def _learn_of_waiting(self, ahead: Ahead) -> None:
        """A group that was started ahead is there, or has ended; if a task had it, the attempt tells of its end.

        Where a rank has been killed as it waited the node is well, and the task that starts cold may have it.
        """
        self._note_nodes(ahead.launch, [*ahead.left_out, *ahead.silent], ahead.began)
        verdict = None
        if ahead.decided.done() and not ahead.taken:
            verdict = ahead.decided.result()
            self._unended.add(ahead)
            ahead.ended.add_done_callback(lambda _: self._unended.discard(ahead))
        failure = verdict.failure if verdict is not None else None
        if (
            failure is not None
            and failure.rank is None
            and failure.cause == "infrastructure"
            and failure.node_rank > 0
        ):
            self._note_nodes(ahead.launch, [(failure.host, failure.what)], ahead.began)

    def _take_ahead(self) -> Ahead | None:
        if self._warm is None:
            return None
        ahead = self._warm.take()
        if isinstance(ahead, str):
            self._tell(f"the task starts cold: {ahead}")
            return None
        return ahead

    def _arm(self, cancelled: Callable[[], bool]) -> Attempt:
        if self.attempt is not None:
            # It may still serve its result; and who waits for its end may be here before its callbacks are run.
            self._note(self.attempt)
        ahead = self._take_ahead()
        without = self._without()
        self._wait_for_sweeps(without, cancelled)
        ports: list[Callable[[], None]] = []
        locks: list[Callable[[], None]] = []

        def plan() -> Launch:
            try:
                launch, reservation = self._plan_launch(without)
            except PlanError:
                # A group that has just been dropped may still have the only port of its range.
                if self._warm is None or not self._warm.dropped_ends(self.bound):
                    raise
                launch, reservation = self._plan_launch(without)
            if reservation is not None:
                ports.append(reservation.release)
            return launch

        def cold() -> Launch:
            nonlocal without
            if ahead is not None:
                self._learn_of_waiting(ahead)
            without = self._without()
            try:
                launch = plan()
                lock(launch, lambda: cancelled() or attempt.decided.done())
            finally:
                if attempt.decided.done():
                    # The task went away while this was being planned: what it had was given back before.
                    _give_back(ports)
                    _give_back(locks)
            return launch

        def lock(launch: Launch, cancelled: Callable[[], bool]) -> None:
            """Keep other jobs from the nodes; what this host has, nobody but NVFlare arbitrates."""
            described = self._plan.group
            if launch.spans_hosts and described.on_busy != "share" and not locks:
                timeout = described.busy_timeout if described.on_busy == "wait" else 0.0
                self._locks.acquire([node.host for node in described.nodes], timeout, cancelled)
                locks.append(self._locks.release)

        try:
            launch = plan() if ahead is None else ahead.launch
            lock(launch, cancelled)
            attempt = self._supervisor.arm(launch) if ahead is None else self._supervisor.arm_ahead(ahead, cold)
        except BaseException:
            if ahead is not None:
                ahead.stop("its task cannot begin")
            _give_back(ports)
            _give_back(locks)
            raise

        self._unlearnt.add(attempt)
        self._unended.add(attempt)

        def let_next(_decided: Future[Verdict | None]) -> None:
            self._note(attempt)
            _give_back(ports)

        def release(_ended: Future[None]) -> None:
            self._unended.discard(attempt)
            _give_back(locks)

        attempt.decided.add_done_callback(let_next)
        attempt.ended.add_done_callback(release)
        if self._warm is not None:
            warm = self._warm
            attempt.trains.add_done_callback(lambda _: warm.prepare(HEAD_START))
        return attempt

    def _without(self) -> list[Node]:
        """Return the nodes that sit out now, and tell of each why."""
        without = self._sitting_out()
        for node in without:
            self._warn(f"node {node.host} {self._health.reason(node.host)}")
        return without

    def _wait_for_sweeps(self, without: list[Node], cancelled: Callable[[], bool]) -> None:
        """Wait until no node that the next attempt needs has anything left of an earlier one."""
        needed = {node.host for node in self._plan.group.nodes} - {node.host for node in without}
        deadline = time.monotonic() + self.bound
        while needed & self._unswept() and time.monotonic() < deadline and not cancelled():
            time.sleep(_POLL)

    def _plan_launch(self, without: list[Node]) -> tuple[Launch, Reservation | None]:
        return planning.launch(self._plan, next(self._numbers), without, serves_job=self._launch_once)

    def _note_nodes(self, launch: Launch, failed: Iterable[tuple[str, str]], began: float) -> None:
        """Let each node sit out for a while, once for each launch."""
        for host, why in failed:
            with self._lock:
                known = (launch.name, host) in self._noted
                self._noted.add((launch.name, host))
            if not known:
                self._health.failed(host, why, began)

    def _note(self, attempt: Attempt) -> None:
        """Take note, once each, of the nodes that the attempt did without and of how it ended, if it has."""
        self._note_nodes(attempt.launch, attempt.left_out, attempt.began)
        if attempt.decided.done() and _take(self._unlearnt, attempt):
            verdict = attempt.decided.result()
            if verdict is not None:
                hosts = [member.host for member in attempt.launch.members]
                self._health.learn(verdict, hosts, attempt.began)


def _give_back(taken: list[Callable[[], None]]) -> None:
    """Give back, once, what an attempt has taken; two threads may come to it."""
    with contextlib.suppress(IndexError):
        while True:
            taken.pop()()


def _take(attempts: set[Attempt], attempt: Attempt) -> bool:
    """Take the attempt out of the set; return whether it was there. Two threads cannot both have it."""
    try:
        attempts.remove(attempt)
    except KeyError:
        return False
    return True
