"""What each rank of the table's groups runs: it tells where rank 0 is, and the row's fault strikes there.

Every rank has a child that has left its session. With ``nvflare`` rank 0 does a task of the Client API.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from faults import inflict


def main() -> None:
    if inflict.is_deaf():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = ["sleep", str(inflict.PATIENCE)]
    subprocess.Popen(sleep, start_new_session=True, env=inflict.child_environ())
    print("up", flush=True)
    inflict.moment("after join")
    if sys.argv[1] == "nvflare" and os.environ["RANK"] == "0":
        do_task()
        return
    for name in ("in receive", "in training", "in send", "after acceptance"):
        inflict.moment(name)


def do_task() -> None:
    import nvflare.client as flare
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    taking, giving = FLModelUtils.from_shareable, FLModelUtils.to_shareable

    def take(shareable: Any) -> Any:
        """receive() waits in the main thread for this, another one."""
        inflict.moment("in receive")
        return taking(shareable)

    def give(model: Any) -> Any:
        inflict.moment("in send")
        return giving(model)

    FLModelUtils.from_shareable, FLModelUtils.to_shareable = take, give
    flare.init(rank=0)
    received = flare.receive()
    print("training", flush=True)
    time.sleep(1.0)  # it trains; until NVFlare has the answer to its task, it does not look at heartbeats
    inflict.moment("in training")
    flare.send(flare.FLModel(params=received.params))
    inflict.moment("after acceptance")


if __name__ == "__main__":
    main()
