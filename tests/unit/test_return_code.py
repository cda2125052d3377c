"""Which code the server gets, for every way in which a task can end without a result."""

from __future__ import annotations

import pytest
from nvflare.apis.fl_constant import ReturnCode
from nvflare.app_common.workflows.error_handling_controller import ErrorHandlingController

from nvflare_torchrun_plugin.job import return_code
from nvflare_torchrun_plugin.verdict import Cause, Failure, Verdict


def verdict(cause: Cause | None, outcome: str = "failed") -> Verdict:
    failure = Failure(1, "gpu-1", None, None, "lost", 1.0, None, (), None, cause) if cause else None
    return Verdict(outcome, None, failure, (), (), 2.0)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (verdict("script"), ReturnCode.EXECUTION_EXCEPTION),
        (verdict("configuration"), ReturnCode.EXECUTION_EXCEPTION),
        (verdict("infrastructure"), ReturnCode.EXECUTION_RESULT_ERROR),
        # Every rank ended well, and none has sent a result.
        (verdict(None, "ok"), ReturnCode.EXECUTION_EXCEPTION),
        # NVFlare gave up on it, or it never began: NVFlare knows better.
        (verdict(None, "stopped"), "NVFlare's own"),
        (None, "NVFlare's own"),
    ],
)
def test_the_code_of_each_cause(ended: Verdict | None, code: str) -> None:
    assert return_code.of(ended, aborted=False, otherwise="NVFlare's own") == code
    assert return_code.of(ended, aborted=True, otherwise="NVFlare's own") == ReturnCode.TASK_ABORTED


class StrictController(ErrorHandlingController):  # type: ignore[misc]
    """What NVFlare's own ones are made of: it lists which codes end the job, and fails at all others."""

    def control_flow(self, *_: object) -> None: ...
    def start_controller(self, *_: object) -> None: ...
    def stop_controller(self, *_: object) -> None: ...
    def process_result_of_unknown_task(self, *_: object) -> None: ...


def test_only_the_machines_fault_leaves_the_job_to_the_other_sites() -> None:
    ends_the_job = StrictController().abort_job_in_error
    assert {cause: ends_the_job[code] for cause, code in return_code.BY_CAUSE.items()} == {
        "script": True,
        "configuration": True,
        "infrastructure": False,
    }
