"""What the executor knows of NVFlare's reason for ending a relay."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor

from nvflare_torchrun_plugin import executor as executor_module
from nvflare_torchrun_plugin.executor import TorchrunExecutor
from nvflare_torchrun_plugin.supervision import given_up
from nvflare_torchrun_plugin.supervision.given_up import GivenUp
from nvflare_torchrun_plugin.verdict import Verdict

SILENT = "trainer heartbeat timed out after 8.0s (timeout=8s) before task 'train' produced a result"
LATE = "timed out after 60s waiting for 'train' result"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (SILENT, GivenUp(SILENT, "infrastructure")),
        (LATE, GivenUp(LATE, "script")),
        ("Traceback:\n  File ...\nOSError: no\n", GivenUp("OSError: no", "script")),
        (None, GivenUp("its flare.init() was not done in time (launch_timeout)", "script")),
        ("\n", GivenUp("its flare.init() was not done in time (launch_timeout)", "script")),
    ],
)
def test_nvflare_s_words_tell_whose_business_it_is(said: str | None, reason: GivenUp) -> None:
    assert given_up.reason(said) == reason


class Attempt:
    """One that NVFlare has ended."""

    def __init__(self) -> None:
        self.decided: Future[Verdict | None] = Future()
        self.ended: Future[None] = Future()
        self.decided.set_result(None)
        self.ended.set_result(None)
        self.ends, self.left_out, self.unswept = True, (), ()
        self.launch, self.began = SimpleNamespace(name="1-a"), 0.0
        self.stopped: str | None = None

    def stop(self, reason: str) -> None:
        self.stopped = reason

    def wait(self, _timeout: float) -> None: ...


class Supervisor:
    """Keeps what the real one would ask."""

    asks: Callable[[], GivenUp | None]
    armed: Attempt

    def __init__(self, _logger: logging.Logger, asks: Callable[[], GivenUp | None]) -> None:
        Supervisor.asks = staticmethod(asks)
        self.directory = "supervisor"

    def arm(self, _launch: object) -> Attempt:
        Supervisor.armed = Attempt()
        return Supervisor.armed

    def close(self, *_: object) -> None: ...


@pytest.fixture
def fl_ctx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FLContext:
    for folder in ("startup", "local", "job/app_site-1/custom"):
        (tmp_path / folder).mkdir(parents=True)
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path), "site-1"))
    fl_ctx.set_prop(FLContextKey.JOB_META, {"byoc": True})
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job")
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "site-1")
    monkeypatch.setattr(executor_module, "Supervisor", Supervisor)
    monkeypatch.setattr(ClientAPIExecutor, "handle_event", lambda *_: None)
    return fl_ctx


def test_an_end_that_nvflare_was_told_of_is_nobody_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fl_ctx: FLContext
) -> None:
    (tmp_path / "train.py").touch()
    executor = TorchrunExecutor(script=str(tmp_path / "train.py"))
    executor.handle_event(EventType.START_RUN, fl_ctx)
    assert Supervisor.asks() == given_up.reason(None)

    def reason_after(what: Callable[[Signal], object]) -> GivenUp | None:
        """What the supervisor hears when NVFlare ends the relay after this has happened in its execute()."""
        heard = []

        def execute(_self: object, _name: str, _data: Shareable, _ctx: FLContext, abort: Signal) -> Shareable:
            what(abort)
            heard.append(Supervisor.asks())
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)

        monkeypatch.setattr(ClientAPIExecutor, "execute", execute)
        executor.execute("train", Shareable(), fl_ctx, Signal())
        return heard[0]

    def event(name: str) -> Callable[[Any], None]:
        return lambda _abort: executor.handle_event(name, fl_ctx)

    for _ in range(2):
        assert reason_after(lambda _abort: executor.log_error(fl_ctx, SILENT)) == given_up.reason(SILENT)
        assert reason_after(lambda abort: abort.trigger("abort")) is None
        assert reason_after(event(EventType.ABORT_TASK)) is None
        assert reason_after(lambda _abort: None) == given_up.reason(None)
    assert reason_after(event(EventType.END_RUN)) is None


def test_an_attempt_ends_where_nvflare_s_executor_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fl_ctx: FLContext
) -> None:
    (tmp_path / "train.py").touch()
    executor = TorchrunExecutor(script=str(tmp_path / "train.py"))
    executor.handle_event(EventType.START_RUN, fl_ctx)

    def execute(*_: object) -> Shareable:
        raise KeyError("no engine")

    monkeypatch.setattr(ClientAPIExecutor, "execute", execute)
    with pytest.raises(KeyError, match="no engine"):
        executor.execute("train", Shareable(), fl_ctx, Signal())
    assert Supervisor.armed.stopped == "NVFlare's executor has failed: KeyError('no engine')"
