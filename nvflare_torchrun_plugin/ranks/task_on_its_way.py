"""Lets the task of a script that leaves NVFlare before it came arrive first (standard library only)."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

_BOUND = 10.0
"""Seconds that leaving waits at most for the task."""


def let_arrive(flare: ModuleType) -> None:
    """Wait for the task that is on its way to this rank, where each task has a launch of its own.

    To a task that meets a trainer that is leaving, NVFlare's client job answers with an order to shut down. That
    gets lost, and the client job waits 30 s for its acknowledgement before it looks at the trainer's processes.

    Args:
        flare: the module ``nvflare.client``, whose session has begun.
    """
    try:
        exchange: dict[str, Any] = flare.get_config().get("TASK_EXCHANGE", {})
        if not exchange.get("launch_once", True):
            # Returns at once if the script has had the task, or this rank gets none.
            flare.receive(timeout=_BOUND)
    except Exception:  # noqa: BLE001 - the session is over: no task will come
        return
