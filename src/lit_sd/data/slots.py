"""Room in shared memory in which workers put their pictures, again and again.

PyTorch's loader makes new shared memory for each batch. The system has to clear it first, which takes up to
half the time that decoding a picture does. Here a worker has some slots, and one is free again as soon as
nothing in the process that trains refers to its batch any more.
"""

import os
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import get_worker_info

AHEAD = 2
"""Batches that a worker makes ahead, PyTorch's default `prefetch_factor`."""
SLOTS = AHEAD + 3
"""Of a worker: for those, one being made, one that trains, and one that Lightning looks ahead."""
FREE, SENT, HELD = 0, 1, 2
SHARED = Path("/dev/shm")


class Placed(NamedTuple):
    """Where a batch's pixels lie: worker, slot, and their shape, `b h w 3`."""

    worker: int
    slot: int
    shape: tuple[int, ...]


class Slots:
    """Shared memory for the batches of some workers.

    Args:
        workers: how many there are.
        size: bytes of the largest batch. Memory that no batch fills is never taken.
    """

    def __init__(self, workers: int, size: int) -> None:
        self.memory = torch.empty((workers, SLOTS, size), dtype=torch.uint8).share_memory_()
        self._state = torch.zeros((workers, SLOTS), dtype=torch.uint8).share_memory_()
        self._epoch_of = torch.zeros((workers, SLOTS), dtype=torch.int64).share_memory_()
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._placed: Placed | None = None

    @classmethod
    def where_they_fit(cls, workers: int, size: int) -> "Slots | None":
        """Slots, or None where shared memory has no room for them: a full one ends processes unexplained."""
        try:
            stat = os.statvfs(SHARED)
        except OSError:
            return None
        return cls(workers, size) if workers * SLOTS * size < stat.f_bavail * stat.f_frsize // 2 else None

    def begin(self) -> None:
        """A new epoch: what was sent in the last one and not taken won't be."""
        self._epoch += 1

    def room(self, shape: tuple[int, int, int, int]) -> UInt8[np.ndarray, "b h w c"]:
        """Where to put a batch's pixels: a slot in a worker that has a free one, else new memory."""
        worker, size = get_worker_info(), int(np.prod(shape))
        self._placed = None
        if worker is None or size > self.memory.shape[2]:
            return np.empty(shape, np.uint8)
        state, epoch_of, now = self._state[worker.id], self._epoch_of[worker.id], self._epoch
        free = (state == FREE) | ((state == SENT) & (epoch_of != now))
        if not free.any():
            return np.empty(shape, np.uint8)
        slot = int(free.byte().argmax())
        state[slot], epoch_of[slot] = SENT, now[0]
        self._placed = Placed(worker.id, slot, shape)
        return self._view(self._placed)

    def placed(self, pixels: np.ndarray) -> Placed | None:
        """Where the batch lies whose pictures are these, if `room` gave them a slot."""
        placed, self._placed = self._placed, None
        return placed if placed is not None and np.shares_memory(pixels, self._view(placed)) else None

    def take(self, batch: dict[str, Any], pin: bool) -> dict[str, Any]:
        """The batch with its pixels, of which a copy is made only where they go to pinned memory."""
        placed: Placed | None = batch.pop("placed", None)
        if placed is None:
            return batch
        view = self._view(placed)
        if pin:
            batch["pixels"] = torch.empty(placed.shape, dtype=torch.uint8, pin_memory=True)
            batch["pixels"].copy_(torch.from_numpy(view))
            self._release(placed)
            return batch
        self._state[placed.worker, placed.slot] = HELD
        weakref.finalize(view, self._release, placed)
        batch["pixels"] = torch.from_numpy(view)  # it keeps `view` alive, as do tensors made of it
        return batch

    def _release(self, placed: Placed) -> None:
        self._state[placed.worker, placed.slot] = FREE

    def _view(self, placed: Placed) -> np.ndarray:
        size = int(np.prod(placed.shape))
        slot: Tensor = self.memory[placed.worker, placed.slot, :size]
        return slot.numpy().reshape(placed.shape)
