"""Models whose parameters are spread over the ranks: NVFlare's full one in, a full one for NVFlare out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

# torch.distributed.checkpoint and fsdp are imported where they are used: they cost every rank more than a second,
# and many scripts load their models themselves.


def load_model(module: torch.nn.Module, fl_model: FLModel, strict: bool = True) -> None:
    """Load a received model; every rank calls it.

    Each rank takes its own part out of the node's one copy, and nothing crosses the network.

    Args:
        module: a plain module, or one under DDP, FSDP2 (``fully_shard``) or FSDP1.
        fl_model: as ``receive()`` has returned it: full parameters by name, tensors, numpy arrays or numbers.
        strict: whether the names must be the module's, all and no others.

    Raises:
        ValueError: it holds no full parameters.
        RuntimeError: with ``strict``, names are missing or unknown.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if not isinstance(fl_model.params, dict) or fl_model.params_type != ParamsType.FULL:
        raise ValueError(f"the model holds no full parameters by name (params_type is {fl_model.params_type})")
    params = {name: _tensor(value) for name, value in fl_model.params.items()}
    set_model_state_dict(module, params, options=StateDictOptions(full_state_dict=True, strict=strict))


def _tensor(value: Any) -> Any:
    # What NumPy makes of an array without dimensions when it calculates (a server's average) is a number.
    if isinstance(value, (np.ndarray, np.generic, int, float)):
        native = np.asarray(value)
        return torch.from_numpy(native.astype(native.dtype.newbyteorder("="), copy=False))
    return value


def full_params(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return all parameters and buffers by name, on the CPU, on rank 0, and None on others; every rank calls it.

    Args:
        module: as for ``load_model()``.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    # FSDP1 frees a gathered parameter after it was copied to the CPU, which on the CPU is no copy (torch 2.13).
    on_cpu = all(parameter.device.type == "cpu" for parameter in module.parameters())
    fsdp1_on_cpu = on_cpu and any(isinstance(part, FullyShardedDataParallel) for part in module.modules())
    options = StateDictOptions(full_state_dict=True, cpu_offload=not fsdp1_on_cpu)
    params = get_model_state_dict(module, options=options)
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    return params
