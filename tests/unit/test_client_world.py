"""A rank's place, read from torchrun's variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvflare_torchrun_plugin.client.world import World

OF_TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "5",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


def test_it_is_what_torchrun_says() -> None:
    world = World.from_environ(OF_TORCHRUN)
    assert world == World(rank=3, size=5, local_rank=1, local_size=2, node_rank=1, nnodes=2)
    assert not world.leads_node


def test_a_process_without_torchrun_is_a_world_of_its_own() -> None:
    assert World.from_environ({"PATH": "/bin", "RANK": "7"}) == World()


@given(st.sampled_from(["LOCAL_RANK", "GROUP_RANK"]), st.none() | st.text(max_size=4))
def test_a_variable_that_does_not_add_up_is_named(name: str, value: str | None) -> None:
    environ = dict(OF_TORCHRUN)
    del environ[name]
    if value is not None:
        environ[name] = value
    if value is not None and value.isascii() and value.isdigit() and int(value) <= 1:
        World.from_environ(environ)
        return
    with pytest.raises(ValueError, match=f"environment variable {name} is "):
        World.from_environ(environ)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "5"),
        ("RANK", "x"),
        ("LOCAL_WORLD_SIZE", "6"),
        ("GROUP_WORLD_SIZE", "\u0663"),
        ("LOCAL_RANK", "2"),
        ("GROUP_RANK", "2"),
        ("WORLD_SIZE", "0"),
    ],
)
def test_a_rank_beyond_the_world_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        World.from_environ({**OF_TORCHRUN, name: value})
