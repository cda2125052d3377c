"""A model as a block of bytes, and back."""

from __future__ import annotations

import gc
import os
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvflare.client import FLModel, ParamsType

from nvflare_torchrun_plugin.client import block
from nvflare_torchrun_plugin.client.packing import Packer, unpack

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
]
DTYPES = [*FLOATS, *INTEGERS, torch.complex64, torch.complex128, torch.bool]


def there_and_back(model: Any) -> Any:
    packer = Packer(model)
    nbytes = packer.packed.nbytes
    if not nbytes:
        return unpack(packer.packed, None)
    descriptor = block.create(nbytes)
    try:
        packer.write(descriptor)
        return unpack(packer.packed, block.map_private(descriptor, nbytes))
    finally:
        os.close(descriptor)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in their order; some dtypes know no comparison."""
    return (
        tensor.detach()
        .resolve_conj()
        .clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def of_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = int(np.prod(shape))
    raw = torch.arange(count * torch.empty(0, dtype=dtype).element_size(), dtype=torch.int64) % 2
    return raw.to(torch.uint8).view(dtype).reshape(shape)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.sampled_from([lambda t: t, lambda t: t.mT if t.ndim > 1 else t, lambda t: t[..., ::2] if t.ndim else t]),
)
def test_any_tensor_comes_back_as_it_was(
    dtype: torch.dtype, shape: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = view(of_dtype(dtype, shape))
    again = there_and_back({"w": tensor})["w"]
    assert (again.dtype, again.shape, bits(again)) == (tensor.dtype, tensor.shape, bits(tensor))


@given(
    st.sampled_from(["<f4", ">f4", "f8", "i1", "?", "c8", "S3", "M8[s]", "i4,f8"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.sampled_from([lambda a: a, lambda a: a.T, lambda a: a[..., ::-1] if a.ndim else a, np.asfortranarray]),
)
def test_any_array_comes_back_as_it_was(
    dtype: str, shape: tuple[int, ...], view: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]
) -> None:
    array = view(np.zeros(shape, dtype))
    array.setflags(write=False)
    again = there_and_back([array])[0]
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert again.flags.writeable


def test_what_shares_memory_shares_it_afterwards() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    again = there_and_back({"a": whole, "b": whole, "row": whole[1], "bits": whole.view(torch.int32)})
    assert again["a"] is again["b"]
    again["a"][1, 0] = 77
    assert again["row"][0] == 77
    assert again["bits"][1, 0] == torch.tensor(77.0).view(torch.int32)
    assert whole[1, 0] == 4


def test_tensors_of_one_array_may_have_storages_of_different_lengths() -> None:
    array = np.arange(1000.0)
    again = there_and_back({"head": torch.from_numpy(array[:2]), "all": torch.from_numpy(array)})
    assert again["head"].tolist() == [0, 1]
    assert torch.equal(again["all"], torch.arange(1000.0, dtype=torch.float64))


def test_a_small_part_of_a_large_tensor_brings_that_part_only() -> None:
    assert Packer(torch.zeros(1 << 20)[1000:1010]).packed.nbytes <= 128


def test_tensors_that_do_not_share_have_storages_of_their_own() -> None:
    """Or saving one of them would save all."""
    again = there_and_back([torch.ones(4), torch.ones(4)])
    assert [tensor.untyped_storage().nbytes() for tensor in again] == [16, 16]


def test_memory_formats_stay() -> None:
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert there_and_back(image).is_contiguous(memory_format=torch.channels_last)


def test_a_whole_model_comes_back() -> None:
    weight = torch.nn.Parameter(torch.rand(3))
    model = FLModel(
        params_type=ParamsType.DIFF,
        params={
            "w": weight,
            "s": torch.eye(3).to_sparse(),
            "text": "é",
            "object": np.array([None, "x"], dtype=object),
        },
        metrics={"loss": np.float32(0.5)},
        current_round=3,
        total_rounds=5,
        meta={"k": [1]},
    )
    again = there_and_back(model)
    assert (again.params_type, again.metrics, again.current_round, again.total_rounds, again.meta) == (
        ParamsType.DIFF,
        {"loss": 0.5},
        3,
        5,
        {"k": [1]},
    )
    assert isinstance(again.params["w"], torch.nn.Parameter)
    assert torch.equal(again.params["w"], weight)
    assert torch.equal(again.params["s"].to_dense(), torch.eye(3))
    assert again.params["text"] == "é"
    assert list(again.params["object"]) == [None, "x"]


def test_numbers_do_not_go_through_the_pickle() -> None:
    assert len(Packer({"w": torch.zeros(1 << 20), "a": np.zeros(1 << 20)}).packed.pickled) < 1000


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        Packer({"f": lambda: None})


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("nvflare-model")


def test_a_model_is_let_go_at_once() -> None:
    """And not only when Python looks for cycles: it may be most of the memory that there is."""
    before = mappings()
    gc.disable()
    try:
        model = {"w": torch.ones(1000), "a": np.ones(1000)}
        source, again = weakref.ref(model["w"]), there_and_back(model)
        lying = weakref.ref(again["w"])
        del model, again
        assert (source(), lying()) == (None, None)
        assert mappings() == before
    finally:
        gc.enable()
