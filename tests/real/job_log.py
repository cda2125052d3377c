"""NVFlare's JSON logs: their entries, and which of them are errors of a job."""

import json
from collections.abc import Sequence
from pathlib import Path

# NVFlare's check of its connections walks a dictionary that other threads change; at the next one, 5 s later, all
# is well. It says nothing about a job, and any process of NVFlare may meet it at any time.
_HARMLESS = [
    (
        "nvflare.fuel.f3.sfm.heartbeat_monitor",
        "Heartbeat check failed: dictionary changed size during iteration",
    ),
]


def entries(log: Path) -> list[dict[str, str]]:
    """What a ``log.json`` holds, an entry a line."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def errors(logged: Sequence[dict[str, str]]) -> list[str]:
    """The messages at ERROR, without those that tell of NVFlare itself only."""
    return [
        entry["message"]
        for entry in logged
        if entry["levelname"] == "ERROR" and (entry["fullName"], entry["message"]) not in _HARMLESS
    ]
