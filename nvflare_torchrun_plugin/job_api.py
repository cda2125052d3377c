"""The executor in NVFlare's Job API: for jobs put together by hand, and for NVFlare's recipes."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME, JobMetaKey
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor, ExecutionMode
from nvflare.fuel.utils.constants import FrameworkType
from nvflare.fuel.utils.secret_utils import has_secret_refs
from nvflare.job_config.api import ClientApp, FedJob
from nvflare.job_config.script_runner import ScriptRunner
from nvflare.recipe.spec import Recipe

from nvflare_torchrun_plugin import node_agent, torchrun_node
from nvflare_torchrun_plugin.executor import TorchrunExecutor
from nvflare_torchrun_plugin.node_group import NodeGroupProvider

_PACKAGE = "nvflare_torchrun_plugin"
_OTHER_NODES = "additional_node_command"
_NODE_GROUP_ID = "node_group"
_R = TypeVar("_R", bound=Recipe)


class TorchrunRunner:
    """Adds a script to a job, to be run by torchrun over a site's node group: ``job.to(runner, "site-1")``.

    It takes the place of NVFlare's ``ScriptRunner``.
    """

    def __init__(
        self,
        script: str,
        script_args: str | Sequence[str] = "",
        nnodes: int | str | None = None,
        nproc_per_node: int | str | None = None,
        framework: FrameworkType = FrameworkType.PYTORCH,
        node_group: NodeGroupProvider | None = None,
        **options: Any,
    ) -> None:
        """Check and keep the arguments.

        Args:
            script: path of a Python file here; it travels with the job.
            script_args: its arguments, as one string or a list.
            nnodes: nodes wanted, ``2`` or ``"1:4"``; default all that the site offers.
            nproc_per_node: processes per node, a number or torchrun's ``auto``, ``gpu``, ``cpu``.
            framework: whose parameters the script takes and gives; decides ``params_exchange_format``.
            node_group: nodes that the job brings along; default those of the site.
            options: further arguments of ``TorchrunExecutor``.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it and its value.
        """
        self._script = script
        self._node_group = node_group
        self._arguments: dict[str, Any] = {
            # As ScriptRunner does: an absolute path is one of this machine, and its file's name the job's.
            "script": os.path.basename(script) if os.path.isabs(script) else script,  # noqa: PTH117, PTH119
            "script_args": script_args,
            "nnodes": nnodes,
            "nproc_per_node": nproc_per_node,
            # Of all frameworks that NVFlare knows it knows the format, and refuses others.
            "params_exchange_format": ScriptRunner(script, framework=framework)._params_exchange_format,
            **options,
        }
        TorchrunExecutor(**self._arguments)

    def add_to_fed_job(self, job: FedJob, ctx: Any, **kwargs: Any) -> dict[str, Any]:
        """Add the executor, the script and the nodes; NVFlare calls it from ``job.to()``.

        Args:
            job: the job.
            ctx: where in it.
            kwargs: ``tasks``: names of the tasks that it is for; default all.

        Raises:
            ValueError: the other nodes that NVFlare is to start cannot run the script.
        """
        job.check_kwargs(args_to_check=kwargs, args_expected={"tasks": False})
        executor = TorchrunExecutor(**self._arguments)
        _fill_other_nodes(job, ctx.target, executor)
        job.add_executor(executor, tasks=kwargs.get("tasks", ["*"]), ctx=ctx)
        job.add_resources(resources=[self._script], ctx=ctx)
        if self._node_group is not None:
            job.add_component(_NODE_GROUP_ID, self._node_group, ctx)
        _leave_out_our_sources(job)
        return {}


def use_torchrun(recipe: _R, node_group: NodeGroupProvider | None = None, **options: Any) -> _R:
    """Let the recipe's clients run its script by torchrun over the site's node group; return the recipe.

    Call it after ``set_per_site_config``, and before ``execute`` or ``export``.

    Args:
        recipe: one of NVFlare's whose clients run a script (``FedAvgRecipe``, ``SwarmLearningRecipe``, ...), made
            without ``launch_external_process``: how to launch is said here.
        node_group: nodes that the job brings along; default those of the site.
        options: further arguments of ``TorchrunExecutor`` (``nnodes``, ``nproc_per_node``, ...).

    Raises:
        ValueError: no client of the recipe runs a script, or one launches it by itself.
    """
    found = False
    for target, app in _client_apps(recipe):
        for entry in app.get_app_config().executors:
            if type(entry.executor) is ClientAPIExecutor:
                entry.executor = _in_place_of(entry.executor, options)
                _fill_other_nodes(recipe._job, target, entry.executor)
                found = True
        if node_group is not None:
            app.add_component(node_group, _NODE_GROUP_ID)
    if not found:
        raise ValueError(f"no client of the recipe {recipe.name!r} runs a script")
    _leave_out_our_sources(recipe._job)
    return recipe


def _client_apps(recipe: Recipe) -> Iterator[tuple[str, ClientApp]]:
    """Yield each client app of the recipe with its site.

    NVFlare has no public way to them; this is the one place that goes another, and the recipes' tests fail when
    it is closed.
    """
    recipe._ensure_client_apps_prepared()
    for target, app in recipe._job._deploy_map.items():
        if isinstance(app, ClientApp):
            yield target, app


def _in_place_of(executor: ClientAPIExecutor, options: Mapping[str, Any]) -> TorchrunExecutor:
    # NVFlare's components keep their arguments under these names, which its export of jobs relies on.
    if executor._execution_mode != ExecutionMode.IN_PROCESS:
        raise ValueError("make the recipe without launch_external_process: use_torchrun() says how to launch")
    names = set(inspect.signature(TorchrunExecutor).parameters) - {"launch_once", "stop_grace_period"}
    kept = {name: getattr(executor, f"_{name}") for name in names if hasattr(executor, f"_{name}")}
    script = {"script": executor._task_script_path, "script_args": executor._task_script_args}
    return TorchrunExecutor(**{**kept, **script, **options})


def _fill_other_nodes(job: FedJob, target: str, executor: TorchrunExecutor) -> None:
    """Let the nodes that NVFlare starts beside a client job (its Slurm launcher does) run what they are there for.

    With one launch for the whole job that is our translator. With processes for each task they dial in, which the
    site's file or the job's node group must say as well (transport ``join``).
    """
    meta = job.job.meta_props
    spec = meta.get(JobMetaKey.JOB_LAUNCHER_SPEC.value) if isinstance(meta, dict) else None
    for site, launchers in (spec or {}).items():
        if site in ("default", SERVER_SITE_NAME) or target not in (ALL_SITES, site):
            continue
        for launcher in launchers.values():
            nodes = launcher.get("nodes") if isinstance(launcher, dict) else None
            if isinstance(nodes, int) and nodes > 1 and _OTHER_NODES not in launcher:
                launcher[_OTHER_NODES] = _other_nodes_command(executor, site)


def _other_nodes_command(executor: TorchrunExecutor, site: str) -> str:
    if not executor._launch_once:
        # They dial in, and hear of the rest with the orders for each task.
        return shlex.join(["python3", "-m", node_agent.__name__, "--join"])
    words = ["python3", "-m", torchrun_node.__name__]
    if executor._nproc_per_node is not None:
        words += ["--nproc-per-node", str(executor._nproc_per_node)]
    if executor._torchrun_args is not None:
        words += _words(executor._torchrun_args)
    words += ["-m", executor._module] if executor._module else [f"custom/{executor._script}"]
    words += _words(executor._script_args)
    if any(has_secret_refs(word) for word in words):
        raise ValueError(
            f"launcher_spec of {site!r} lets NVFlare start several nodes, by a command line that their users can "
            f"read: script_args must hold no secret there; or set {_OTHER_NODES} yourself"
        )
    return shlex.join(words)


def _words(arguments: str | Sequence[str]) -> list[str]:
    return shlex.split(arguments) if isinstance(arguments, str) else list(arguments)


def _leave_out_our_sources(job: FedJob) -> None:
    """The sites have the package installed: its sources need not travel with the job."""
    job.set_app_packages([*(getattr(job.job, "app_packages", None) or []), _PACKAGE])
