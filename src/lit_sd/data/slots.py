"""Room in shared memory in which workers put their batches, again and again.

PyTorch's loader makes new shared memory for each batch. The system has to clear it first, which takes up to
half the time that decoding a picture does. Here each worker has as many slots as it may have batches under
way and one more, and the process that trains copies a batch out before it asks for another.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import get_worker_info

AHEAD = 2
"""Batches that a worker makes ahead, PyTorch's default `prefetch_factor`."""


class Placed(NamedTuple):
    """Where a worker put arrays: its number, its slot, and the shapes by name, one behind the other."""

    worker: int
    slot: int
    shapes: dict[str, tuple[int, ...]]


class Slots:
    """Shared memory for the batches of some workers.

    Args:
        workers: how many there are.
        size: bytes of the largest batch; what is larger goes another way. Memory that no batch fills is never
            taken.
    """

    def __init__(self, workers: int, size: int) -> None:
        self.memory: UInt8[Tensor, "workers slots bytes"] = torch.empty(
            (workers, AHEAD + 1, size), dtype=torch.uint8
        ).share_memory_()
        self._next = 0

    def put(self, arrays: Mapping[str, Sequence[UInt8[np.ndarray, "..."]]]) -> Placed | None:
        """Puts stacks of equal arrays into the worker's next slot; None outside of a worker, and where they
        don't fit.
        """
        worker = get_worker_info()
        shapes = {name: (len(parts), *parts[0].shape) for name, parts in arrays.items()}
        if worker is None or sum(map(math.prod, shapes.values())) > self.memory.shape[2]:
            return None
        placed = Placed(worker.id, self._next, shapes)
        self._next = (self._next + 1) % self.memory.shape[1]
        for name, view in self._views(placed).items():
            np.stack(arrays[name], out=view.numpy())
        return placed

    def take(self, batch: dict[str, Any], pin: bool) -> dict[str, Any]:
        """The batch with copies of what lies in a slot, in pinned memory where that is wanted."""
        placed = batch.pop("placed", None)
        if placed is not None:
            for name, view in self._views(placed).items():
                batch[name] = torch.empty_like(view, pin_memory=pin).copy_(view)
        return batch

    def _views(self, placed: Placed) -> dict[str, Tensor]:
        slot, start, views = self.memory[placed.worker, placed.slot], 0, {}
        for name, shape in placed.shapes.items():
            stop = start + math.prod(shape)
            views[name] = slot[start:stop].view(shape)
            start = stop
        return views
