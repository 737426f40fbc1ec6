"""What the ranks of a run tell each other over the CPU, so that no accelerator has to be waited for."""

from typing import Any

import torch
import torch.distributed as dist
from lightning import Trainer


class Ranks:
    """All ranks of a run. Each method has to be called by all of them, at the same place.

    Args:
        trainer: whose strategy is set up; None for one process alone.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        several = trainer is not None and trainer.world_size > 1 and dist.is_initialized()
        self._group: Any = dist.new_group(backend="gloo") if several else None

    def highest(self, value: int) -> int:
        """The highest of all ranks' values."""
        if self._group is None:
            return value
        highest = torch.tensor(value)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._group)
        return int(highest)

    def collect(self, value: Any) -> list[Any]:
        """All ranks' values, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
