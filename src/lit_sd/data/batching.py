"""Which examples make a batch.

An epoch is a fixed sequence of steps, a function of (seed, epoch) alone. Each step takes a fixed quota from
every pool of sources, on every rank. The pool that lasts longest drives the epoch: it goes on until that
pool has made all its whole steps, and the others start over, reshuffled, as often as needed. The first pool
decides the shapes where there are buckets; images of the others are cropped to the shape of their batch.
Draws that don't fill a step are left out, other ones each epoch, or filled up with `fill`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Sampler

from lit_sd.data.buckets import bucket_line
from lit_sd.data.pools import Pool
from lit_sd.data.transforms import Size
from lit_sd.data.turns import Drawn, joined, seeded


class Draw(NamedTuple):
    """One example of a batch: image `image` of a source, for the `occurrence`-th time in the epoch.

    `padding` marks examples that only fill a validation batch and count nothing.
    """

    source: str
    image: int
    epoch: int
    occurrence: int
    height: int
    width: int
    padding: bool = False


class MixedBatchSampler(Sampler[list[Draw]]):
    """One rank's share of each step of an epoch, from every pool; see the module's text.

    Where sources are read shard by shard, each rank goes through a stretch of the epoch's draws of its own,
    so that it reads few shards at a time; else a step's draws lie side by side.

    Attributes:
        start: asked by `iter` for (epoch, batches of it to leave out).
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        fill: bool = False,
    ) -> None:
        """
        Args:
            pools: what a step takes from; the first one decides the shapes.
            seed: of the order.
            rank: this process.
            world_size: number of processes.
            fill: draws that don't make a whole step are filled up with further draws of the same shape, so
                that each image is trained on in each epoch.

        Raises:
            ValueError: an epoch would have no step; the message shows the arithmetic.
        """
        self.pools, self.seed, self.rank, self.world_size = tuple(pools), seed, rank, world_size
        self.fill = fill
        self.start: Callable[[], tuple[int, int]] = lambda: self._position
        self._position = (0, 0)
        self._steps = max(sum(self._by_shape(pool).values()) for pool in self.pools)
        if not self._steps or not self.pools[0].shapes:
            raise ValueError(self._too_few())
        self._cycles = 1
        while sum(self._by_shape(self.pools[0], self._cycles).values()) < self._steps:
            self._cycles += 1
        self._lanes = world_size if any(pool.sharded for pool in self.pools) else 1
        self._order: tuple[int, list[tuple[int, int]]] | None = None

    def _by_shape(self, pool: Pool, cycles: int = 1) -> dict[Size, int]:
        """Steps that a pool makes of each shape in so many of its cycles, alone."""
        size = pool.quota * self.world_size
        return {
            shape: math.ceil(pool.cycle[shape] * cycles / size)
            if self.fill
            else pool.cycle[shape] * cycles // size
            for shape in pool.shapes
        }

    def fingerprint(self) -> dict[str, Any]:
        """What the order depends on beside the position, as plain values."""
        images = hashlib.sha256(repr((self.fill, self._lanes)).encode())
        for pool in self.pools:
            images.update(pool.fingerprint().encode())
        return {
            "seed": self.seed,
            "world_size": self.world_size,
            "batch": {pool.name: pool.quota for pool in self.pools},
            "images": images.hexdigest()[:16],
        }

    @property
    def step_size(self) -> int:
        """Images of one step, over all ranks."""
        return sum(pool.quota for pool in self.pools) * self.world_size

    def largest(self) -> tuple[int, Size]:
        """Images of a batch, and the shape with most pixels that one may have."""
        return self.step_size // self.world_size, max(self.pools[0].shapes, key=math.prod)

    def set_epoch(self, epoch: int, steps: int = 0) -> None:
        """Makes the next `iter` yield `epoch` without its first `steps` batches, unless `start` is set."""
        self._position = (epoch, steps)

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on each rank."""
        return self._steps

    def __iter__(self) -> Iterator[list[Draw]]:
        return self._batches(*self.start())  # asked now, not when the first batch is taken

    def _batches(self, epoch: int, skip: int) -> Iterator[list[Draw]]:
        lead, shapes = self.pools[0], self.pools[0].shapes
        numbers, places = self._schedule(epoch)
        # Of each shape, as many as the epoch goes on for: so that no lane's tail is left out.
        made = dict(zip(shapes, np.bincount(numbers, minlength=len(shapes)).tolist(), strict=True))
        for step in range(skip, self._steps):
            shape = shapes[numbers[step]]
            chunks = [self._mine(lead, epoch, shape, int(places[step]), made[shape])]
            chunks += [self._mine(pool, epoch, pool.square, step, self._steps) for pool in self.pools[1:]]
            yield [
                Draw(pool.members[member].source.name, image, epoch, occurrence, *shape)
                for pool, chunk in zip(self.pools, chunks, strict=True)
                for member, image, occurrence in zip(*(column.tolist() for column in chunk), strict=True)
            ]

    def _schedule(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each step: the number of its shape, and which one of that shape's steps it is.

        Each shape's steps are spread evenly over the epoch, so that all of them get on through the shards
        side by side.
        """
        made = list(self._by_shape(self.pools[0], self._cycles).values())
        times = [
            (np.arange(steps) + seeded(self.seed, epoch, self.pools[0].name, 3, number).random(steps)) / steps
            for number, steps in enumerate(made)
            if steps
        ]
        numbers = np.concatenate([np.full(steps, number) for number, steps in enumerate(made)])
        places = np.concatenate([np.arange(steps) for steps in made])
        order = np.argsort(np.concatenate(times), kind="stable")[: self._steps]
        return numbers[order], places[order]

    def _mine(self, pool: Pool, epoch: int, shape: Size, step: int, steps: int) -> Drawn:
        """This rank's draws in a step, which is one of so many."""
        chunk = pool.quota * self.world_size // self._lanes  # of a lane, in a step
        begin, end, pieces = self.rank * pool.quota, (self.rank + 1) * pool.quota, []
        while begin < end:
            lane, low = divmod(begin, chunk)
            count = min(chunk - low, end - begin)
            pieces.append(pool.take(epoch, shape, (lane * steps + step) * chunk + low, count))
            begin += count
        return joined(pieces)

    def report(self) -> list[str]:
        """Lines on what an epoch is made of: each source, the steps, what drives them, the buckets."""
        longest = max(self.pools, key=lambda pool: sum(self._by_shape(pool).values()))
        lines = [line for pool in self.pools for line in _source_lines(pool)]
        driven = f", as long as {longest.name} lasts; the others start over" if len(self.pools) > 1 else ""
        lines.append(f"an epoch has {self._steps} steps of {self.step_size} images{driven}")
        return lines + self._bucket_lines(self._cycles)

    def _bucket_lines(self, cycles: int) -> list[str]:
        lead, size = self.pools[0], self.pools[0].quota * self.world_size
        if len(lead.shapes) + len(lead.undrawn) < 2:
            return self._left_over(lead, size)
        undrawn = [bucket_line(s, lead.held(s), 0, 0, size, lead.names(s)) for s in lead.undrawn]
        return undrawn + [
            bucket_line(
                shape,
                lead.held(shape),
                lead.cycle[shape] * cycles,
                steps,
                size,
                () if steps else lead.names(shape),
            )
            for shape, steps in self._by_shape(lead, cycles).items()
        ]

    def _left_over(self, pool: Pool, size: int) -> list[str]:
        """A line on draws that make no whole step, where there are no buckets to say it."""
        spare = pool.draws * self._cycles % size if self._steps and len(self.pools) == 1 else 0
        if not spare:
            return []
        told = f"{size - spare} further draws fill up" if self.fill else f"{spare} draws are left over after"
        return [f"{told} the last step{'' if self.fill else ', other ones each epoch'}"]

    def _too_few(self) -> str:
        sums = [
            f"{pool.name}: {pool.images} images x {_times(pool)} = {pool.draws} draws an epoch, but a step "
            f"takes {pool.quota * self.world_size} ({pool.quota} in each batch x {self.world_size} ranks)"
            for pool in self.pools
        ]
        buckets = self._bucket_lines(1) if len(self.pools[0].shapes) > 1 else []
        if buckets:
            remedy = (
                "Each bucket has to fill its own steps: set a smaller data.batch_size, more data.repeats, "
                "data.fill=true, or data.buckets=false"
            )
        else:
            pool = self.pools[0]
            repeats = math.ceil(pool.quota * self.world_size / max(1, pool.images))
            remedy = f"Set a smaller data.batch_size, data.fill=true, or data.repeats={repeats} or more"
        return "\n".join(["not one training step can be made", *sums, *buckets, remedy])


