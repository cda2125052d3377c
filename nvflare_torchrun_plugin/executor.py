"""The executor: each FL task of a job becomes one torchrun job over the site's node group."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.utils.task_utils import materialize_lazy_download_refs
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor, ExecutionMode
from nvflare.client.config import ExchangeFormat, TransferType

from nvflare_torchrun_plugin import node_group, relay
from nvflare_torchrun_plugin.contract import RUN_ID
from nvflare_torchrun_plugin.description import group_choice, group_description, job_meta, site_file
from nvflare_torchrun_plugin.description.group_description import NodeGroup
from nvflare_torchrun_plugin.group_values import NodeGroupError, parse_env
from nvflare_torchrun_plugin.job import end_signals, return_code
from nvflare_torchrun_plugin.job.job_run import JobRun
from nvflare_torchrun_plugin.job.retries import RetryPolicy
from nvflare_torchrun_plugin.job.warm_start import WarmStart
from nvflare_torchrun_plugin.joining.reception import Reception, ReceptionError
from nvflare_torchrun_plugin.launching import node_locks, program
from nvflare_torchrun_plugin.launching.node_locks import BusyError, NodeLocks
from nvflare_torchrun_plugin.launching.planning import Options, Plan, PlanError
from nvflare_torchrun_plugin.launching.program import ProgramError
from nvflare_torchrun_plugin.supervision import given_up
from nvflare_torchrun_plugin.supervision.attempt import Attempt
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.supervisor import Supervisor
from nvflare_torchrun_plugin.verdict import Cause, Verdict

_MISTAKES = (NodeGroupError, ProgramError, PlanError, BusyError, ReceptionError)
_NAMING = 10.0
"""Seconds that a run waits for nodes that dial in to tell their names; a task may wait for them longer."""
_NAMED_WITHIN = 0.8
"""Part of the join timeout after which a node that has not dialled in is given up."""
_POLL = 0.1
"""Seconds between two looks at the abort signal."""


class TorchrunExecutor(ClientAPIExecutor):  # type: ignore[misc, unused-ignore]
    """Runs each task as a torchrun job over the node group; NVFlare's Client API carries the model.

    NVFlare's own ``external_process`` backend stays in charge of the session, the model and the abort: the
    command that it starts is a relay, on whose behalf the supervisor starts the group.
    """

    def __init__(
        self,
        script: str | None = None,
        module: str | None = None,
        script_args: str | Sequence[str] = "",
        nnodes: int | str | None = None,
        nproc_per_node: int | str | None = None,
        launch_once: bool = False,
        env: Mapping[str, str] | None = None,
        torchrun_args: str | Sequence[str] | None = None,
        join_timeout: int | None = None,
        node_timeout: float = 30.0,
        hang_timeout: float | None = None,
        log_ranks: str | Sequence[int] = "all",
        max_task_attempts: int = 1,
        retry_on: str = "infrastructure",
        warm_start: bool | Mapping[str, Any] = False,
        launch_timeout: float | None = 300.0,
        shutdown_timeout: float | None = None,
        stop_grace_period: float = 4.0,
        heartbeat_interval: float = 5.0,
        heartbeat_timeout: float = 30.0,
        task_wait_timeout: float | None = None,
        result_wait_timeout: float | None = None,
        train_task_name: str = AppConstants.TASK_TRAIN,
        evaluate_task_name: str = AppConstants.TASK_VALIDATION,
        submit_model_task_name: str = AppConstants.TASK_SUBMIT_MODEL,
        train_with_evaluation: bool = False,
        params_exchange_format: ExchangeFormat = ExchangeFormat.RAW,
        server_expected_format: ExchangeFormat = ExchangeFormat.NUMPY,
        params_transfer_type: TransferType = TransferType.FULL,
        memory_gc_rounds: int = 0,
        cuda_empty_cache: bool = False,
    ) -> None:
        """Check and keep the arguments.

        Args:
            script: Python file that each rank runs, relative to the job's ``custom`` or app folder, or
                absolute.
            module: name of a module to run instead, as ``python -m`` does.
            script_args: its arguments, as one string or a list; ``${secret:NAME}`` is replaced on the site.
            nnodes: nodes wanted, ``2`` or ``"1:4"`` (torchrun's form); default all that the site offers.
            nproc_per_node: processes per node, a number or torchrun's ``auto``, ``gpu``, ``cpu``; default
                what the node offers, else ``auto``.
            launch_once: one launch for the whole job instead of one for each task.
            env: environment variables for the ranks; ``${secret:NAME}`` is replaced on the site.
            torchrun_args: further options of torchrun (``--tee``, ``--log-dir``, ...), not those that the
                group decides.
            join_timeout: seconds for the nodes to meet; default 60 less than ``launch_timeout``, but at
                least half of it (600 when there is none).
            node_timeout: seconds without a sign of life after which a node is lost, and after which a node that
                hears nothing ends its ranks; for as long a rank may be stopped (SIGSTOP).
            hang_timeout: seconds without a line from any rank after which the task fails, with the Python stacks
                of its ranks; default never. It needs Python's fault handler (``PYTHONFAULTHANDLER``) in the ranks.
            log_ranks: ``all``, or the global ranks whose lines go to the client's log; the files hold all.
            max_task_attempts: most attempts of a task in which ranks ran; above 1, the task's model is kept in the
                client job until the task is done. An attempt that fails before any rank ran is repeated anyway,
                twice at most.
            retry_on: what is tried again: ``infrastructure`` (a node is lost, a rank is killed from outside,
                NVFlare hears nothing of rank 0 any more), ``any``, ``never``.
            warm_start: whether the group of the next task is started while the current one trains, up to the point
                where its ranks have imported what the script needs and wait. True, or a mapping with ``preload``
                (names of modules; default those that the script imports at its top) and ``max_age`` (seconds that
                a group may wait, default 3600). With ``launch_once`` there is nothing to prepare: NVFlare starts
                the one group when the run starts.
            stop_grace_period: seconds between SIGTERM and SIGKILL for the ranks (NVFlare's default is 30).

        All other arguments, with their defaults, are those of NVFlare's ``ClientAPIExecutor``.

        Raises:
            ValueError: an argument is wrong; the message names it and its value.
        """
        # A job file made by `nvflare job create -f key=3` holds numbers where texts are meant.
        if isinstance(script_args, (int, float)) and not isinstance(script_args, bool):
            script_args = str(script_args)
        # To Python, the text "false" is true.
        if not isinstance(launch_once, bool):
            raise ValueError(f"launch_once is {launch_once!r}: must be true or false")
        super().__init__(
            execution_mode=ExecutionMode.EXTERNAL_PROCESS,
            command=[sys.executable, "-m", relay.__name__],
            launch_once=launch_once,
            launch_timeout=launch_timeout,
            shutdown_timeout=shutdown_timeout,
            stop_grace_period=stop_grace_period,
            heartbeat_interval=heartbeat_interval,
            heartbeat_timeout=heartbeat_timeout,
            task_wait_timeout=task_wait_timeout,
            result_wait_timeout=result_wait_timeout,
            train_task_name=train_task_name,
            evaluate_task_name=evaluate_task_name,
            submit_model_task_name=submit_model_task_name,
            train_with_evaluation=train_with_evaluation,
            params_exchange_format=params_exchange_format,
            server_expected_format=server_expected_format,
            params_transfer_type=params_transfer_type,
            memory_gc_rounds=memory_gc_rounds,
            cuda_empty_cache=cuda_empty_cache,
        )
        # Unchanged and under these names: so the Job API finds them when it exports a job.
        self._script = script
        self._module = module
        self._script_args = script_args
        self._nnodes = nnodes
        self._nproc_per_node = nproc_per_node
        self._env = env
        self._torchrun_args = torchrun_args
        self._join_timeout = join_timeout
        self._node_timeout = node_timeout
        self._hang_timeout = hang_timeout
        self._log_ranks = log_ranks
        self._max_task_attempts = max_task_attempts
        self._retry_on = retry_on
        self._warm_start = warm_start
        self._warm = WarmStart.parse(warm_start)
        self._policy = RetryPolicy.parse(max_task_attempts, retry_on, launch_once=launch_once)
        self._program = program.parse(script, module, script_args, parse_env(env, "executor argument env"))
        self._options = Options.parse(
            torchrun_args=torchrun_args,
            join_timeout=join_timeout,
            launch_timeout=launch_timeout,
            node_timeout=node_timeout,
            hang_timeout=hang_timeout,
            grace=stop_grace_period,
            log_ranks=log_ranks,
        )
        group_choice.parse_wish(nnodes, nproc_per_node, {}, "")
        self._run: JobRun | None = None
        self._problem: str | None = None
        self._said: str | None = None
        self._abort_signal: Signal | None = None
        self._told_to_end = False

    def plan(
        self,
        environ: Mapping[str, str],
        *,
        site: str,
        meta: Mapping[str, object],
        app_dir: Path,
        custom_dir: Path,
        site_config_dir: Path,
        described: object,
        log_dir: Path,
    ) -> Plan:
        """Return what the job would run at the site; nothing is started, and NVFlare need not run.

        Args:
            environ: the environment of the client job.
            site: the site's name.
            meta: the job's.
            app_dir: where the job's app is.
            custom_dir: where its code is.
            site_config_dir: the folder ``local`` of the site's workspace.
            described: the node group that a component of the job describes, None for none.
            log_dir: gets the ranks' files.

        Raises:
            NodeGroupError, ProgramError: it makes no sense, or the job may not do this.
        """
        target = self._program.find([str(custom_dir), str(app_dir)])
        chosen = group_choice.choose(
            environ,
            site_file.read_site_file(str(site_config_dir / site_file.NAME), environ),
            described,
            group_choice.parse_wish(self._nnodes, self._nproc_per_node, meta, site),
            byoc=job_meta.has_byoc(meta),
            launch_once=self._launch_once,
            script=target if self._program.module is None else None,
            module=self._program.module,
            job_env=bool(self._program.env),
            job_options=bool(self._options.torchrun_args),
            job_preload=self._warm is not None and bool(self._warm.preload),
            app_dir=str(app_dir),
        )
        return Plan(chosen, self._program, target, str(app_dir), str(log_dir), self._options)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Prepare the group when the run starts, and leave nothing when it ends."""
        if event_type == EventType.START_RUN:
            try:
                self._run = self._begin_run(fl_ctx)
            except _MISTAKES as e:
                # The tasks fail with the sentence; a run without a backend needs no more of NVFlare's start.
                self._problem = str(e)
                self.log_error(fl_ctx, self._problem)
                return
            super().handle_event(event_type, fl_ctx)
            self._report_failed_start(fl_ctx)
            return
        if event_type in (EventType.ABORT_TASK, EventType.END_RUN):
            self._told_to_end = True
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.END_RUN:
            self._end_run()

    def log_error(self, fl_ctx: FLContext, msg: str, fire_event: bool = True) -> None:
        """Log the message; NVFlare's backend also says so, and nowhere else, why it gives up on a task."""
        super().log_error(fl_ctx, msg, fire_event)
        # Only now: who hears of it may have errors of its own.
        self._said = msg

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run the task on the group and return its result, or a reply with the code of what went wrong."""
        run = self._run
        if run is None:
            problem = self._problem or "the run has not started"
            self.log_error(fl_ctx, f"task {task_name!r} failed: {problem}")
            return make_reply(return_code.BY_CAUSE["configuration"])
        self._abort_signal, self._told_to_end = abort_signal, False
        received: list[str] = []

        def end(name: str) -> None:
            received.append(name)
            run.stop(f"the client job got {name}")
            fl_ctx.get_prop(ReservedKey.RUN_ABORT_SIGNAL, abort_signal).trigger(name)

        try:
            with end_signals.caught(end):
                return self._try(run, task_name, shareable, fl_ctx, abort_signal)
        finally:
            for name in received:
                self._end_for_signal(name, fl_ctx)

    def _try(
        self, run: JobRun, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Run the task, as often as its job allows."""
        if self._max_task_attempts > 1:
            # A model that is still a reference is served once; a second attempt needs it here.
            cell = fl_ctx.get_engine().get_cell()
            shareable = materialize_lazy_download_refs(shareable, cell, abort_signal)
        failed: list[Verdict] = []
        told = {"task": task_name, "round": shareable.get_header(AppConstants.CURRENT_ROUND)}
        run.tasks.write("task", site=fl_ctx.get_identity_name(), job=fl_ctx.get_job_id(), **told)
        while True:
            try:
                attempt = run.attempt_for_task(lambda: abort_signal.triggered)
            except _MISTAKES as e:
                self.log_error(fl_ctx, f"task {task_name!r} failed: {e}")
                # A busy node may be free the next time.
                cause: Cause = "infrastructure" if isinstance(e, BusyError) else "configuration"
                run.tasks.write("reply", group=None, code=return_code.BY_CAUSE[cause])
                return make_reply(return_code.BY_CAUSE[cause])
            self._said = None
            run.tasks.write("attempt", group=attempt.launch.name)
            try:
                reply = super().execute(task_name, shareable, fl_ctx, abort_signal)
            except BaseException as e:
                # Nobody would end it before the run ends, and its nodes would be in use until then.
                attempt.stop(f"NVFlare's executor has failed: {e!r}")
                raise
            code = reply.get_return_code(ReturnCode.OK)
            run.tasks.write("reply", group=attempt.launch.name, code=code)
            if code == ReturnCode.OK:
                attempt.accept()
                return reply
            verdict = self._conclude(run, attempt, task_name, code, fl_ctx, abort_signal)
            pause = None
            if verdict is not None and not abort_signal.triggered:
                failed.append(verdict)
                pause = self._policy.pause(failed)
            if pause is None or not self._wait(pause, abort_signal):
                return make_reply(return_code.of(verdict, aborted=abort_signal.triggered, otherwise=code))
            self.log_warning(fl_ctx, f"task {task_name!r}: attempt {len(failed) + 1} begins")

    def _end_for_signal(self, name: str, fl_ctx: FLContext) -> None:
        """End the run, and tell why: here the log, and NVFlare's client by the exit code that it looks for.

        The process ends well, and without that code the server would wait for this site's result.
        """
        self._problem = f"the client job got {name}: the run ends at this site"
        self.log_error(fl_ctx, self._problem)
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        path = Path(workspace.get_run_dir(fl_ctx.get_job_id()), FLMetaKey.PROCESS_RC_FILE)
        try:
            path.write_text(f"{JobReturnCode.ABORTED:d}", encoding="utf-8")
        except OSError as e:
            self.log_error(fl_ctx, f"cannot write {path}: {e}")
        # Who has sent the signal may have less patience than NVFlare's own end takes.
        self._end_run()

    def _end_run(self) -> None:
        if self._run is not None:
            self._run.end()
            self._run = None

    @staticmethod
    def _wait(seconds: float, abort_signal: Signal) -> bool:
        """Wait; return whether it went on without an abort."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not abort_signal.triggered:
            time.sleep(_POLL)
        return not abort_signal.triggered

    def _begin_run(self, fl_ctx: FLContext) -> JobRun:
        workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
        job_id, site = fl_ctx.get_job_id(), fl_ctx.get_identity_name()
        plan = self.plan(
            os.environ,
            site=site,
            meta=job_meta.of(fl_ctx),
            app_dir=Path(workspace.get_app_dir(job_id)).absolute(),
            custom_dir=Path(workspace.get_app_custom_dir(job_id)),
            site_config_dir=Path(workspace.get_site_config_dir()),
            described=node_group.property_of(fl_ctx),
            log_dir=Path(workspace.get_run_dir(job_id), "torchrun").absolute(),
        )
        chosen = plan.group
        fl_ctx.set_prop(group_description.PROPERTY, chosen.to_property(), private=True, sticky=True)
        try:
            supervisor = Supervisor(self.logger, self._given_up)
        except OSError as e:
            raise PlanError(f"the client job cannot have a private directory for its sockets: {e}") from None
        group, reception = self._receive(supervisor, chosen, plan.app_dir)
        hosts = ", ".join(f"{node.host} x {node.nproc_per_node}" for node in group.nodes)
        self.log_info(
            fl_ctx,
            f"node group of {chosen.nnodes} ({hosts}), transport {chosen.transport}, from {chosen.source}",
        )
        plan = dataclasses.replace(plan, group=group)
        locks = str(Path(workspace.get_root_dir(), node_locks.FOLDER).absolute())
        run = JobRun.begin(
            plan,
            supervisor,
            self._launch_once,
            NodeLocks(locks, f"job {job_id}", self.logger.info),
            self.logger.warning,
            self._warm,
            self.logger.info,
        )
        if reception is not None:
            reception.returned = run.node_returned
        return run

    def _receive(
        self, supervisor: Supervisor, chosen: NodeGroup, app_dir: str
    ) -> tuple[NodeGroup, Reception | None]:
        """Let nodes join that dial in; return the group with what is known of them now."""
        if chosen.join is None:
            return chosen, None
        # A node that is not there is to be named before the launch gives up on it.
        patience = self._options.join_timeout * _NAMED_WITHIN
        reception = Reception(chosen, chosen.join, os.environ.get(RUN_ID), app_dir, patience, self.logger)
        try:
            supervisor.attend(reception)
            return supervisor.ask(reception.meet(_NAMING), 2 * _NAMING), reception
        except BaseException:
            supervisor.close("the run cannot begin", _NAMING)
            raise

    def _given_up(self) -> GivenUp | None:
        """NVFlare has ended the relay: return why it gave up on rank 0, None if it was told to end the task."""
        aborted = self._abort_signal is not None and self._abort_signal.triggered
        return None if aborted or self._told_to_end else given_up.reason(self._said)

    def _report_failed_start(self, fl_ctx: FLContext) -> None:
        """With launch once the group starts here, and NVFlare says only that it could not."""
        attempt = self._run.attempt if self._run is not None else None
        if attempt is not None and attempt.decided.done():
            verdict = attempt.wait(0)
            if verdict is not None:
                self.log_error(fl_ctx, verdict.text())

    def _conclude(
        self, run: JobRun, attempt: Attempt, task_name: str, code: str, fl_ctx: FLContext, abort_signal: Signal
    ) -> Verdict | None:
        """The attempt has no result: see to it that its group is gone, say why, and return its verdict."""
        if not self._launch_once:
            attempt.stop(f"the task ended with {code}")
        elif not attempt.ends:
            return None
        try:
            verdict = attempt.wait(run.bound)
        except TimeoutError as e:
            self.log_error(fl_ctx, f"task {task_name!r}: {e}")
            return None
        if verdict is None:
            text = "its group was never started"
        elif verdict.failure is None and verdict.outcome == "ok":
            text = "every rank ended with exit code 0, but none has sent a result"
        else:
            text = verdict.text()
        if abort_signal.triggered:
            self.log_info(fl_ctx, f"task {task_name!r} aborted: {text}")
        else:
            self.log_error(fl_ctx, f"task {task_name!r} failed: {text}")
        return verdict
