"""A model as one block of bytes and a small description, and back: tensors and arrays that lie in the block.

The description is a pickle of everything but the numbers; in place of each tensor or array it has the number
of a piece of the block. Tensors that share memory (tied weights, views of one another) share it afterwards.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64
"""Bytes: what torch's own allocator keeps, and a multiple of every dtype's size."""


@dataclass(frozen=True)
class _Piece:
    """A tensor or an array in the block.

    Attributes:
        offset: bytes from the block's begin to the piece's memory.
        nbytes: of that memory; pieces that share one have the same two.
        start: elements from the memory's begin to the first.
        dtype: torch's, or numpy's for an array.
        shape: in elements.
        stride: in elements.
    """

    offset: int
    nbytes: int
    start: int
    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Packed:
    """A model's description, as it crosses to the other ranks.

    Attributes:
        pickled: the model with numbers in place of tensors and arrays.
        pieces: where in the block each of them is.
        nbytes: of the block.
    """

    pickled: bytes
    pieces: tuple[_Piece, ...]
    nbytes: int


# Classes of the module, and not of the functions that use them: a class is part of a reference cycle, and with it
# the model would stay in memory until Python's collector comes by.
class _TakesOut(pickle.Pickler):
    """Pickles a model without its tensors and arrays."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.taken: list[torch.Tensor | np.ndarray[Any, Any]] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not (_is_dense_tensor(obj) or _is_plain_array(obj)):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.taken)
            self.taken.append(obj)  # which keeps it alive, and so its id its own
        return self._numbers[id(obj)]


class _PutsIn(pickle.Unpickler):
    """Restores a model whose tensors and arrays lie in the block."""

    def __init__(self, packed: Packed, block: mmap | None) -> None:
        super().__init__(io.BytesIO(packed.pickled))
        self._pieces = packed.pieces
        self._block = block
        self._memories: dict[int, torch.Tensor] = {}
        self._found: dict[int, torch.Tensor | np.ndarray[Any, Any]] = {}

    def persistent_load(self, number: Any) -> Any:
        # The same object wherever it was the same one.
        if number not in self._found:
            self._found[number] = self._restore(self._pieces[number])
        return self._found[number]

    def _restore(self, at: _Piece) -> torch.Tensor | np.ndarray[Any, Any]:
        if not at.nbytes or self._block is None:
            if isinstance(at.dtype, torch.dtype):
                return torch.empty_strided(at.shape, at.stride, dtype=at.dtype)
            return np.empty(at.shape, at.dtype)
        if not isinstance(at.dtype, torch.dtype):
            strides = tuple(part * at.dtype.itemsize for part in at.stride)
            return np.ndarray(at.shape, at.dtype, self._block, at.offset, strides)
        if at.offset not in self._memories:
            self._memories[at.offset] = torch.frombuffer(
                self._block, dtype=torch.uint8, count=at.nbytes, offset=at.offset
            )
        storage = self._memories[at.offset].untyped_storage()
        return torch.empty(0, dtype=at.dtype).set_(storage, at.start, at.shape, at.stride)


class Packer:
    """Describes a model and writes its block.

    Args:
        model: anything that can be pickled. Taken out are dense tensors (of any dtype, on any device) and numpy
            arrays without Python objects; all else, subclasses of the two included, is pickled as it is.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: a part of it cannot be pickled.
    """

    def __init__(self, model: object) -> None:
        file = io.BytesIO()
        pickler = _TakesOut(file)
        pickler.dump(model)
        self._nbytes = 0
        self._sources: list[tuple[int, np.ndarray[Any, Any]]] = []
        pieces: dict[int, _Piece] = {}
        shared: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, obj in enumerate(pickler.taken):
            if isinstance(obj, torch.Tensor):
                tensor = obj.detach().resolve_conj().resolve_neg().cpu()
                shared.setdefault(tensor.untyped_storage().data_ptr() or -number - 1, []).append((number, tensor))
            else:
                pieces[number] = self._lay_array(obj)
        for tensors in shared.values():
            pieces.update(self._lay_tensors(tensors))
        ordered = tuple(pieces[number] for number in range(len(pickler.taken)))
        self.packed = Packed(file.getvalue(), ordered, self._nbytes)

    def write(self, descriptor: int) -> None:
        """Write the numbers into the block, a file of ``packed.nbytes`` bytes.

        Half as long as a write into a mapping takes, whose pages the kernel would clear first (measured).

        Raises:
            OSError: there is no memory for it.
        """
        for offset, memory in self._sources:
            rest = memory.data
            while rest:
                written = os.pwrite(descriptor, rest, offset)
                offset, rest = offset + written, rest[written:]

    def _lay_tensors(self, tensors: list[tuple[int, torch.Tensor]]) -> dict[int, _Piece]:
        """Lay tensors of the same memory: the part of it that they use."""
        if len(tensors) == 1 and _extent(tensors[0][1]) != tensors[0][1].numel():
            # With gaps, or with elements that are there several times.
            tensors = [(tensors[0][0], tensors[0][1].contiguous())]
        begins = [int(tensor.storage_offset()) * tensor.element_size() for _, tensor in tensors]
        ends = [
            begin + _extent(tensor) * tensor.element_size()
            for begin, (_, tensor) in zip(begins, tensors, strict=True)
        ]
        first = min(begins) // _ALIGNMENT * _ALIGNMENT
        nbytes = max(0, max(ends) - first)
        memory = torch.empty(0, dtype=torch.uint8)
        if nbytes:
            # Storages that begin at the same place (of numpy arrays) need not be equally long.
            storages = [tensor.untyped_storage() for _, tensor in tensors]
            memory.set_(max(storages, key=lambda storage: storage.nbytes()), first, (nbytes,), (1,))
        offset = self._add(memory.numpy())
        return {
            number: _Piece(
                offset,
                nbytes,
                (begin - first) // tensor.element_size(),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
            )
            for begin, (number, tensor) in zip(begins, tensors, strict=True)
        }

    def _lay_array(self, array: np.ndarray[Any, Any]) -> _Piece:
        by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = array.T if by_columns else array
        if not flat.flags.c_contiguous:
            flat = flat.copy(order="C")
        stride = tuple(part // max(1, array.itemsize) for part in flat.strides)
        offset = self._add(flat.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8))
        return _Piece(offset, array.nbytes, 0, array.dtype, array.shape, stride[::-1] if by_columns else stride)

    def _add(self, memory: np.ndarray[Any, Any]) -> int:
        offset = self._nbytes
        if len(memory):
            self._sources.append((offset, memory))
            self._nbytes += -(-len(memory) // _ALIGNMENT) * _ALIGNMENT
        return offset


def unpack(packed: Packed, block: mmap | None) -> Any:
    """Return the model, whose tensors and arrays lie in the block and keep it open.

    Args:
        packed: its description.
        block: its memory; None when it has no bytes.
    """
    return _PutsIn(packed, block).load()


def _is_dense_tensor(obj: object) -> bool:
    return (
        type(obj) is torch.Tensor
        and obj.layout == torch.strided
        and not (obj.is_quantized or obj.is_meta or obj.requires_grad)
    )


def _is_plain_array(obj: object) -> bool:
    return type(obj) is np.ndarray and not obj.dtype.hasobject


def _extent(tensor: torch.Tensor) -> int:
    """Elements of memory from the tensor's first to its last."""
    if not tensor.numel():
        return 0
    spread: Sequence[int] = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return 1 + sum(spread)
