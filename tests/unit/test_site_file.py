"""The site's node_group.yaml: what it may say, and what is said of a broken one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nvflare_torchrun_plugin.description.group_description import Node, parse
from nvflare_torchrun_plugin.description.site_file import NAME, SiteFile, read_site_file
from nvflare_torchrun_plugin.group_values import NodeGroupError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file will be; the blank and the line break must do no harm."""
    folder = tmp_path / "a b\nc"
    folder.mkdir()
    return folder / NAME


def read(path: Path, content: str | bytes) -> SiteFile:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read_site_file(str(path), {})
    assert found is not None
    return found


def failure(path: Path, content: str | bytes) -> str:
    with pytest.raises(NodeGroupError) as caught:
        read(path, content)
    message = str(caught.value)
    start = f"site file {path}".replace("\n", " ")
    assert message.startswith(start)
    assert message.splitlines() == [message]
    return message.removeprefix(start)


def test_no_file_says_nothing(path: Path) -> None:
    assert read_site_file(str(path), {}) is None


@pytest.mark.parametrize("content", ["", "# nodes: 2\n", "{}"])
def test_an_empty_file_says_nothing(path: Path, content: str) -> None:
    assert read(path, content) == SiteFile(None, (), str(path))


def test_all_that_it_may_say(path: Path) -> None:
    found = read(
        path,
        """
        # all nodes are this host
        nodes:
          - &first {host: localhost, nproc_per_node: 2}
          - {<<: *first, nproc_per_node: gpu}
          - localhost
        transport: local
        master_port_range: [30000, 30100]
        env: {NCCL_DEBUG: "1", GREETING: grüß}
        python: /opt/python
        allowed_scripts: [/opt/train.py, "/opt/a b.py"]
        """,
    )
    assert found.allowed_scripts == ("/opt/train.py", "/opt/a b.py")
    assert found.group == parse(
        {
            "nodes": [
                {"host": "localhost", "nproc_per_node": 2},
                {"host": "localhost", "nproc_per_node": "gpu"},
                "localhost",
            ],
            "master_port_range": [30000, 30100],
            "env": {"NCCL_DEBUG": "1", "GREETING": "grüß"},
            "python": "/opt/python",
        },
        f"site file {path}",
        {},
    )
    assert found.group is not None
    assert found.group.nodes[1] == Node("localhost", nproc_per_node="gpu")


def test_scripts_alone_leave_the_nodes_to_the_job(path: Path) -> None:
    assert read(path, "allowed_scripts: [/opt/x.py]") == SiteFile(None, ("/opt/x.py",), str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nodes: 2\n env: {}\n", " line 2 is no valid YAML: "),
        ("nodes: 2\nenv: {A: 'x\n", " is no valid YAML: found unexpected end of stream"),
        ("nodes: 2\nenv:\n  A: x\n  B: x\n  A: y\n", " line 5 is no valid YAML: key 'A' is given twice"),
        ("nodes: 2\n\nnodes: 3\n", " line 3 is no valid YAML: key 'nodes' is given twice"),
        ("nodes: 1\nenv: {A: 2000-99-99}\n", " line 2 is no valid YAML: a value is not of the type"),
        ("nodes: !!int x\n", " line 1 is no valid YAML: a value is not of the type"),
        ("nodes: !!python/object:os.system x\n", " line 1 is no valid YAML: could not determine a constr"),
        ("nodes: 1\n---\nnodes: 2\n", "is no valid YAML: but found another document"),
        ('nodes: "\\U00110000"\n', " is no valid YAML: "),
        ("[" * 5000, " is no valid YAML: nested too deeply"),
        (b"nodes: 1\n# gr\xfc\xdf\n", " is no valid YAML: "),
        (b"nodes: 1\0", " is no valid YAML: "),
        ("- nodes\n", " is of type list: must be a mapping with the keys nodes, transport,"),
        ("nodez: 2\n", ": unknown key 'nodez': did you mean 'nodes'?"),
        ("allowed_script: [/x]\n", ": unknown key 'allowed_script': did you mean 'allowed_scripts'? (known"),
        ("nproc_per_node: 2\n", ": unknown key 'nproc_per_node': it belongs to a node"),
        ("transport: local\n", ": key 'nodes' is missing"),
        ("nodes: yes\n", ": nodes is True: must be a number"),
        ("nodes: auto\n", ": nodes is 'auto': "),
        (
            "nodes: 1\nenv: {A: 1}\n",
            ": env: the value of A is of type int: must be a string, put it in quotes",
        ),
        ("allowed_scripts: /opt/x.py\n", ": allowed_scripts is '/opt/x.py': must be a list"),
        (
            "allowed_scripts: [/a, opt/x.py]\n",
            ": allowed_scripts[1] is 'opt/x.py': must be the absolute path",
        ),
        ("allowed_scripts: [null]\n", ": allowed_scripts[0] is None: must be the absolute path"),
        ("allowed_scripts: [7]\n", ": allowed_scripts[0] is 7: must be a string"),
    ],
)
def test_a_broken_file_is_named_with_the_line_or_the_key(path: Path, content: str | bytes, message: str) -> None:
    assert message in failure(path, content)


def test_a_file_that_cannot_be_read_is_an_error(path: Path) -> None:
    path.mkdir()
    with pytest.raises(NodeGroupError, match=r"node_group\.yaml cannot be read: Is a directory; correct"):
        read_site_file(str(path), {})


def test_no_message_shows_a_variable_s_value(path: Path) -> None:
    for content in (
        "nodes: 1\nenv: {A: [hunter2]}",
        "nodes: 1\nenv: {A: !!int hunter2}",
        "nodes: 1\nenv: A=hunter2",
        "- env: {A: hunter2}",
        "nodes: {env: {A: hunter2}}",
    ):
        assert "hunter2" not in failure(path, content)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.dates()
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(SCALARS, inner, max_size=4),
    max_leaves=8,
)
KNOWN = ("nodes", "transport", "master_port_range", "env", "python", "allowed_scripts")
SYNTAX = (
    *(
        ": ",
        "\n",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "? ",
        "'",
        '"',
        "\\x",
        "|",
        ">",
        "%YAML ",
        "---",
        "1",
        "auto",
    ),
    *("&a ", "*a", "<<", "!!int ", "!!float ", "!!timestamp ", "!!set ", "!!omap ", "!!binary "),
)
FILES = (
    st.dictionaries(st.sampled_from(KNOWN), DOCUMENTS).map(yaml.safe_dump)
    | DOCUMENTS.map(yaml.safe_dump)
    | st.text()
    | st.lists(st.sampled_from([*KNOWN, *SYNTAX]), max_size=25).map("".join)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=400)
@given(FILES.map(lambda text: text.encode(errors="surrogatepass")) | st.binary())
@example(b"&a [*a]")
@example(b"&a {nodes: [*a], env: *a}")
@example(b"nodes: &a [*a]")
@example(b"? !!timestamp x\n: 1")
@example(b"!!bool x")
@example(b"!!int ''")
@example(b"%YAML 9.9\n---\n1")
@example(b"nodes: 0x" + b"f" * 5000)
def test_any_file_is_read_or_gives_one_clear_line(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found = read_site_file(str(path), {})
    except NodeGroupError as error:
        message = str(error)
    else:
        assert found is not None
        assert found.group is None or found.group.nnodes >= 1
        return
    assert message.startswith("site file ")
    assert message.splitlines() == [message]
