from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nvflare_torchrun_plugin.contract import Contract, ContractError, parse_integer

GROUP = {"NVFL_NNODES": "2", "NVFL_MASTER_ADDR": "gpu-0", "NVFL_RUN_ID": "run"}

addresses = st.sampled_from(
    ["gpu-0", "localhost", "node_1.example.org", "10.0.0.1", "[::1]", "[2001:db8::1.2.3.4]", "größe.example"]
)
run_ids = st.text(st.characters(exclude_characters="\0"), min_size=1)


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    nnodes = draw(st.integers(1, 10**6))
    optional = st.none() if nnodes == 1 and draw(st.booleans()) else st.nothing()
    return Contract(
        nnodes=nnodes,
        node_rank=draw(st.integers(0, nnodes - 1)),
        master_addr=draw(optional | addresses),
        master_port=draw(st.integers(1, 65535)),
        run_id=draw(optional | run_ids),
    )


@given(contracts())
def test_written_and_read_back(contract: Contract) -> None:
    environ = contract.to_environ()
    assert all(isinstance(value, str) for value in environ.values())
    assert Contract.from_environ({"PATH": "/bin", **environ}) == contract


def test_defaults() -> None:
    assert Contract.from_environ({}) == Contract(1, 0, None, 29400, None)
    assert Contract().to_environ() == {
        "NVFL_NNODES": "1",
        "NVFL_NODE_RANK": "0",
        "NVFL_MASTER_PORT": "29400",
    }


def test_all_five_variables() -> None:
    environ = {**GROUP, "NVFL_NODE_RANK": "1", "NVFL_MASTER_PORT": "1234"}
    contract = Contract.from_environ(environ)
    assert contract == Contract(2, 1, "gpu-0", 1234, "run")
    assert contract.to_environ() == environ


def test_empty_address_and_run_id_count_as_none_for_one_node() -> None:
    contract = Contract.from_environ({"NVFL_MASTER_ADDR": "", "NVFL_RUN_ID": ""})
    assert contract == Contract()
    assert "NVFL_RUN_ID" not in contract.to_environ()