def _times(pool: Pool) -> str:
    """A pool's repeats, in words."""
    repeats = {member.source.repeats for member in pool.members}
    return f"{repeats.pop()} repeats" if len(repeats) == 1 else "their repeats"


def _source_lines(pool: Pool) -> list[str]:
    lines = [
        f"{member.source.name}: {sum(member.counts.held.values())} images x {member.source.repeats} repeats"
        for member in pool.members
    ]
    if len(lines) == 1:
        return [f"{lines[0]}, {pool.quota} in each batch"]
    return [*lines, f"{pool.name}: all of these together, {pool.quota} in each batch"]


def held_out(ids: Sequence[str], share: int | float, seed: int) -> list[int]:
    """Indexes of a seeded share of the names: those whose hash is smallest, so that few change sides when
    others are added.

    Raises:
        ValueError: nothing would be left.
    """
    if not share:
        return []
    number = max(1, round(share * len(ids)))
    if number >= len(ids):
        raise ValueError(
            f"data.val_share={share} of {len(ids)} images leaves none to train on; "
            "set data.val_share=0, or data.val_root to another folder"
        )
    order = sorted(range(len(ids)), key=lambda i: hashlib.sha256(f"{seed}/{ids[i]}".encode()).digest())
    return sorted(order[:number])


class OrderedBatchSampler(Sampler[list[Draw]]):
    """Every image once, in order, shared over the ranks.

    Batches are equally many and equally large on each rank, so that no rank waits; what fills them up is
    marked as padding.
    """

    def __init__(
        self,
        name: str,
        indexes: Sequence[int],
        shape: Size,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.name, self.indexes, self.shape = name, list(indexes), shape
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size

    def __len__(self) -> int:
        return math.ceil(len(self.indexes) / (self.batch_size * self.world_size))

    def largest(self) -> tuple[int, Size]:
        """Images of a batch, and their shape."""
        return self.batch_size, self.shape

    def __iter__(self) -> Iterator[list[Draw]]:
        each = math.ceil(len(self.indexes) / self.world_size)
        mine = [
            Draw(self.name, self.indexes[i % len(self.indexes)], 0, 0, *self.shape, i >= len(self.indexes))
            for i in range(self.rank, each * self.world_size, self.world_size)
        ]
        for start in range(0, each, self.batch_size):
            yield mine[start : start + self.batch_size]
