"""What a job's folder says of one site: its executor as NVFlare would make it, and the node group it brings."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..group_values import check_keys
from .output import RefusedError

if TYPE_CHECKING:
    from ..executor import TorchrunExecutor

__all__ = ["JobApp", "read"]


@dataclass(frozen=True)
class JobApp:
    """A job's app for a site.

    Attributes:
        app_dir: where it is.
        executor: made with the job's own arguments, and by that checked.
        described: the node group that a NodeGroupProvider of the job describes, None without one.
        meta: the job's, as NVFlare gives it to a site.
    """

    app_dir: Path
    executor: TorchrunExecutor
    described: Mapping[str, object] | None
    meta: Mapping[str, object]


def read(job: Path, site: str) -> JobApp:
    """Read the folder, one that `nvflare job create` or the Job API has made, or that is written by hand.

    Raises:
        RefusedError: it is none, has nothing for the site, or its arguments are wrong.
    """
    from ..description.job_meta import BYOC

    try:
        meta = _load(job, "meta")
        app_dir = job.absolute() / _app_of(meta, site, job)
        config = _load(app_dir / "config", "config_fed_client")
        _resolve(config)
        # The server sets it when a job with code comes in from somebody who has the right.
        meta = {**meta, BYOC: (app_dir / "custom").is_dir()}
        return JobApp(app_dir, _executor(config, app_dir), _described(config), meta)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise RefusedError(f"the job {job} has a value of another type than NVFlare asks for: {error}") from None


def _load(folder: Path, name: str) -> dict[str, Any]:
    from nvflare.fuel.utils.config_factory import ConfigFactory

    try:
        config = ConfigFactory.load_config(f"{name}.json", [str(folder)])
    except Exception as error:  # noqa: BLE001 - each format's parser has errors of its own
        raise RefusedError(f"{folder}/{name} cannot be read: {error}") from None
    if config is None:
        raise RefusedError(f"{folder} has no {name}.json, .conf or .yml: is it the folder of a job?")
    loaded: dict[str, Any] = config.to_dict()
    return loaded


def _app_of(meta: Mapping[str, Any], site: str, job: Path) -> str:
    from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME

    placed: Mapping[str, list[str]] = meta.get("deploy_map") or {}
    for app, sites in placed.items():
        if site in sites or ALL_SITES in sites or not sites:
            return app
    known = sorted({name for sites in placed.values() for name in sites} - {SERVER_SITE_NAME})
    raise RefusedError(f"the job {job} has no app for site {site!r}: --site names one of {', '.join(known)}")


def _resolve(config: dict[str, Any]) -> None:
    """Put the values of ``{variables}`` in place, as NVFlare does."""
    import copy

    from nvflare.fuel.utils.json_scanner import JsonScanner
    from nvflare.fuel.utils.wfconf import resolve_var_refs

    values = copy.deepcopy(config)
    for name in [name for name in config if name.startswith("@")]:
        del config[name]
    resolve_var_refs(JsonScanner(config), values)


def _executor(config: Mapping[str, Any], app_dir: Path) -> TorchrunExecutor:
    from ..executor import TorchrunExecutor

    found = _made_of(TorchrunExecutor, [entry.get("executor") or {} for entry in config.get("executors") or []])
    if found is None:
        raise RefusedError(f"{app_dir}/config/config_fed_client has no executor {_path_of(TorchrunExecutor)}")
    executor: TorchrunExecutor = found
    return executor


def _described(config: Mapping[str, Any]) -> Mapping[str, object] | None:
    from ..node_group import NodeGroupProvider

    provider = _made_of(NodeGroupProvider, config.get("components") or [])
    return provider.described() if provider is not None else None


def _made_of(cls: type, entries: list[Mapping[str, Any]]) -> Any:
    """Make the component of the class among the entries; None when none is there."""
    for entry in entries:
        if _path_of(cls) in (entry.get("path"), entry.get("class_path")):
            args = entry.get("args") or {}
            try:
                check_keys(args, tuple(inspect.signature(cls).parameters), "its arguments")
                return cls(**args)
            except (ValueError, TypeError) as error:
                raise RefusedError(f"{cls.__name__}: {error}") from None
    return None


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"
