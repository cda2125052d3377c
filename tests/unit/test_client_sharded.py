"""What cannot be loaded; what can has real ranks (tests/real/test_sharded_models.py)."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.client import FLModel, ParamsType

from nvflare_torchrun_plugin.client.sharded import full_params, load_model
from nvflare_torchrun_plugin.job.script_imports import SHARDED


def test_a_rank_pays_for_sharded_models_only_if_it_uses_them() -> None:
    code = f"""
import sys, torch, nvflare_torchrun_plugin.client as flare
print("{SHARDED}" in sys.modules)
flare.full_params(torch.nn.Linear(1, 1))
print("{SHARDED}" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("False\nTrue\n", "", 0)


def test_one_process_alone_loads_and_gives_too() -> None:
    net, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    load_model(net, FLModel(params={name: value.numpy() for name, value in other.state_dict().items()}))
    params = full_params(net)
    assert params is not None
    assert all(torch.equal(params[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize("count", [np.float64(7), np.int64(7), 7, np.array(7), np.array(7, ">i8")])
def test_a_number_is_loaded_as_an_array_without_dimensions(count: object) -> None:
    """NumPy's average of such arrays is one."""
    norm = torch.nn.BatchNorm1d(2)
    load_model(norm, FLModel(params={**norm.state_dict(), "num_batches_tracked": count}))
    assert torch.equal(norm.state_dict()["num_batches_tracked"], torch.tensor(7))


@pytest.mark.parametrize(
    "model",
    [FLModel(metrics={"a": 1}), FLModel(params_type=ParamsType.DIFF, params={"weight": torch.ones(1, 2)})],
)
def test_what_is_no_full_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="the model holds no full parameters by name"):
        load_model(torch.nn.Linear(2, 1), model)


def test_missing_and_unknown_names_are_refused_unless_they_may_be() -> None:
    net = torch.nn.Linear(2, 1)
    odd = FLModel(params={"weight": torch.ones(1, 2), "odd": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"(?s)odd|bias"):
        load_model(net, odd)
    load_model(net, odd, strict=False)
    assert torch.equal(net.weight, torch.ones(1, 2))
