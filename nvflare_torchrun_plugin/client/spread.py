"""Rank 0's model on every rank: once across to each node, and one mapping of it for all ranks there."""

from __future__ import annotations

import os
from datetime import timedelta
from mmap import mmap
from typing import Any

import torch
import torch.distributed as dist

from nvflare_torchrun_plugin.client import block
from nvflare_torchrun_plugin.client.links import MEET_BOUND, Links
from nvflare_torchrun_plugin.client.packing import Packed, Packer, unpack
from nvflare_torchrun_plugin.client.world import World

_BROADCAST_BOUND = timedelta(hours=1)
"""For a model to cross to the other nodes; all of them are waiting for it when it begins."""


class Spread:
    """This rank's part.

    Args:
        world: this rank.
        links: to the other ranks.
        store: a ``torch.distributed.Store``: torch's key-value store, for the first ranks of the nodes to meet.
    """

    def __init__(self, world: World, links: Links, store: Any) -> None:
        self._world = world
        self._links = links
        self._store = store
        self._nodes: Any = None
        self._packer: Packer | None = None
        self._memory: mmap | None = None

    def open(self) -> None:
        """Join the first ranks of all nodes in a process group of their own; the script's are left alone."""
        if self._world.nnodes > 1 and self._world.leads_node:
            self._nodes = dist.ProcessGroupGloo(
                self._store, self._world.node_rank, self._world.nnodes, timedelta(seconds=MEET_BOUND)
            )

    def describe(self, model: object) -> Packed:
        """Return the description of the model; on rank 0."""
        self._packer = Packer(model)
        return self._packer.packed

    def reserve(self, packed: Packed) -> int | None:
        """Return a descriptor of memory for the model on each node's first rank, None on others.

        On rank 0 the model is in it. All that may fail on one node alone is done here: in :meth:`bring` the other
        nodes would wait for that one.
        """
        packer, self._packer = self._packer, None
        if not packed.nbytes or not self._world.leads_node:
            return None
        descriptor = block.create(packed.nbytes)
        try:
            if packer is not None:
                packer.write(descriptor)
            if self._nodes is not None:
                self._memory = block.map_shared(descriptor, packed.nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def release(self, descriptor: int | None) -> None:
        """Give back what :meth:`reserve` has got, for a model that will not come."""
        self._memory = None
        if descriptor is not None:
            os.close(descriptor)

    def bring(self, packed: Packed, descriptor: int | None) -> Any:
        """Return the model; its tensors are this rank's own when they are written to."""
        if not packed.nbytes:
            return unpack(packed, None)
        try:
            if self._memory is not None:
                memory, self._memory = self._memory, None
                options = dist.BroadcastOptions()
                options.rootRank = 0
                options.timeout = _BROADCAST_BOUND
                self._nodes.broadcast([torch.frombuffer(memory, dtype=torch.uint8)], options).wait()
        finally:
            # The neighbours wait for it, whatever has become of the model.
            descriptor = self._links.share(descriptor)
        try:
            return unpack(packed, block.map_private(descriptor, packed.nbytes))
        finally:
            os.close(descriptor)
