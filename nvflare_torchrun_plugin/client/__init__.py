"""NVFlare's Client API for every rank of a torchrun job: ``import nvflare_torchrun_plugin.client as flare``.

The functions are those of ``nvflare.client``, under the same names and with the same meaning, but each rank may
call them. ``init()``, ``is_running()``, ``receive()`` and ``send()`` are for all ranks together: every rank calls
them, in the same order, and gets the same answer or the same error. The model is in memory once per node, and a
rank that writes to it writes to a copy of its own. Rank 0's result is the one that is sent.

In a process that torchrun has not started, this is the plain Client API.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any

import nvflare.client as _plain
import torch.distributed as _dist
from nvflare.client import AnalyticsDataType as AnalyticsDataType
from nvflare.client import FLModel as FLModel
from nvflare.client import IPCAgent as IPCAgent
from nvflare.client import ParamsType as ParamsType

from nvflare_torchrun_plugin.client import decorators as _decorators
from nvflare_torchrun_plugin.client import links as _links
from nvflare_torchrun_plugin.client.moments import Moments as _Moments
from nvflare_torchrun_plugin.client.session import Session as _Session
from nvflare_torchrun_plugin.client.sharded import full_params as full_params
from nvflare_torchrun_plugin.client.sharded import load_model as load_model
from nvflare_torchrun_plugin.client.spread import Spread as _Spread
from nvflare_torchrun_plugin.client.world import World as _World
from nvflare_torchrun_plugin.ranks import task_on_its_way as _task_on_its_way

_session: _Session | None = None
_beginnings = itertools.count()


def init(rank: str | int | None = None, config_file: str | None = None) -> Any:
    """Begin the session with NVFlare; every rank calls it, before or after ``init_process_group``.

    Args:
        rank: global rank; by default torchrun's ``RANK``, and nothing else is right under torchrun.
        config_file: as in ``nvflare.client.init``.

    Returns:
        NVFlare's context on rank 0, None on others. No function here needs it.

    Raises:
        ValueError: torchrun's variables do not add up, or ``rank`` is another one.
        RuntimeError: the ranks cannot reach each other, or one did not come within five minutes.

    What NVFlare raises on rank 0 is raised on every rank.
    """
    global _session
    world = _World.from_environ(os.environ)
    if world.size == 1:
        return _plain.init(rank, config_file)
    if _session is not None:
        # NVFlare warns, where its session is; elsewhere it would look for one.
        return _plain.init(rank, config_file) if _session.logs else None
    # What an init() that has failed left in the store would mislead the next one.
    beginning = next(_beginnings)
    if rank is not None and str(rank) != str(world.rank):
        raise ValueError(f"init(): rank is {rank!r}, but torchrun's RANK is {world.rank}")
    store, _, _ = next(_dist.rendezvous("env://", timeout=timedelta(seconds=_links.MEET_BOUND)))  # type: ignore[attr-defined]
    store = _dist.PrefixStore(f"{__name__}/{beginning}", store)  # type: ignore[attr-defined]  # both are documented
    links = _links.connect(world, store, os.environ.get("MASTER_ADDR", ""))
    session = _Session(world, links, _Spread(world, links, store), _Moments().tell)
    try:
        context = session.init(config_file)
    except BaseException:
        links.close()
        raise
    _session = session
    return context


def is_running(ctx: Any = None) -> bool:
    """Return whether there is, or will be, another task; every rank calls it. May wait for the next task."""
    return _plain.is_running(ctx) if _session is None else _session.is_running()


def receive(timeout: float | None = None, ctx: Any = None) -> FLModel | None:
    """Return the task's model, None when there will be no more; every rank calls it.

    Args:
        timeout: seconds to wait for the next task; default as long as it takes.
        ctx: as in ``nvflare.client``.
    """
    return _plain.receive(timeout, ctx) if _session is None else _session.receive(timeout)


def send(model: FLModel | None, clear_cache: bool = True, ctx: Any = None) -> None:
    """Send rank 0's model as the task's result; every rank calls it, others may give None.

    Args:
        model: the result.
        clear_cache: whether the parameters of this model, and of the received one, are let go afterwards.
        ctx: as in ``nvflare.client``.
    """
    if _session is None:
        _plain.send(model, clear_cache, ctx)
    else:
        _session.send(model, clear_cache)


def log(key: str, value: Any, data_type: AnalyticsDataType, ctx: Any = None, **kwargs: Any) -> Any:
    """Log a value, as ``nvflare.client.log``; other ranks than 0 may call it, and their values are not sent."""
    if _session is None or _session.logs:
        return _plain.log(key, value, data_type, ctx, **kwargs)
    return None


def is_train(ctx: Any = None) -> bool:
    """Return whether the current task is to train."""
    return _plain.is_train(ctx) if _session is None else _session.task.train


def is_evaluate(ctx: Any = None) -> bool:
    """Return whether the current task is to evaluate."""
    return _plain.is_evaluate(ctx) if _session is None else _session.task.evaluate


def is_submit_model(ctx: Any = None) -> bool:
    """Return whether the current task is to submit a model."""
    return _plain.is_submit_model(ctx) if _session is None else _session.task.submit_model


def get_task_name(ctx: Any = None) -> str:
    """Return the current task's name.

    Raises:
        RuntimeError: there is no task.
    """
    if _session is None:
        return str(_plain.get_task_name(ctx))
    if _session.task.name is None:
        raise RuntimeError("no current task")
    return _session.task.name


def system_info(ctx: Any = None) -> dict[str, Any]:
    """Return the site's name and the job's id, as ``nvflare.client.system_info``."""
    return dict(_plain.system_info(ctx) if _session is None else _session.site.system_info)


def get_config(ctx: Any = None) -> dict[str, Any]:
    """Return the Client API's configuration."""
    return dict(_plain.get_config(ctx) if _session is None else _session.site.config)


def get_job_id(ctx: Any = None) -> str:
    """Return the job's id."""
    return str(_plain.get_job_id(ctx)) if _session is None else _session.site.job_id


def get_site_name(ctx: Any = None) -> str:
    """Return the site's name."""
    return str(_plain.get_site_name(ctx)) if _session is None else _session.site.site_name


def shutdown(ctx: Any = None) -> None:
    """End this rank's part in the session; ranks that still wait for it get an error.

    With a launch per task, a task that is still on its way to rank 0 comes first, for ten seconds at most.
    """
    if _session is None:
        _task_on_its_way.let_arrive(_plain)
        _plain.shutdown(ctx)
    else:
        _session.shutdown()


train, evaluate = _decorators.make(receive, send, is_train)
