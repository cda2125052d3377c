"""SIGTERM and SIGINT to the client job while a task runs: they abort the task and the run.

NVFlare has no handlers for them. The client job would be gone at once, its group would end because its agents get
no orders any more, and nobody could say why the task has failed. Between tasks there is nothing to tell, and the
signals do what they always did.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGINT)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


@contextmanager
def caught(on_signal: Callable[[str], None]) -> Iterator[None]:
    """Let the first of the signals call ``on_signal`` with its name; a second one ends the process as ever.

    Signals that are ignored (``nohup``, a shell's background jobs) stay so, and handlers of others stay theirs.
    Only Python's main thread can handle signals: in all others this does nothing.

    Args:
        on_signal: called between any two steps of the main thread, so it must take no lock.
    """

    def handle(number: int, _frame: FrameType | None) -> None:
        give_back()
        on_signal(signal.Signals(number).name)

    before: dict[signal.Signals, Any] = {}

    def give_back() -> None:
        for number in list(before):
            signal.signal(number, before.pop(number))

    if threading.current_thread() is threading.main_thread():
        for number in _NUMBERS:
            if signal.getsignal(number) in _DEFAULTS:
                before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        give_back()
