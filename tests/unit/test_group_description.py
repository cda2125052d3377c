"""Descriptions of a node group: their values, and what other components see."""

from __future__ import annotations

import dataclasses
import json
import socket
import string
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvflare_torchrun_plugin.contract import Contract
from nvflare_torchrun_plugin.description import group_description
from nvflare_torchrun_plugin.description.group_description import MAX_NODES, JoinSettings, Node, NodeGroup, parse
from nvflare_torchrun_plugin.group_values import NodeGroupError, parse_env, parse_nproc_per_node, shown

HERE = socket.gethostname()
# More digits than Python writes.
HUGE = pytest.param(10**5000, id="huge")

HASHABLE = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
ANYTHING = st.recursive(
    HASHABLE | st.just("auto") | st.just("localhost"),
    lambda inner: st.lists(inner) | st.dictionaries(HASHABLE, inner) | st.tuples(inner, inner),
    max_leaves=12,
)
HOSTILE_TEXT = st.text(st.characters(codec=None, exclude_categories=()))
MOSTLY_RIGHT = st.fixed_dictionaries(
    {"nodes": st.integers(-1, 5) | st.lists(st.just("localhost") | ANYTHING) | ANYTHING},
    optional={
        "transport": st.just("local") | ANYTHING,
        "master_port_range": st.tuples(st.integers(0, 70000), st.integers(0, 70000)) | ANYTHING,
        "env": st.dictionaries(st.text(string.ascii_uppercase + "_"), HOSTILE_TEXT) | ANYTHING,
        "python": HOSTILE_TEXT | ANYTHING,
        "pyhton": ANYTHING,
    },
)


def assert_one_line(error: NodeGroupError, begin: str = "") -> None:
    assert str(error).strip()
    assert str(error).startswith(begin)
    assert str(error).splitlines() == [str(error)]


def test_a_number_makes_that_many_nodes_on_this_host() -> None:
    group = parse({"nodes": 3}, "here", {})
    assert group == NodeGroup(nodes=(Node(HERE),) * 3, source="here")
    assert (group.nnodes, group.transport, group.master_port_range) == (3, "local", (29400, 30399))


def test_nodes_that_dial_in_may_be_known_by_their_ranks_alone() -> None:
    group = parse({"nodes": 3, "transport": "join"}, "here", {})
    assert group.nodes == (Node(HERE), Node("node-rank-1"), Node("node-rank-2"))
    assert group.join == JoinSettings(None, (30400, 30499), 60.0)
    given = {"nodes": [HERE, "gpu-1"], "transport": "join", "join": {"file": "/f", "ports": [5, 6], "wait": 7}}
    group = parse(given, "here", {})
    assert ([node.host for node in group.nodes], group.join) == ([HERE, "gpu-1"], JoinSettings("/f", (5, 6), 7.0))
    assert group.to_property()["join"] == {"file": "/f", "ports": (5, 6), "wait": 7.0}


