"""What SIGTERM and SIGINT do while a task runs, and what they did before and do after it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from nvflare_torchrun_plugin.job.end_signals import caught

NUMBERS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Those of a process of its own; what runs these tests has others."""
    before = [signal.getsignal(number) for number in NUMBERS]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


DEFAULTS: list[object] = [signal.SIG_DFL, signal.default_int_handler]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_one_is_told_and_the_next_one_works_as_ever(number: signal.Signals) -> None:
    told: list[str] = []
    with caught(told.append):
        os.kill(os.getpid(), number)
        assert told == [number.name]
        assert handlers() == DEFAULTS
    assert handlers() == DEFAULTS


def test_what_was_there_comes_back_however_the_task_ends() -> None:
    with contextlib.suppress(ValueError), caught(lambda _name: None):
        assert not set(handlers()) & set(DEFAULTS)
        raise ValueError("the task's")
    assert handlers() == DEFAULTS


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda _number, _frame: None])
def test_signals_that_are_ignored_or_others_handle_are_left_alone(
    theirs: signal.Handlers | Callable[[int, object], None],
) -> None:
    signal.signal(signal.SIGINT, theirs)
    with caught(lambda _name: None):
        assert signal.getsignal(signal.SIGINT) is theirs
        assert signal.getsignal(signal.SIGTERM) not in DEFAULTS
    assert handlers() == [signal.SIG_DFL, theirs]


def test_only_the_main_thread_can_have_handlers() -> None:
    found: list[object] = []

    def task() -> None:
        with caught(lambda _name: None):
            found.extend(handlers())

    thread = threading.Thread(target=task)
    thread.start()
    thread.join()
    assert found == DEFAULTS
