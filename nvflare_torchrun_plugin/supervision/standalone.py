"""One group without NVFlare: planned, run to its end, and nothing of it left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from nvflare_torchrun_plugin.launching import planning
from nvflare_torchrun_plugin.launching.planning import Plan
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.supervision.rank_logs import Show
from nvflare_torchrun_plugin.verdict import Verdict


async def run(
    plan: Plan,
    environ: Mapping[str, str],
    logger: logging.Logger,
    show: Show | None = None,
    begun: Callable[[Group], None] = lambda _: None,
) -> Verdict:
    """Run the plan's program once.

    Args:
        plan: what to run; one that owes no result.
        environ: the environment of this process.
        logger: gets the group's phases at INFO, and warnings.
        show: gets the ranks' lines in place of the logger.
        begun: is called with the group before it starts anything.

    Raises:
        PlanError, ProgramError: it cannot be planned; the message is one clear sentence.
        OSError: its log directory cannot be made.
    """
    launch, reservation = planning.launch(plan, 1)
    copies = Copies()
    try:
        group = Group(launch, environ, logger, copies, show)
        begun(group)
        return await group.run()
    finally:
        if reservation is not None:
            reservation.release()
        await copies.close()
