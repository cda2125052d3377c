"""An uncaught exception, printed as the interpreter does it (``PyErr_Print``; standard library only)."""

from __future__ import annotations

import _thread
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any


def _tell(text: str) -> None:
    try:
        sys.stderr.write(text)
    except Exception:  # noqa: BLE001 - a stream of the script's own; Python ignores this too
        return


def without_frames_of(namespace: dict[str, Any], error: BaseException) -> BaseException:
    """Take off the outermost frames, as long as they are of the module with this namespace."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals is namespace:
        frames = frames.tb_next
    return error.with_traceback(frames)


def print_uncaught(error: BaseException) -> SystemExit | None:
    """Print an uncaught exception as Python does (PyErr_Print), by the script's own hook if it has one.

    Returns:
        The SystemExit by which the script's hook ended, which then is how the script ends.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    hook: Callable[..., object] | None = getattr(sys, "excepthook", None)
    if hook is None:
        _tell("sys.excepthook is missing\n")
        hook = sys.__excepthook__
    try:
        hook(type(error), error, error.__traceback__)
    except SystemExit as asked:
        return asked
    except BaseException as caught:  # noqa: BLE001 - shown below
        failure = without_frames_of(globals(), caught)
    else:
        return None
    _tell("Error in sys.excepthook:\n")
    sys.__excepthook__(type(failure), failure, failure.__traceback__)
    _tell("\nOriginal exception was:\n")
    sys.__excepthook__(type(error), error, error.__traceback__)
    return None


def print_nothing(*_: object) -> None:
    """A hook for an exception that has been printed."""


class _Capture:
    """Takes what this thread writes to stderr; the text of other threads goes on to where it went."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = _thread.get_ident()
        self.parts: list[str] = []

    def write(self, text: str) -> None:
        if _thread.get_ident() == self._thread:
            self.parts.append(text)
        else:
            self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def as_python_prints(error: BaseException) -> str:
    """Return the interpreter's own text of a traceback, which is not always that of :mod:`traceback`."""
    stream: Any = getattr(sys, "stderr", None)
    capture: Any = _Capture(stream)
    sys.stderr = capture
    try:
        sys.__excepthook__(type(error), error, error.__traceback__)
    finally:
        sys.stderr = stream
    return "".join(capture.parts)
