"""Runs one group on the host where it is started: a description of it in JSON on stdin, the verdict on stdout.

The description: ``script`` (its code), ``app_dir`` (made here), ``logs``, ``group`` (as for a NodeGroupProvider),
and perhaps ``files`` (more files beside the script, by name), ``args``, ``nproc_per_node``, ``environ`` (more
variables of the client job), ``join_timeout``, ``node_timeout``, ``meet`` (seconds to learn the names of nodes
that dial in), and ``attempts`` (one after another, the last one's verdict counts).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from nvflare_torchrun_plugin.contract import RUN_ID
from nvflare_torchrun_plugin.description.group_choice import Wish, choose
from nvflare_torchrun_plugin.joining.reception import Reception
from nvflare_torchrun_plugin.launching import planning, program
from nvflare_torchrun_plugin.node import private_dir
from nvflare_torchrun_plugin.supervision.copies import Copies
from nvflare_torchrun_plugin.supervision.group import Group
from nvflare_torchrun_plugin.verdict import Verdict


def run(given: dict[str, Any]) -> Verdict:
    custom = Path(given["app_dir"], "custom")
    custom.mkdir(parents=True, exist_ok=True)
    script = custom / "train.py"
    script.write_text(given["script"], encoding="utf-8")
    for name, text in given.get("files", {}).items():
        (custom / name).write_text(text, encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(custom), **given.get("environ", {})}
    chosen = choose(
        environ,
        None,
        given["group"],
        Wish(nproc_per_node=given.get("nproc_per_node", 1)),
        byoc=True,
        launch_once=False,
        script=str(script),
    )
    options = planning.Options.parse(
        torchrun_args=None,
        join_timeout=given.get("join_timeout", 60),
        launch_timeout=None,
        node_timeout=given.get("node_timeout", 30),
        grace=1.0,
        log_ranks="all",
    )
    parsed = program.parse(str(script), None, given.get("args", []), {})
    logger = logging.getLogger("group")

    async def serve() -> Verdict:
        copies = Copies()
        group, reception, desk = chosen, None, None
        try:
            if group.join is not None:
                run_id = environ.get(RUN_ID)
                reception = Reception(group, group.join, run_id, given["app_dir"], options.join_timeout, logger)
                # No earlier: a driver that is killed leaves it.
                desk = private_dir.create("nvfl-desk-")
                await reception.open(desk)
                group = await reception.meet(given.get("meet", 10))
            plan = planning.Plan(
                group, parsed, str(script), given["app_dir"], given["logs"], options, owes_result=False
            )
            for number in range(given.get("attempts", 1)):
                launch, reservation = planning.launch(plan, number + 1)
                verdict = await Group(launch, environ, logger, copies).run()
                if reservation is not None:
                    reservation.release()
            return verdict
        finally:
            await copies.close()
            if reception is not None:
                await reception.close("the run ended")
            if desk is not None:
                private_dir.remove(desk)

    return asyncio.run(serve())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    json.dump(run(json.load(sys.stdin)).as_dict(), sys.stdout)
