"""A component of the server that lets each round begin only when the test says so."""

from __future__ import annotations

import time
from pathlib import Path

from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

LIMIT_S = 240.0


class RoundGate(FLComponent):  # type: ignore[misc]
    """Leaves ``round-N-waits`` in the folder when round N is about to begin, and waits for ``round-N-goes``."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != AppEventType.ROUND_STARTED:
            return
        number = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
        Path(self.folder, f"round-{number}-waits").touch()
        deadline = time.monotonic() + LIMIT_S
        while not Path(self.folder, f"round-{number}-goes").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
