"""What a job's meta says to a client job. Its keys are NVFlare's, written here so that nothing loads NVFlare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nvflare_torchrun_plugin.group_values import NodeGroupError, shown

if TYPE_CHECKING:
    from nvflare.apis.fl_context import FLContext

PROPERTY = "__job_meta__"
"""The FL context property that holds the meta (``FLContextKey.JOB_META``)."""

BYOC = "byoc"
"""Whether the job brings its own code and may (``AppValidationKey.BYOC``)."""

LAUNCHER_SPEC = "launcher_spec"
"""What launchers are told, site by site (``JobMetaKey.JOB_LAUNCHER_SPEC``)."""

_PROCESS_MODE = "process"
# NVFlare's launchers take the block "default" of launcher_spec for every site; the site's own goes before it.
_EVERY_SITE = "default"


def of(fl_ctx: FLContext) -> Mapping[str, object]:
    """Return the job's meta, an empty mapping where NVFlare gives none."""
    meta = fl_ctx.get_prop(PROPERTY)
    return meta if isinstance(meta, dict) else {}


def has_byoc(meta: Mapping[str, object]) -> bool:
    """Return whether NVFlare has marked the job as one that brings its own code, and let it in as such."""
    return meta.get(BYOC) is True


def launcher_values(meta: Mapping[str, object], site: str, names: Sequence[str]) -> dict[str, tuple[object, str]]:
    """Return those of the values that ``launcher_spec`` has for this site's processes, each with its place.

    Args:
        meta: the job's meta; ``launcher_spec[site]["process"]`` goes before NVFlare's
            ``launcher_spec["default"]["process"]``.
        site: this site's name.
        names: the keys to look for; all others there are NVFlare's.

    Raises:
        NodeGroupError: it is no mapping of mappings; the message names the place.
    """
    found: dict[str, tuple[object, str]] = {}
    for key in (_EVERY_SITE, site):
        where = f"job meta {LAUNCHER_SPEC}"
        block = _mapping(meta.get(LAUNCHER_SPEC), where)
        for step in (key, _PROCESS_MODE):
            where = f"{where}[{step!r}]"
            block = _mapping(block.get(step), where)
        found |= {name: (block[name], f"{where}[{name!r}]") for name in names if block.get(name) is not None}
    return found


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise NodeGroupError(f"{where} is {shown(value)}: must be a mapping")
    return value
