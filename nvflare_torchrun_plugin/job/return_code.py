"""With which of NVFlare's return codes a task ends that has no result.

What NVFlare's controllers make of a code: FedAvg, ScatterAndGather and Cyclic treat all the same, the task has
failed and their own settings say what follows. Those built on ErrorHandlingController know five codes only, and of
these just EXECUTION_RESULT_ERROR costs them no more than this site's result, while EXECUTION_EXCEPTION ends the
job. SplitNN takes a code that it does not know for a result. So there are two:

- what the machines did, and another try may not meet, is EXECUTION_RESULT_ERROR;
- what the job says or does, and would do again, is EXECUTION_EXCEPTION.

An abort is TASK_ABORTED, as NVFlare's own executors say.
"""

from __future__ import annotations

from collections.abc import Mapping

from nvflare.apis.fl_constant import ReturnCode

from nvflare_torchrun_plugin.verdict import Cause, Verdict

BY_CAUSE: Mapping[Cause, str] = {
    "script": ReturnCode.EXECUTION_EXCEPTION,
    "configuration": ReturnCode.EXECUTION_EXCEPTION,
    "infrastructure": ReturnCode.EXECUTION_RESULT_ERROR,
}


def of(verdict: Verdict | None, *, aborted: bool, otherwise: str) -> str:
    """Return the code for a task whose last attempt ended with this verdict, and without a result.

    Args:
        verdict: None when there was no group, or none that has ended.
        aborted: whether NVFlare has aborted the task.
        otherwise: what NVFlare's backend says, for when no verdict says more: NVFlare itself ended the group.
    """
    if aborted:
        return str(ReturnCode.TASK_ABORTED)
    if verdict is None or verdict.outcome == "stopped":
        return otherwise
    return BY_CAUSE[verdict.cause]
