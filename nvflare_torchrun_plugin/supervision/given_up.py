"""Why NVFlare has given up on rank 0: its backend says so in the log, and then ends the relay."""

from __future__ import annotations

from dataclasses import dataclass

from nvflare_torchrun_plugin.verdict import Cause


@dataclass(frozen=True)
class GivenUp:
    """What is known of it.

    Attributes:
        what: NVFlare's own words, if it had any.
        cause: ``infrastructure`` for a rank 0 that has fallen silent. All else that NVFlare gives up for is a
            limit that the job sets, or something that its script does.
    """

    what: str
    cause: Cause


def reason(said: str | None) -> GivenUp:
    """Return the reason.

    Args:
        said: NVFlare's latest words about the task. None while it has said nothing: it does so before it ends a
            relay, unless it still waits for rank 0 to greet it.
    """
    lines = said.strip().splitlines() if said else []
    if not lines:
        return GivenUp("its flare.init() was not done in time (launch_timeout)", "script")
    # Of a traceback, the exception.
    return GivenUp(lines[-1], "infrastructure" if "heartbeat" in lines[-1] else "script")
