"""NVFlare's writers of metrics for every rank: import them from here as from ``nvflare.client.tracking``.

Those there raise an error on other ranks than 0; here what other ranks write is not sent.
"""

from __future__ import annotations

from typing import Any

import nvflare.client.tracking as _plain

from nvflare_torchrun_plugin import client as _client


class _Context:
    """What the writers take for NVFlare's context: to log, they call the API that they find in it."""

    @property
    def api(self) -> _Context:
        return self

    @staticmethod
    def log(key: str, value: Any, data_type: Any, **kwargs: Any) -> Any:
        return _client.log(key, value, data_type, **kwargs)


class SummaryWriter(_plain.SummaryWriter):
    """NVFlare's, with the methods of TensorBoard's."""

    def __init__(self, ctx: Any = None) -> None:
        super().__init__(ctx or _Context())


class WandBWriter(_plain.WandBWriter):
    """NVFlare's, with the method of Weights & Biases."""

    def __init__(self, ctx: Any = None) -> None:
        super().__init__(ctx or _Context())


class MLflowWriter(_plain.MLflowWriter):
    """NVFlare's, with the methods of MLflow."""

    def __init__(self, ctx: Any = None) -> None:
        super().__init__(ctx or _Context())
