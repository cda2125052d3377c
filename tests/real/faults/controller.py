"""The server's side of the table's job: one task for each row, whatever became of the one before."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from faults import inflict
from nvflare_torchrun_plugin import relay
from nvflare_torchrun_plugin.node import agent_dir, procs

LIMIT_S = 300
GONE_S = 12.0
"""Seconds after the reply in which what is left of a row's group is looked for."""


def left_of(folder: Path, tmp: str, number: int) -> list[int]:
    """Processes that are left of the row: its relay, agents, torchruns, ranks, and the ranks' children."""
    relays = procs.with_variable(relay.DIR_VARIABLE, f"{tmp}/")
    ours = relays + procs.with_variable(agent_dir.DIR_VARIABLE, f"{tmp}/nvfl-agent-{number}-")
    return ours + procs.with_variable(inflict.CHILD, f"{inflict.marks(folder, number)}/")


class OneTaskForEachRow(Controller):  # type: ignore[misc, unused-ignore]
    """Leaves ``reply.json`` beside the marks of each row: the code, when it came, and what was left when."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        folder = Path(os.environ[inflict.FOLDER])
        rows = json.loads(Path(os.environ[inflict.ROWS]).read_text())
        for number in range(1, len(rows) + 1):
            reply: dict[str, Any] = {}

            def took(client_task: ClientTask, fl_ctx: FLContext, reply: dict[str, Any] = reply) -> None:
                reply.update(code=client_task.result.get_return_code("OK"), at=time.monotonic())

            data = FLModelUtils.to_shareable(FLModel(params={"x": np.zeros(3, np.float32)}))
            task = Task("train", data, timeout=LIMIT_S, result_received_cb=took)
            self.broadcast_and_wait(task, fl_ctx, min_responses=1, abort_signal=abort_signal)
            if abort_signal.triggered:
                return
            deadline = time.monotonic() + GONE_S
            while (left := left_of(folder, os.environ["TMPDIR"], number)) and time.monotonic() < deadline:
                time.sleep(0.05)
            reply.update(gone=time.monotonic(), left=left)
            file = inflict.marks(folder, number) / "reply.json"
            file.parent.mkdir(exist_ok=True)  # the fault may never have come
            file.with_suffix(".new").write_text(json.dumps(reply))
            file.with_suffix(".new").rename(file)

    def start_controller(self, fl_ctx: FLContext) -> None:
        pass

    def stop_controller(self, fl_ctx: FLContext) -> None:
        pass

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        pass
