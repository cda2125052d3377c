"""What the server of a simulator run has kept for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RECEIVER = {"id": "receiver", "path": "nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver"}


def scalars(workspace: Path, site: str) -> dict[str, list[tuple[int, float]]]:
    """Step and value of all points that have come from the site, by name."""
    kept = EventAccumulator(str(workspace / "server" / "simulate_job" / "tb_events" / site))
    kept.Reload()
    return {name: [(point.step, point.value) for point in kept.Scalars(name)] for name in kept.Tags()["scalars"]}
