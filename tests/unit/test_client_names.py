"""The API's names and parameters, compared with NVFlare's."""

from __future__ import annotations

import inspect

import nvflare.client
import pytest

import nvflare_torchrun_plugin.client as ours

PUBLIC = [name for name, value in vars(nvflare.client).items() if not name.startswith("_") and callable(value)]


def test_everything_public_is_there() -> None:
    assert {"init", "is_running", "receive", "send", "log", "shutdown", "FLModel"} <= set(PUBLIC)
    assert [name for name in PUBLIC if not hasattr(ours, name)] == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isfunction(getattr(nvflare.client, name))])
def test_functions_take_the_same_arguments(name: str) -> None:
    if name in ("train", "evaluate"):
        return  # decorators: NVFlare's take any
    theirs, this = (inspect.signature(getattr(api, name)).parameters for api in (nvflare.client, ours))
    assert [(p.name, p.kind, p.default) for p in this.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def test_types_are_nvflares_own() -> None:
    for name in PUBLIC:
        if inspect.isclass(getattr(nvflare.client, name)):
            assert getattr(ours, name) is getattr(nvflare.client, name)
