"""Which group a job gets: precedence, and how much of it the job wants."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin.contract import Contract
from nvflare_torchrun_plugin.description.group_choice import Wish, choose, parse_nnodes, parse_wish
from nvflare_torchrun_plugin.description.group_description import Node, NodeGroup, parse
from nvflare_torchrun_plugin.description.site_file import SiteFile
from nvflare_torchrun_plugin.group_values import NodeGroupError

HERE = socket.gethostname()
# More digits than Python writes.
HUGE = pytest.param(10**5000, id="huge")
CONTRACT = Contract(nnodes=3, master_addr="gpu-0", master_port=29999, run_id="r").to_environ()
SITE_PATH = "/ws/local/node_group.yaml"


def site(nodes: object, *scripts: str) -> SiteFile:
    group = parse({"nodes": nodes, "env": {"FROM": "site"}}, f"site file {SITE_PATH}", {}) if nodes else None
    return SiteFile(group, scripts, SITE_PATH)


def chosen(
    environ: Mapping[str, str] | None = None,
    site_file: SiteFile | None = None,
    prop: object = None,
    wish: Wish = Wish(),  # noqa: B008 - immutable
    launch_once: bool = False,
) -> NodeGroup:
    return choose(environ or {}, site_file, prop, wish, byoc=True, launch_once=launch_once, script="/x.py")


def processes(group: NodeGroup) -> list[int | str | None]:
    return [node.nproc_per_node for node in group.nodes]


class TestPrecedence:
    def test_the_contract_goes_before_all(self) -> None:
        group = chosen(CONTRACT, site(2), {"nodes": 4}, launch_once=True)
        assert group.contract == Contract(nnodes=3, master_addr="gpu-0", master_port=29999, run_id="r")
        assert group.nnodes == 3
        assert group.nodes == (Node(HERE, "gpu-0", "auto"),)
        assert group.env == {}
        assert group.source == "environment of the client job (NVFL_NNODES=3)"

    def test_a_contract_for_one_node_says_nothing(self) -> None:
        group = chosen({"NVFL_NNODES": "1"}, site(2))
        assert (group.contract, group.nnodes) == (None, 2)

    def test_the_site_goes_before_the_job(self) -> None:
        group = chosen({}, site(2), {"nodes": 4, "env": {"FROM": "job"}})
        assert (group.nnodes, dict(group.env)) == (2, {"FROM": "site"})
        assert group.source == f"site file {SITE_PATH}"

    def test_a_wrong_property_does_no_harm_where_the_site_decides(self) -> None:
        assert chosen({}, site(2), "nonsense").nnodes == 2

    def test_the_job_decides_where_the_site_lists_scripts_alone(self) -> None:
        group = chosen({}, site(None, "/x.py"), {"nodes": 4})
        assert (group.nnodes, group.source) == (4, "FL context property node_group")

    def test_a_wrong_property_is_named(self) -> None:
        with pytest.raises(NodeGroupError, match="FL context property node_group: nodes is 0: must be"):
            chosen({}, None, {"nodes": 0})

    @pytest.mark.parametrize("nothing", [{}, [], 0, ""])
    def test_an_empty_property_is_an_error_too(self, nothing: object) -> None:
        with pytest.raises(NodeGroupError, match="FL context property node_group"):
            chosen({}, None, nothing)

    def test_else_this_host_alone(self) -> None:
        group = chosen()
        assert group.nodes == (Node(HERE, nproc_per_node="auto"),)
        assert group.source.startswith("this host alone (neither the site's local/node_group.yaml nor")

    def test_a_scheduler_s_allocation_is_not_taken_unasked(self) -> None:
        assert chosen({"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}).nnodes == 1


class TestContract:
    @pytest.mark.parametrize(
        ("environ", "message"),
        [
            ({"NVFL_NNODES": "x"}, "^environment of the client job: NVFL_NNODES is 'x'"),
            ({"NVFL_NNODES": "0"}, "^environment of the client job: NVFL_NNODES is 0"),
            ({"NVFL_NNODES": "2"}, "^environment of the client job: NVFL_MASTER_ADDR is not set"),
            (
                {**CONTRACT, "NVFL_NODE_RANK": "1"},
                "NVFL_NODE_RANK is 1: the client job's host must be node rank 0",
            ),
        ],
    )
    def test_a_wrong_one_is_an_error(self, environ: dict[str, str], message: str) -> None:
        with pytest.raises(NodeGroupError, match=message):
            chosen(environ, site(2), launch_once=True)

    def test_launching_for_each_task_is_impossible(self) -> None:
        with pytest.raises(
            NodeGroupError, match=r"\(NVFL_NNODES=3\): .* dial in: set launch_once to true, or describe"
        ):
            chosen(CONTRACT)

    @pytest.mark.parametrize("where", ["site", "job"])
    def test_each_task_has_its_own_launch_where_the_nodes_dial_in(self, where: str) -> None:
        described = {"nodes": "auto", "transport": "join", "env": {"A": "1"}, "on_busy": "fail"}
        by_site = SiteFile(parse(described, "the file", CONTRACT), (), SITE_PATH) if where == "site" else None

        group = chosen(CONTRACT, by_site, None if by_site else described, Wish((2, 3), 4))

        assert [(node.host, node.address) for node in group.nodes] == [
            (HERE, "gpu-0"),
            ("node-rank-1", None),
            ("node-rank-2", None),
        ]
        assert (group.nnodes, group.least, processes(group)) == (3, 2, [4, 4, 4])
        # The nodes are the job's own: no other job has to be waited for.
        assert (group.contract, group.on_busy, dict(group.env)) == (None, "share", {"A": "1"})
        assert group.source.endswith("nodes 'auto': environment of the client job (NVFL_NNODES=3)")

    def test_one_launch_for_all_tasks_is_the_translators_all_the_same(self) -> None:
        group = chosen(CONTRACT, prop={"nodes": "auto", "transport": "join"}, launch_once=True)
        assert (group.join, group.nnodes, group.nodes[1:]) == (None, 3, ())

    def test_nodes_that_dial_in_are_as_many_as_the_launcher_has_started(self) -> None:
        with pytest.raises(NodeGroupError, match=r"describes 2 nodes, but .* says 3: set nodes to 'auto'"):
            chosen(CONTRACT, prop={"nodes": 2, "transport": "join"})
        with pytest.raises(NodeGroupError, match="impossible unless they dial in"):
            chosen(CONTRACT, prop={"nodes": 3, "transport": "local"})

    @pytest.mark.parametrize("nnodes", [(3, 3), (1, 3), (2, 9)])
    def test_the_job_may_want_what_is_there(self, nnodes: tuple[int, int]) -> None:
        group = chosen(CONTRACT, wish=Wish(nnodes, 4), launch_once=True)
        assert (group.nnodes, processes(group)) == (3, [4])

    @pytest.mark.parametrize(
        ("nnodes", "words"), [((2, 2), "2 nodes"), ((1, 2), "1 to 2 nodes"), ((4, 9), "4 to 9 nodes")]
    )
    def test_it_may_not_want_another_number(self, nnodes: tuple[int, int], words: str) -> None:
        with pytest.raises(NodeGroupError, match=rf"wants {words} .* says 3.* set nnodes to 3 or leave it out"):
            chosen(CONTRACT, wish=Wish(nnodes), launch_once=True)


class TestWish:
    @pytest.mark.parametrize(
        ("value", "result"),
        [(None, None), (2, (2, 2)), ("2", (2, 2)), ("1:4", (1, 4)), (" 1 : 4 ", (1, 4)), ("3:3", (3, 3))],
    )
    def test_nnodes(self, value: object, result: object) -> None:
        assert parse_nnodes(value) == result

    @pytest.mark.parametrize(
        "value",
        [
            0,
            -1,
            True,
            2.0,
            "",
            "x",
            "0",
            "4:1",
            "0:4",
            "1:",
            ":4",
            "1:2:3",
            "-1",
            "1e3",
            "²",
            [1, 4],
            {},
            HUGE,
        ],
    )
    def test_wrong_nnodes(self, value: object) -> None:
        with pytest.raises(NodeGroupError, match=r"^here nnodes is .*: must be a number of nodes of at least 1"):
            parse_nnodes(value, "here nnodes")

    @given(st.none() | st.integers() | st.floats() | st.text() | st.from_regex(r"\s*\d+:?\d*\s*") | st.binary())
    def test_any_nnodes_are_a_pair_or_one_clear_line(self, value: object) -> None:
        try:
            pair = parse_nnodes(value)
        except NodeGroupError as error:
            message = str(error)
        else:
            assert pair is None or 1 <= pair[0] <= pair[1]
            return
        assert message.splitlines() == [message]

    @pytest.mark.parametrize("pair", [(1, 1), (1, 4), (7, 123456)])
    def test_nnodes_read_back_as_written(self, pair: tuple[int, int]) -> None:
        assert parse_nnodes(f"{pair[0]}:{pair[1]}") == pair

    def test_the_arguments_count_where_the_meta_is_silent(self) -> None:
        meta = {"launcher_spec": {"site-2": {"process": {"nnodes": 9}}, "site-1": {"docker": {"nnodes": 9}}}}
        assert parse_wish("1:2", "gpu", meta, "site-1") == Wish((1, 2), "gpu")
        assert parse_wish(None, None, {}, "site-1") == Wish()

    def test_the_site_s_meta_goes_before_them(self) -> None:
        meta = {"launcher_spec": {"site-1": {"process": {"nnodes": "2:3", "mem": [], "nodes": "x"}}}}
        assert parse_wish(8, 4, meta, "site-1") == Wish((2, 3), 4)

    def test_the_meta_of_every_site_lies_between(self) -> None:
        meta = {
            "launcher_spec": {
                "default": {"process": {"nnodes": 5, "nproc_per_node": 6}},
                "site-1": {"process": {"nnodes": 7}},
            }
        }
        assert parse_wish(1, 1, meta, "site-1") == Wish((7, 7), 6)
        assert parse_wish(1, 1, meta, "site-2") == Wish((5, 5), 6)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (
                {"process": {"nnodes": "x"}},
                r"^job meta launcher_spec\['site-1'\]\['process'\]\['nnodes'\] is 'x'",
            ),
            (
                {"process": {"nproc_per_node": 0}},
                r"launcher_spec\['site-1'\]\['process'\]\['nproc_per_node'\] is 0",
            ),
            ({"process": []}, r"^job meta launcher_spec\['site-1'\]\['process'\] is \[\]: must be a mapping"),
            (3, r"^job meta launcher_spec\['site-1'\] is 3: must be a mapping"),
        ],
    )
    def test_a_wrong_meta_is_named(self, spec: object, message: str) -> None:
        with pytest.raises(NodeGroupError, match=message):
            parse_wish(1, 1, {"launcher_spec": {"site-1": spec}}, "site-1")

    def test_a_wrong_argument_is_named(self) -> None:
        with pytest.raises(NodeGroupError, match=r"^executor argument nnodes is 0"):
            parse_wish(0, None, {}, "site-1")
        with pytest.raises(NodeGroupError, match=r"^executor argument nproc_per_node is 'GPU'"):
            parse_wish(1, "GPU", {}, "site-1")
        with pytest.raises(NodeGroupError, match=r"^job meta launcher_spec is 'x': must be a mapping"):
            parse_wish(1, 1, {"launcher_spec": "x"}, "site-1")


class TestGrant:
    NODES = ("localhost", "127.0.0.1", {"host": HERE, "nproc_per_node": 2})

    @pytest.mark.parametrize(
        ("nnodes", "granted"), [(None, 3), ((1, 1), 1), ((2, 2), 2), ((3, 3), 3), ((1, 2), 2), ((2, 9), 3)]
    )
    def test_the_first_nodes_are_given(self, nnodes: tuple[int, int] | None, granted: int) -> None:
        group = chosen({}, site(self.NODES), wish=Wish(nnodes))
        assert [node.host for node in group.nodes] == ["localhost", "127.0.0.1", HERE][:granted]
        assert processes(group) == ["auto", "auto", 2][:granted]
        assert dict(group.env) == {"FROM": "site"}

    @pytest.mark.parametrize(("nnodes", "words"), [((4, 4), "4 nodes"), ((4, 8), "4 to 8 nodes")])
    def test_never_more_than_there_are(self, nnodes: tuple[int, int], words: str) -> None:
        with pytest.raises(NodeGroupError) as caught:
            chosen({}, site(self.NODES), wish=Wish(nnodes))
        assert str(caught.value) == (
            f"the job wants {words} (nnodes), but site file {SITE_PATH} offers 3: lower nnodes, or describe"
            " more nodes"
        )

    def test_this_host_alone_offers_one(self) -> None:
        with pytest.raises(NodeGroupError, match=r"wants 2 nodes \(nnodes\), but this host alone \(.*\) offers 1"):
            chosen(wish=Wish((2, 2)))
        assert chosen(wish=Wish((1, 2), 3)).nodes == (Node(HERE, nproc_per_node=3),)

    @pytest.mark.parametrize(
        ("offered", "wanted", "granted"),
        [
            (None, None, "auto"),
            (None, 8, 8),
            (None, "gpu", "gpu"),
            (4, None, 4),
            (4, 4, 4),
            (4, 1, 1),
            (4, "auto", 4),
            (4, "gpu", 4),
            ("gpu", None, "gpu"),
            ("gpu", 8, 8),
            ("gpu", "cpu", "gpu"),
            ("gpu", "auto", "gpu"),
            ("auto", "gpu", "gpu"),
            ("auto", None, "auto"),
        ],
    )
    def test_processes(self, offered: Any, wanted: Any, granted: object) -> None:
        group = chosen({}, site([{"host": HERE, "nproc_per_node": offered}]), wish=Wish(None, wanted))
        assert processes(group) == [granted]

    def test_never_more_processes_than_a_node_offers(self) -> None:
        with pytest.raises(NodeGroupError) as caught:
            chosen({}, site(self.NODES), wish=Wish(None, 3))
        assert str(caught.value) == (
            f"the job wants 3 processes per node (nproc_per_node), but site file {SITE_PATH} offers 2 on node"
            f" {HERE}: lower nproc_per_node"
        )

    def test_a_node_that_is_not_given_does_not_count(self) -> None:
        assert processes(chosen({}, site(self.NODES), wish=Wish((2, 2), 3))) == [3, 3]
