"""What the tasks of a job are told whose run could not start."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.workspace import Workspace

from nvflare_torchrun_plugin.executor import TorchrunExecutor


def test_without_a_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in ("startup", "local", "job/app_site-1/custom"):
        (tmp_path / folder).mkdir(parents=True)
    script = tmp_path / "train.py"
    script.touch()
    fl_ctx = FLContext()
    fl_ctx.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path), "site-1"))
    fl_ctx.set_prop(FLContextKey.JOB_META, {"byoc": True})
    fl_ctx.set_prop(ReservedKey.RUN_NUM, "job")
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "site-1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    executor = TorchrunExecutor(script=str(script))

    executor.handle_event(EventType.START_RUN, fl_ctx)
    reply = executor.execute("train", Shareable(), fl_ctx, Signal())

    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "task 'train' failed: the client job cannot have a private directory for its sockets: " in caplog.text
