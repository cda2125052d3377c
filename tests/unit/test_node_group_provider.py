"""NodeGroupProvider as NVFlare uses it: events and the Job API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContextManager
from nvflare.job_config.api import FedJob

from nvflare_torchrun_plugin.description.group_description import PROPERTY, parse
from nvflare_torchrun_plugin.group_values import NodeGroupError
from nvflare_torchrun_plugin.node_group import NodeGroupProvider, property_of


def test_it_sets_the_property_before_the_run() -> None:
    manager = FLContextManager(identity_name="site-1", job_id="j")
    env = {"A": "b"}
    provider = NodeGroupProvider(nodes=2, env=env)
    with manager.new_context() as fl_ctx:
        provider.handle_event(EventType.START_RUN, fl_ctx)
        assert property_of(fl_ctx) is None
        provider.handle_event(EventType.ABOUT_TO_START_RUN, fl_ctx)
        detail = fl_ctx.get_prop_detail(PROPERTY)
        assert (detail["private"], detail["sticky"]) == (True, True)
    with manager.new_context() as later:
        assert property_of(later) == {"nodes": 2, "env": {"A": "b"}}
        assert parse(property_of(later), "property", {}).nnodes == 2


@pytest.mark.parametrize(
    "arguments", [{"nodes": 0}, {"nodes": 1, "transport": "x"}, {"nodes": 1, "env": {"RANK": "0"}}]
)
def test_it_is_checked_when_it_is_made(arguments: dict[str, Any]) -> None:
    with pytest.raises(NodeGroupError, match=r"^NodeGroupProvider: "):
        NodeGroupProvider(**arguments)


def test_another_host_s_names_are_fine_where_the_job_is_made() -> None:
    assert NodeGroupProvider(nodes=["gpu-0.invalid"], transport="local").name == "NodeGroupProvider"


@pytest.mark.parametrize(
    "arguments",
    [
        {"nodes": 2},
        {
            "nodes": [{"host": "localhost", "nproc_per_node": 2}, "localhost"],
            "transport": "local",
            "master_port_range": [29500, 29600],
            "env": {"NCCL_DEBUG": "INFO"},
            "python": "/opt/python",
        },
    ],
)
def test_the_job_api_exports_what_was_given(tmp_path: Path, arguments: dict[str, Any]) -> None:
    job = FedJob(name="exported")
    job.to(NodeGroupProvider(**arguments), "site-1", id="nodes")
    job.export_job(str(tmp_path))
    (config,) = tmp_path.rglob("config_fed_client.json")
    components = json.loads(config.read_text())["components"]
    assert [entry for entry in components if entry["id"] == "nodes"] == [
        {
            "id": "nodes",
            "path": "nvflare_torchrun_plugin.node_group.NodeGroupProvider",
            "args": arguments,
        }
    ]