def test_every_key_is_read() -> None:
    group = parse(
        {
            "nodes": [
                "localhost",
                {"host": HERE, "address": "10.0.0.2", "nproc_per_node": "gpu", "python": "/a b/python"},
                {"host": "127.0.0.1", "nproc_per_node": "2"},
            ],
            "transport": "local",
            "master_port_range": [5000, 5000],
            "env": {"A": "", "_b1": "x y\n"},
            "forward_env": ["MY_*"],
            "python": "/opt/é/python",
            "stage": "never",
            "on_busy": "share",
            "busy_timeout": 5,
        },
        "here",
        {},
    )
    assert group.nodes == (
        Node("localhost"),
        Node(HERE, "10.0.0.2", "gpu", "/a b/python"),
        Node("127.0.0.1", None, 2),
    )
    assert group.master_port_range == (5000, 5000)
    assert group.env == {"A": "", "_b1": "x y\n"}
    assert group.python == "/opt/é/python"
    assert (group.forward_env, group.stage) == (("MY_*",), "never")
    assert (group.on_busy, group.busy_timeout) == ("share", 5.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": None}, "src: key 'nodes' is missing: give a number"),
        ({"nodes": 0}, f"src: nodes is 0: must be a number from 1 to {MAX_NODES}, 'auto', or a list"),
        ({"nodes": MAX_NODES + 1}, "src: nodes is 4097: must be a number from 1 to 4096"),
        ({"nodes": True}, "src: nodes is True: must be a number"),
        ({"nodes": 2.0}, "src: nodes is 2.0: must be"),
        ({"nodes": "gpu-0"}, "src: nodes is 'gpu-0': must be"),
        ({"nodes": []}, r"src: nodes is \[\]: must be"),
        ({"nodes": "auto"}, "src: nodes is 'auto': "),
        ({"stage": "copy"}, "src: stage is 'copy': must be one of auto, always, never"),
        ({"on_busy": True}, "src: on_busy is True: must be one of wait, fail, share"),
        ({"busy_timeout": -1}, "src: busy_timeout is -1: must be a number of seconds"),
        ({"busy_timeout": float("nan")}, "src: busy_timeout is nan: must be a number of seconds"),
        ({"forward_env": "NCCL_*"}, r"src: forward_env is 'NCCL_\*': must be a list of names or patterns"),
        ({"forward_env": [""]}, r"src: forward_env is \[''\]: must be a list of names or patterns"),
        ({"nodes": ["gpu-7.invalid"], "transport": "ssh"}, "host 'gpu-7.invalid' first, but node rank 0 must be"),
        ({"nodes": [{"hots": HERE}]}, r"src: nodes\[0\]: unknown key 'hots': did you mean 'host'\?"),
        ({"nodes": [HERE, {}]}, r"src: nodes\[1\]: key 'host' is missing"),
        ({"nodes": [HERE, 7]}, r"src: nodes\[1\] is of type int: must be a mapping with the keys host,"),
        ({"nodes": ["-oProxyCommand=x"]}, r"src: nodes\[0\] host is '-oProxyCommand=x': must have no"),
        ({"nodes": ["a b"]}, r"src: nodes\[0\] host is 'a b': must have no blanks"),
        ({"nodes": ["a\nb"]}, r"src: nodes\[0\] host is 'a\\nb': must have no blanks"),
        ({"nodes": [""]}, r"src: nodes\[0\] host is '': must be a string"),
        ({"nodes": [{"host": HERE, "nproc_per_node": 0}]}, r"src: nodes\[0\] nproc_per_node is 0: must"),
        ({"nodes": ["gpu-7.invalid"]}, f"host 'gpu-7.invalid', but transport 'local' .* '{HERE}': name this"),
        (
            {"transport": "ssj"},
            "src: transport is 'ssj': must be one of local, ssh, srun, join, or a list of words",
        ),
        ({"transport": ["local"]}, r"src: transport is \('local',\): must have {host}, for the node"),
        ({"transport": ["{host}", "x"]}, "must have {host}, for the node, in one of the words after the first"),
        ({"transport": ["ssh", "", "{host}"]}, "must be a list of words, none of them empty"),
        ({"transport": 7}, "must be a list of words, none of them empty"),
        ({"join": {}}, "src: join is given, but transport is None: set transport to 'join'"),
        (
            {"transport": "join", "join": 5},
            "src: join is of type int: must be a mapping with the keys file, ports",
        ),
        ({"transport": "join", "join": {"port": 5}}, "src: join: unknown key 'port': did you mean 'ports'"),
        ({"transport": "join", "join": {"ports": 5}}, "src: join ports is 5: must be a list of the first and"),
        ({"transport": "join", "join": {"wait": -1}}, "src: join wait is -1: must be a number of seconds"),
        (
            {"transport": "join", "join": {"file": ""}},
            "src: join file is '': must be a string, the path of a join",
        ),
        ({"transport": "join", "python": "/p"}, "src: python is given, but with transport 'join' a node runs the"),
        ({"master_port_range": [30000, 29000]}, r"master_port_range is \[30000, 29000\]: must be a list of"),
        ({"master_port_range": [0, 5]}, "master_port_range .* from 1 to 65535"),
        ({"master_port_range": [5, 65536]}, "master_port_range .* from 1 to 65535"),
        ({"master_port_range": [5, True]}, "master_port_range .* from 1 to 65535"),
        ({"master_port_range": [5]}, "master_port_range .* from 1 to 65535"),
        ({"python": ""}, "src: python is '': must be a string, the path of a Python interpreter"),
        ({"python": "a\0"}, "src: python is"),
        ({"env": ["A=secret"]}, "src: env is of type list: must be a mapping"),
        ({"envs": {}}, r"src: unknown key 'envs': did you mean 'env'\? \(known keys: nodes, transport"),
        ({"zzz": 1}, r"src: unknown key 'zzz': remove it \(known keys"),
        ({7: 1}, "src: unknown key 7: remove it"),
        ({"nproc_per_node": 2}, "unknown key 'nproc_per_node': it belongs to a node, as in nodes: "),
    ],
)
def test_a_wrong_value_is_named_with_its_key(change: dict[Any, object], message: str) -> None:
    with pytest.raises(NodeGroupError, match=message) as caught:
        parse({"nodes": 1, **change}, "src", {})
    assert_one_line(caught.value)


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(NodeGroupError, match="src is of type list: must be a mapping with the keys nodes,"):
        parse(["nodes"], "src", {})


