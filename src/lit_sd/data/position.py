"""Where training stands: which process this is, and how far it is among the batches of its data."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from lit_sd.data.batching import MixedBatchSampler

log = logging.getLogger(__name__)


def ranks_of(trainer: Any) -> tuple[int, int]:
    """This process's rank and the number of processes, of a Lightning trainer or None.

    Raises:
        ValueError: Lightning would share out the data itself.
    """
    if trainer is None:
        return 0, 1
    places = trainer.distributed_sampler_kwargs or {}
    rank, world_size = places.get("rank", 0), places.get("num_replicas", 1)
    if world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
        raise ValueError(
            "Lightning would replace the batch sampler by its own; set trainer.use_distributed_sampler=false"
        )
    return rank, world_size


def same_on_all_ranks(plan: dict[str, Any], world_size: int) -> None:
    """Makes sure that all ranks would train on the same batches: else they wait for one another for ever.

    Args:
        plan: what a rank goes by.
        world_size: number of ranks.

    Raises:
        ValueError: another rank has another plan, such as from another copy of the data.
    """
    if world_size < 2 or not dist.is_initialized():
        return
    plans: list[Any] = [None] * world_size
    dist.all_gather_object(plans, plan)
    for rank, other in enumerate(plans):
        if differing := [key for key in plan if other.get(key) != plan[key]]:
            raise ValueError(
                f"rank {rank} has other data than rank {dist.get_rank()}: {', '.join(differing)} differ; "
                "give all ranks the same files, and mend those that can't be read rather than skip them"
            )


class Position:
    """Where training stands in the data, counted in batches that were trained on.

    Lightning's epoch counter won't do: it moves on when `max_steps` ends a run within an epoch. Nor will the
    loader's own position: workers run ahead of training.
    """

    def __init__(self, sampler: MixedBatchSampler, epoch_steps: int, trained: Callable[[], int]) -> None:
        """
        Args:
            sampler: the order of batches.
            epoch_steps: how many of them the trainer takes in an epoch.
            trained: tells how many batches were trained on.
        """
        self.order, self.epoch_steps, self.trained = sampler.fingerprint(), max(1, epoch_steps), trained
        self._offset = self._least = 0

    @classmethod
    def of(cls, trainer: Any, sampler: MixedBatchSampler) -> "Position":
        """Of a trainer's run."""
        limit, progress = trainer.limit_train_batches, trainer.fit_loop.epoch_loop.batch_progress
        steps = min(len(sampler), limit if isinstance(limit, int) else int(len(sampler) * limit))
        return cls(sampler, steps, lambda: progress.total.processed)

    def _count(self) -> int:
        # With `max_epochs` the loader is made before Lightning has restored its counters: not fewer than
        # were saved.
        return max(self.trained(), self._least)

    def __call__(self) -> tuple[int, int]:
        """Epoch, and batches of it that were trained on."""
        return divmod(self._count() + self._offset, self.epoch_steps)

    def state(self) -> dict[str, Any]:
        """The position, and what the order depends on, in plain values."""
        epoch, steps = self()
        return {"epoch": epoch, "steps": steps, "trained": self._count(), "order": self.order}

    def resume(self, then: Mapping[str, Any]) -> None:
        """Goes on from a state.

        Raises:
            ValueError: the state lies within an epoch of another order.
        """
        epoch, steps, order = then["epoch"], then["steps"], then["order"]
        other = [
            f"{key} was {order.get(key)}, is {now}"
            for key, now in self.order.items()
            if order.get(key) != now
        ]
        if other and steps:
            raise ValueError(
                f"the checkpoint lies {steps} batches into epoch {epoch}, and the rest of that epoch can't "
                f"be told any more: {'; '.join(other)}. Resume with the same data, seed, batch size and "
                "number of devices, or from a checkpoint at the end of an epoch"
            )
        if other:
            log.warning("resuming on other data than the checkpoint's: %s", "; ".join(other))
        self._least = then["trained"]
        self._offset = epoch * self.epoch_steps + steps - self._least
