"""The example manifests for Kubernetes: valid by the published schemas, and each part fits the others.

The schemas in the folder ``kubernetes`` are those of the two resources, reduced to what the examples touch: of the
objects that they have all names, and nothing of what lies below the others.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvflare_torchrun_plugin import node_agent
from nvflare_torchrun_plugin.description import site_file
from nvflare_torchrun_plugin.description.group_description import NodeGroup
from nvflare_torchrun_plugin.joining import dial_in

EXAMPLES = Path(__file__).parents[2] / "examples" / "kubernetes"
SCHEMAS = Path(__file__).with_name("kubernetes")
NAMES = ("jobset", "leaderworkerset")
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


def documents(name: str) -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())}


def problems(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """What the schema says against the value, as the API server would: it refuses unknown names, too."""
    wanted = schema.get("type")
    if wanted is not None and (not isinstance(value, TYPES[wanted]) or (wanted == "integer" and value is True)):
        yield f"{where} must be {wanted}"
        return
    if schema.get("x-kubernetes-int-or-string") and not isinstance(value, int | str):
        yield f"{where} must be a number or a string"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} must be one of {schema['enum']}"
    if isinstance(value, dict):
        yield from (f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, inner in value.items():
            below = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if below is not None:
                yield from problems(inner, below, f"{where}.{name}")
            elif wanted == "object" and where != ".metadata":
                yield f"{where}.{name} is unknown"
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from problems(inner, schema["items"], f"{where}[{index}]")


def check(name: str, value: dict[str, Any]) -> list[str]:
    published = json.loads((SCHEMAS / f"{name}.json").read_text())
    assert (value["apiVersion"], value["kind"]) == (published["apiVersion"], published["kind"])
    return list(problems(value, published["schema"], ""))


@pytest.mark.parametrize("name", NAMES)
def test_the_manifests_are_what_the_schemas_want(name: str) -> None:
    (resource,) = (value for kind, value in documents(name).items() if kind != "ConfigMap")
    assert check(name, resource) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("spec", "sucessPolicy"), {}, ".spec.sucessPolicy is unknown"),
        (
            ("spec", "successPolicy", "operator"),
            "all",
            ".spec.successPolicy.operator must be one of ['All', 'Any']",
        ),
        (("spec", "successPolicy"), {}, ".spec.successPolicy.operator is missing"),
        (("spec", "replicatedJobs", 1, "name"), 5, ".spec.replicatedJobs[1].name must be string"),
    ],
)
def test_a_slip_is_found(path: tuple[Any, ...], value: Any, problem: str) -> None:
    resource = documents("jobset")["JobSet"]
    place = resource
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert check("jobset", resource) == [problem]


def described(name: str, tmp_path: Path, environ: dict[str, str]) -> NodeGroup:
    path = tmp_path / "node_group.yaml"
    path.write_text(documents(name)["ConfigMap"]["data"]["node_group.yaml"])
    said = site_file.read_site_file(str(path), environ)
    assert said is not None
    assert said.group is not None
    return said.group


def node_options(container: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the process of a node makes of its command."""
    (_, *command), options = container["command"], container["args"]
    assert command == ["-m", node_agent.__name__, "--join"]
    kept: dict[str, Any] = {}

    class Dialler:
        def __init__(self, *given: Any) -> None:
            kept.update(zip(("file", "address", "rank", "patience", "stay"), given, strict=False))

        async def run(self) -> None:
            pass

    monkeypatch.setattr(dial_in, "Dialler", Dialler)
    assert dial_in.main(options) == 0
    return kept


def test_the_nodes_of_the_job_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = documents("jobset")["JobSet"]["spec"]
    client, nodes = spec["replicatedJobs"]
    job = nodes["template"]["spec"]

    group = described("jobset", tmp_path, {})

    # "<set>-<job>-<index of the job>-<index of the pod>" is a pod's host name, and the subdomain its domain.
    address = f"site-1-{client['name']}-0-0.{spec['network']['subdomain']}"
    assert [node.host for node in group.nodes[1:]] == [
        f"site-1-{nodes['name']}-0-{index}" for index in range(job["completions"])
    ]
    assert group.nodes[0].address == address
    assert job["parallelism"] == job["completions"]
    assert spec["successPolicy"]["targetReplicatedJobs"] == [client["name"]]
    given = node_options(job["template"]["spec"]["containers"][0], monkeypatch)
    assert (given["address"], given["stay"], given["file"]) == (address, True, "/etc/nvfl-join/nodes.json")


def test_the_nodes_of_the_leader_worker_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = documents("leaderworkerset")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    monkeypatch.setattr(socket, "gethostname", lambda: "site-1-0")
    environ = {
        "LWS_LEADER_ADDRESS": "site-1-0.site-1.default",
        "LWS_GROUP_SIZE": str(template["size"]),
        "LWS_WORKER_INDEX": "0",
    }

    group = described("leaderworkerset", tmp_path, environ)

    assert [node.address for node in group.nodes] == [
        "site-1-0.site-1.default",
        "site-1-0-1.site-1.default",
        "site-1-0-2.site-1.default",
    ]
    assert (group.transport, group.join and group.join.file) == ("join", "/etc/nvfl-join/client.json")
    given = node_options(template["workerTemplate"]["spec"]["containers"][0], monkeypatch)
    assert (given["address"], given["rank"], given["stay"]) == (None, None, True)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_client_has_the_clients_file(name: str) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text()
    client, nodes = text.index("secretName: site-1-client"), text.index("secretName: site-1-nodes")
    assert text.index("name: client\n") < client < text.index("name: node\n") < nodes
    assert text.count("secretName") == 2
