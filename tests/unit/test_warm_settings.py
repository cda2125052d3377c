"""What a job may say about warm start."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nvflare_torchrun_plugin.executor import TorchrunExecutor
from nvflare_torchrun_plugin.group_values import NodeGroupError
from nvflare_torchrun_plugin.job.warm_start import DEFAULT_MAX_AGE, WarmStart


@pytest.mark.parametrize(
    ("value", "settings"),
    [
        (False, None),
        (None, None),
        (True, WarmStart(None, DEFAULT_MAX_AGE)),
        ({}, WarmStart(None, DEFAULT_MAX_AGE)),
        ({"preload": []}, WarmStart((), DEFAULT_MAX_AGE)),
        ({"preload": ["torch", "a.b"], "max_age": 60}, WarmStart(("torch", "a.b"), 60.0)),
    ],
)
def test_settings(value: object, settings: WarmStart | None) -> None:
    assert WarmStart.parse(value) == settings


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("yes", "warm_start is 'yes': must be true, false, or a mapping with preload and max_age"),
        (1, "warm_start is 1: must be true, false, or a mapping with preload and max_age"),
        ({"preloads": []}, "warm_start: unknown key 'preloads'; known are preload and max_age"),
        ({"preload": "torch"}, "warm_start: preload is 'torch': must be a list of names of modules"),
        ({"preload": ["a b"]}, "warm_start: preload is ['a b']: must be a list of names of modules"),
        ({"preload": [""]}, "warm_start: preload is ['']: must be a list of names of modules"),
        ({"max_age": 0}, "warm_start: max_age is 0: must be a number of seconds above 0"),
        ({"max_age": True}, "warm_start: max_age is True: must be a number of seconds above 0"),
        ({"max_age": "1h"}, "warm_start: max_age is '1h': must be a number of seconds above 0"),
        ({"max_age": float("nan")}, "warm_start: max_age is nan: must be a number of seconds above 0"),
    ],
)
def test_settings_that_are_wrong(value: Any, message: str) -> None:
    with pytest.raises(NodeGroupError, match=f"^{re.escape(message)}$"):
        WarmStart.parse(value)
    with pytest.raises(NodeGroupError, match=re.escape(message)):
        TorchrunExecutor(script="train.py", warm_start=value)


def test_a_launch_for_the_whole_job_has_nothing_to_prepare_and_says_nothing() -> None:
    TorchrunExecutor(script="train.py", warm_start=True, launch_once=True)
