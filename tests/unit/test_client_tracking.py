"""The writers of metrics: NVFlare's on rank 0, silent on others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nvflare.client
import nvflare.client.tracking
import pytest
from nvflare.client import AnalyticsDataType

import nvflare_torchrun_plugin.client as ours
from nvflare_torchrun_plugin.client import tracking


def test_every_writer_is_there() -> None:
    theirs = {name for name in vars(nvflare.client.tracking) if name.endswith("Writer") and name[0] != "_"}
    assert "SummaryWriter" in theirs
    for name in theirs:
        assert issubclass(getattr(tracking, name), getattr(nvflare.client.tracking, name))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_rank_0_writes_is_logged(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    logged: list[tuple[Any, ...]] = []
    monkeypatch.setattr(nvflare.client, "log", lambda *args, **more: logged.append((*args, more["global_step"])))
    monkeypatch.setattr(ours, "_session", SimpleNamespace(logs=rank == 0))

    tracking.SummaryWriter().add_scalar("loss", 0.5, 3)
    tracking.MLflowWriter().log_metric("acc", 0.25, 4)
    tracking.WandBWriter().log({"a": 1.0}, 5)

    rank_0s = [
        ("loss", 0.5, AnalyticsDataType.SCALAR, None, 3),
        ("acc", 0.25, AnalyticsDataType.METRIC, None, 4),
        ("metrics", {"a": 1.0}, AnalyticsDataType.METRICS, None, 5),
    ]
    assert logged == (rank_0s if rank == 0 else [])


def test_nvflares_own_are_not_for_other_ranks() -> None:
    """There is no context where ``nvflare.client.init()`` was not called: once there is, tracking.py may go."""
    with pytest.raises(RuntimeError, match=r"Did you call flare\.init\(\)"):
        nvflare.client.tracking.SummaryWriter()