def test_the_rule_of_local_hosts_is_local_s_alone() -> None:
    group = parse({"nodes": [HERE, "gpu-1.invalid"], "transport": "ssh"}, "src", {})
    assert [node.host for node in group.nodes] == [HERE, "gpu-1.invalid"]
    assert group.transport == "ssh"
    template = ["kubectl", "exec", "-i", "{host}", "--"]
    assert parse({"nodes": [HERE, "pod"], "transport": template}, "src", {}).transport == tuple(template)


def test_where_a_job_is_written_the_nodes_of_a_site_stay_open() -> None:
    assert parse({"nodes": "auto"}, "src", None).nodes == ()
    assert parse({"nodes": ["gpu-7.invalid"], "transport": "srun"}, "src", None).nnodes == 1


def test_this_host_has_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getfqdn", lambda: "box.example.org")
    names = ["localhost", "LOCALHOST", "127.0.0.1", "::1", "box", "Box", "box.example.org"]
    assert all(map(group_description.is_this_host, names))
    assert not any(map(group_description.is_this_host, ["box2", "box2.example.org", "192.0.2.250", ""]))


@pytest.mark.parametrize("name", ["NVFL_RUN_ID", "RANK", "MASTER_ADDR", "PET_NNODES", "TORCHELASTIC_RUN_ID"])
def test_variables_that_make_the_group_are_refused(name: str) -> None:
    with pytest.raises(NodeGroupError, match=f"^job env sets {name}, which .* remove it$"):
        parse_env({name: "1"}, "job env")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"1A": "x"}, "has the name '1A'"),
        ({"A B": "x"}, "has the name 'A B'"),
        ({"A\n": "x"}, r"has the name 'A\\n'"),
        ({3: "x"}, "has the name 3"),
        ({"A": 1}, "the value of A is of type int: must be a string, put it in quotes"),
        ({"A": "x\0"}, "the value of A has a character"),
        ({"A": "\ud800"}, "the value of A has a character"),
    ],
)
def test_a_wrong_variable_is_named(env: object, message: str) -> None:
    with pytest.raises(NodeGroupError, match=f"job env:? {message}"):
        parse_env(env, "job env")


