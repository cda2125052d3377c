"""What a job's meta says, under NVFlare's own keys."""

from __future__ import annotations

import pytest
from nvflare.apis.app_validation import AppValidationKey
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey

from nvflare_torchrun_plugin.description import job_meta
from nvflare_torchrun_plugin.group_values import NodeGroupError


def test_the_keys_are_nvflares() -> None:
    ours = (job_meta.PROPERTY, job_meta.BYOC, job_meta.LAUNCHER_SPEC)
    assert ours == (FLContextKey.JOB_META, AppValidationKey.BYOC, JobMetaKey.JOB_LAUNCHER_SPEC.value)


def test_it_comes_from_the_fl_context() -> None:
    fl_ctx = FLContext()
    assert job_meta.of(fl_ctx) == {}
    fl_ctx.set_prop(FLContextKey.JOB_META, {"byoc": True}, private=True, sticky=False)
    assert job_meta.of(fl_ctx) == {"byoc": True}


def test_only_nvflare_s_own_mark_is_the_right() -> None:
    assert job_meta.has_byoc({"byoc": True})
    for meta in ({}, {"byoc": False}, {"byoc": None}, {"byoc": "false"}, {"byoc": 1}):
        assert not job_meta.has_byoc(meta)


def test_a_sites_own_values_go_before_those_for_every_site() -> None:
    meta = {
        "launcher_spec": {
            "default": {"process": {"nnodes": 5, "nproc_per_node": 6, "other": 7}},
            "site-1": {"process": {"nnodes": "1:2"}, "slurm": {"nnodes": 9}},
        }
    }
    everywhere = ("job meta launcher_spec['default']['process']", "job meta launcher_spec['site-1']['process']")
    assert job_meta.launcher_values(meta, "site-1", ("nnodes", "nproc_per_node")) == {
        "nnodes": ("1:2", f"{everywhere[1]}['nnodes']"),
        "nproc_per_node": (6, f"{everywhere[0]}['nproc_per_node']"),
    }
    assert job_meta.launcher_values({}, "site-1", ("nnodes",)) == {}


def test_a_block_of_another_type_is_refused_with_its_place() -> None:
    with pytest.raises(NodeGroupError, match=r"launcher_spec\['site-1'\] is \[1\]: must be a mapping"):
        job_meta.launcher_values({"launcher_spec": {"site-1": [1]}}, "site-1", ("nnodes",))
