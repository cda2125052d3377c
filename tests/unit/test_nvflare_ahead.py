"""What is private of NVFlare in a warm start, and what its sessions import late: both may change with NVFlare."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import sys
import nvflare.client.cell.api as api
assert api._HELLO_RETRY_INTERVAL == 1.0, api._HELLO_RETRY_INTERVAL
assert "_HELLO_RETRY_INTERVAL" in api.CellClientAPI._hello.__code__.co_names
import nvflare_torchrun_plugin.ranks.nvflare_ahead
assert api._HELLO_RETRY_INTERVAL == 0.2, api._HELLO_RETRY_INTERVAL
before = set(sys.modules)
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.client.decomposers import register_framework_decomposers
from nvflare.fuel.f3.communicator import driver_mgr, load_comm_drivers
import logging
flare_decomposers.register()
common_decomposers.register()
register_framework_decomposers("pytorch", "numpy", logging.getLogger())
assert not driver_mgr.drivers
load_comm_drivers()
assert {"tcp", "grpc"} <= set(driver_mgr.drivers), driver_mgr.drivers
print(sorted(name for name in set(sys.modules) - before if name.startswith("nvflare") and "__init__" not in name))
"""


def test_the_greeting_is_repeated_sooner_and_a_session_finds_everything_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