@pytest.mark.parametrize(
    "description",
    [
        {"nodes": 1, "env": "hunter2"},
        {"nodes": 1, "env": {"A": ["hunter2"]}},
        {"nodes": 1, "env": {"A": "hunter2\0"}},
        {"nodes": {"env": {"A": "hunter2"}}},
        {"nodes": 1, "transport": [{"A": "hunter2"}]},
        [{"nodes": 1, "env": {"A": "hunter2"}}],
        ["A=hunter2"],
    ],
)
def test_no_message_shows_a_variable_s_value(description: object) -> None:
    with pytest.raises(NodeGroupError) as caught:
        parse(description, "src", {})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "result"),
    [(None, None), (1, 1), ("8", 8), ("auto", "auto"), ("gpu", "gpu"), ("privateuseone", "privateuseone")],
)
def test_processes_per_node(value: object, result: object) -> None:
    assert parse_nproc_per_node(value, "n") == result


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "", "0", "GPU", "--x", "a b", [], "gpu\n", HUGE])
def test_wrong_processes_per_node(value: object) -> None:
    with pytest.raises(NodeGroupError, match=r"^n is .*: must be a number from 1 to 65536, or") as caught:
        parse_nproc_per_node(value, "n")
    assert_one_line(caught.value)


def test_a_group_cannot_be_changed_and_does_not_print_its_variables() -> None:
    env = {"KEY": "hunter2"}
    group = NodeGroup(nodes=(Node(HERE),), env=env)
    env["KEY"] = "other"
    assert group.env["KEY"] == "hunter2"
    with pytest.raises(TypeError):
        group.env["KEY"] = "other"  # type: ignore[index]  # the very thing that must fail
    with pytest.raises(dataclasses.FrozenInstanceError):
        group.source = "x"  # type: ignore[misc]  # the very thing that must fail
    assert "hunter2" not in repr(group)


def test_what_is_published_is_plain_and_holds_no_values_of_variables() -> None:
    group = parse(
        {"nodes": [{"host": "localhost", "nproc_per_node": 2}], "env": {"B": "hunter2", "A": "x"}},
        "site file x",
        {},
    )
    assert json.loads(json.dumps(group.to_property())) == {
        "nodes": [{"host": "localhost", "nproc_per_node": 2}],
        "nnodes": 1,
        "transport": "local",
        "master_port_range": [29400, 30399],
        "env": ["A", "B"],
        "forward_env": ["NCCL_*", "GLOO_*", "UCX_*", "HF_*", "PYTHONPATH"],
        "stage": "auto",
        "on_busy": "wait",
        "busy_timeout": 3600.0,
        "source": "site file x",
    }
    assert dataclasses.replace(group, python="/p").to_property()["python"] == "/p"


def test_nodes_that_nvflare_has_started_count() -> None:
    contract = Contract(nnodes=4, master_addr="gpu-0", run_id="r")
    group = NodeGroup(nodes=(Node(HERE),), contract=contract)
    assert group.nnodes == group.to_property()["nnodes"] == 4


@example({"nodes": "auto"}, False)
@given(ANYTHING | MOSTLY_RIGHT, st.booleans())
def test_any_description_is_a_group_or_one_clear_line(description: object, at_site: bool) -> None:
    try:
        group = parse(description, "src", {} if at_site else None)
    except NodeGroupError as error:
        assert_one_line(error, begin="src")
    else:
        assert isinstance(description, dict)
        # What 'auto' stands for is found at the site only.
        assert group.nnodes >= (0 if description["nodes"] == "auto" and not at_site else 1)
        assert group.env == (description.get("env") or {})
        json.dumps(group.to_property())


@given(ANYTHING | HOSTILE_TEXT)
def test_any_value_is_shown_short_and_on_one_line(value: object) -> None:
    text = shown(value)
    assert len(text.splitlines()) == 1
    shown([value] * 1000)
    assert len(shown("x" * 10000)) < 200
