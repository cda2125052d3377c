"""NVFlare's decorators for a training and an evaluation function, on every rank."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel

_Function = Callable[..., Any]


def make(
    receive: Callable[[], FLModel | None], send: Callable[[FLModel], None], is_train: Callable[[], bool]
) -> tuple[_Function, _Function]:
    """Return ``train`` and ``evaluate``, which share the metrics of one task.

    Args:
        receive, send, is_train: the API that they go through.
    """
    held: list[Any] = []

    def train(function: _Function | None = None, **_: object) -> _Function:
        """Give the received model to the function as its first argument, and send the FLModel that it returns."""
        if function is None:
            return train

        @functools.wraps(function)
        def wrapper(*_: object, **arguments: object) -> FLModel:
            result = _with_model(function, receive(), arguments)
            if not isinstance(result, FLModel):
                raise RuntimeError(f"{function.__name__}() has returned {result!r}: must be an FLModel")
            if held:
                result.metrics = held.pop()
            send(result)
            return result

        return wrapper

    def evaluate(function: _Function | None = None, **_: object) -> _Function:
        """Give the received model to the function; its metrics go with the trained model, or alone."""
        if function is None:
            return evaluate

        @functools.wraps(function)
        def wrapper(*_: object, **arguments: object) -> Any:
            result = _with_model(function, receive(), arguments)
            if result is None:
                raise RuntimeError(f"{function.__name__}() has returned None: must be metrics")
            if is_train():
                held[:] = [result]
            else:
                send(FLModel(metrics=result))
            return result

        return wrapper

    return train, evaluate


def _with_model(function: _Function, model: FLModel | None, arguments: dict[str, object]) -> Any:
    first = next(iter(inspect.signature(function).parameters))
    return function(**{**arguments, first: model})
