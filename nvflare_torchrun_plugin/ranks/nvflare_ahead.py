"""Imports what NVFlare's Client API imports only once a session begins; a rank that waits has the time for it.

This is also the one place that sets something private of NVFlare's: how long a trainer waits before it greets its
client job again. The first greeting mostly comes before the connection is there, and costs a second by default.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import nvflare.client.cell.api
import nvflare.fuel.f3.drivers

_RETRY_INTERVAL = 0.2
"""Seconds; an answer that takes longer is asked for again, which the client job bears."""
_LATE = (
    "nvflare.apis.utils.decomposers.flare_decomposers",
    "nvflare.app_common.decomposers.common_decomposers",
    "nvflare.app_opt.pt.decomposers",
)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        # A driver whose library is not installed is passed over by NVFlare, too.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


_drivers = nvflare.fuel.f3.drivers
_import(tuple(found.name for found in pkgutil.walk_packages(_drivers.__path__, f"{_drivers.__name__}.")))
_import(_LATE)
nvflare.client.cell.api._HELLO_RETRY_INTERVAL = _RETRY_INTERVAL