def test_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Contract().nnodes = 2  # type: ignore[misc]  # the test is that this fails


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NVFL_NNODES": "0"}, "NVFL_NNODES is 0: must be at least 1"),
        ({"NVFL_NNODES": "-1"}, "NVFL_NNODES is -1: must be at least 1"),
        ({"NVFL_NNODES": "x"}, "NVFL_NNODES is 'x': must be an integer"),
        ({"NVFL_NNODES": ""}, "NVFL_NNODES is '': must be an integer"),
        ({"NVFL_NNODES": "2.0"}, "NVFL_NNODES is '2.0': must be an integer"),
        ({"NVFL_NNODES": "1:4"}, "NVFL_NNODES is '1:4': must be an integer"),
        ({"NVFL_NNODES": "1_0"}, "NVFL_NNODES is '1_0': must be an integer"),
        ({"NVFL_NNODES": "٢"}, "NVFL_NNODES is '٢': must be an integer"),
        ({"NVFL_NNODES": "²"}, "NVFL_NNODES is '²': must be an integer"),
        ({"NVFL_NNODES": "1\n2"}, r"NVFL_NNODES is '1\n2': must be an integer"),
        ({"NVFL_NODE_RANK": "1"}, "NVFL_NODE_RANK is 1: must be from 0 to 0 because NVFL_NNODES is 1"),
        (
            {**GROUP, "NVFL_NODE_RANK": "2"},
            "NVFL_NODE_RANK is 2: must be from 0 to 1 because NVFL_NNODES is 2",
        ),
        ({**GROUP, "NVFL_NODE_RANK": "-1"}, "NVFL_NODE_RANK is -1: must be from 0 to 1"),
        ({**GROUP, "NVFL_NODE_RANK": "one"}, "NVFL_NODE_RANK is 'one': must be an integer"),
        ({"NVFL_MASTER_PORT": "0"}, "NVFL_MASTER_PORT is 0: must be a port from 1 to 65535"),
        ({"NVFL_MASTER_PORT": "65536"}, "NVFL_MASTER_PORT is 65536: must be a port from 1 to 65535"),
        ({"NVFL_MASTER_PORT": "http"}, "NVFL_MASTER_PORT is 'http': must be an integer"),
        ({"NVFL_MASTER_PORT": ""}, "NVFL_MASTER_PORT is '': must be an integer"),
        (
            {"NVFL_NNODES": "2", "NVFL_RUN_ID": "r"},
            "NVFL_MASTER_ADDR is not set: needed because NVFL_NNODES is 2",
        ),
        ({**GROUP, "NVFL_MASTER_ADDR": ""}, "NVFL_MASTER_ADDR is '': needed because NVFL_NNODES is 2"),
        (
            {"NVFL_NNODES": "2", "NVFL_MASTER_ADDR": "a"},
            "NVFL_RUN_ID is not set: needed because NVFL_NNODES is 2",
        ),
        ({**GROUP, "NVFL_RUN_ID": ""}, "NVFL_RUN_ID is '': needed because NVFL_NNODES is 2"),
        ({**GROUP, "NVFL_RUN_ID": "a\0b"}, r"NVFL_RUN_ID is 'a\x00b': an environment variable cannot hold"),
    ],
)
def test_bad_variables_are_named_with_their_values(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ContractError) as caught:
        Contract.from_environ(environ)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("::1", "must be in brackets, write '[::1]'"),
        ("2001:db8::7", "must be in brackets, write '[2001:db8::7]'"),
        ("gpu-0:29400", "must be a host without a port, put the port into NVFL_MASTER_PORT"),
        ("10.0.0.1:29400", "must be a host without a port"),
        ("[::1]:29400", "must be a host without a port"),
        ("fe80::1%eth0", "must be a host without a port"),
        ("[fe80::1%eth0]", "must be an IPv6 address without a zone"),
        ("[gpu-0]", "must be an IPv6 address without a zone"),
        ("[]", "must be an IPv6 address without a zone"),
        ("gpu 0", "must have no whitespace or control characters"),
        (" gpu-0", "must have no whitespace or control characters"),
        ("gpu-0\n", "must have no whitespace or control characters"),
        ("gpu\x1b0", "must have no whitespace or control characters"),
        ("gpu\u00a00", "must have no whitespace or control characters"),
        ("gpu\udcff", "must have no whitespace or control characters"),
        ("-oProxyCommand", "must be a host name"),
        ("user@gpu-0", "must be a host name"),
        ("a,b", "must be a host name"),
        ("[::1", "must be a host without a port"),
        ("256.0.0.1", "each part of an IPv4 address must be at most 255"),
    ],
)
@pytest.mark.parametrize("nnodes", ["1", "2"])
def test_bad_addresses(address: str, rule: str, nnodes: str) -> None:
    with pytest.raises(ContractError) as caught:
        Contract.from_environ({**GROUP, "NVFL_NNODES": nnodes, "NVFL_MASTER_ADDR": address})
    assert str(caught.value).startswith(f"NVFL_MASTER_ADDR is {address!r}: ")
    assert rule in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nnodes": "2"}, "NVFL_NNODES is '2': must be an int, got str"),
        ({"nnodes": True}, "NVFL_NNODES is True: must be an int, got bool"),
        ({"node_rank": None}, "NVFL_NODE_RANK is None: must be an int, got NoneType"),
        ({"master_port": 1.5}, "NVFL_MASTER_PORT is 1.5: must be an int, got float"),
        ({"master_addr": b"a"}, "NVFL_MASTER_ADDR is b'a': must be a str, got bytes"),
        ({"run_id": 7}, "NVFL_RUN_ID is 7: must be a str, got int"),
        ({"nnodes": 2, "run_id": "r"}, "NVFL_MASTER_ADDR is not set: needed because NVFL_NNODES is 2"),
        ({"master_port": 0}, "NVFL_MASTER_PORT is 0: must be a port from 1 to 65535"),
    ],
)
def test_checked_when_made_in_python_too(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError) as caught:
        Contract(**arguments)  # type: ignore[arg-type]  # wrong types are what is tested
    assert str(caught.value).startswith(message)


@given(st.dictionaries(st.sampled_from([*GROUP, "NVFL_NODE_RANK", "NVFL_MASTER_PORT"]), st.text()))
def test_any_text_is_a_contract_or_a_one_line_error(environ: dict[str, str]) -> None:
    message = ""
    try:
        contract = Contract.from_environ(environ)
    except ContractError as error:
        message = str(error)
    else:
        assert Contract.from_environ(contract.to_environ()) == contract
    assert not message or message.isprintable()


@given(st.integers(), st.sampled_from(["", "0", "00"]), st.text(" \t\n", max_size=2))
def test_parse_integer_reads_plain_decimal_digits(number: int, zeros: str, space: str) -> None:
    sign = "-" if number < 0 else "+" if zeros else ""
    assert parse_integer(f"{space}{sign}{zeros}{abs(number)}{space}") == number


@given(st.text("0123456789+-_. xe٣\t\n", max_size=6))
@example("9" * 5000)
@example("+-1")
@example("- 1")
def test_parse_integer_takes_nothing_that_int_refuses(text: str) -> None:
    try:
        number = parse_integer(text)
    except ValueError:
        return
    assert number == int(text)
