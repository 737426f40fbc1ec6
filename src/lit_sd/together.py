"""Work that all ranks do at the same place, where none may be left waiting for one that failed."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


class Together:
    """All ranks of a run, one alone by default. They talk over the CPU, and wait for each other for days:
    one may take hours longer than another.

    Args:
        rank: this process.
        world_size: number of processes; above 1, torch.distributed has to be initialised, and all of them
            have to make this object at the same place.

    Raises:
        RuntimeError: there are several processes, and they can't talk to each other.
    """

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._group: Any = None
        if world_size > 1:
            if not (dist.is_available() and dist.is_initialized()):
                raise RuntimeError(
                    f"{world_size} ranks can't work together before torch.distributed is initialised; start "
                    "the trainer's processes first, or use one rank"
                )
            self._group = dist.new_group(backend="gloo", timeout=timedelta(days=7))

    def run(self, what: str, work: Callable[[], Result]) -> list[Result]:
        """The work's results on all ranks, by rank.

        Args:
            what: is being done, for messages.
            work: done by each rank.

        Raises:
            RuntimeError: it failed on another rank; what it raised here is raised as it is.
        """
        if self._group is None:
            return [work()]
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:
            failure = error
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, (result, None if failure is None else repr(failure)), self._group)
        if failure is not None:
            raise failure
        for rank, (_, reason) in enumerate(gathered):
            if reason is not None:
                raise RuntimeError(f"{what} failed on rank {rank}: {reason}")
        return [value for value, _ in gathered]

    @property
    def shared(self) -> str:
        """What to say of work that is shown for one rank alone."""
        return f", one of {self.world_size} shares" if self.world_size > 1 else ""

    def share(self, total: int) -> range:
        """This rank's part of so many pieces of work: a stretch of them, as long as any other's or shorter by
        one.
        """
        return range(self.rank * total // self.world_size, (self.rank + 1) * total // self.world_size)
