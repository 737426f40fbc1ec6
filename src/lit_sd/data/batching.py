"""Which examples make a batch.

An epoch is a fixed sequence of steps, a function of (seed, epoch) alone. Each step takes a fixed quota from
every source, on every rank. The source that lasts longest drives the epoch: it goes on until that source has
made all its whole steps, and the others start over, reshuffled, as often as needed. The first source decides
the shapes where there are buckets; images of the others are cropped to the shape of their batch. Draws that
don't fill a step are left out, other ones each epoch.
"""

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from PIL import Image
from torch.utils.data import Sampler

from lit_sd.data.buckets import bucket_report
from lit_sd.data.transforms import Size


@runtime_checkable
class Source(Protocol):
    """A set of images with captions. `notes` (lines for the report) and `captions()` may be missing."""

    name: str
    weight: float
    repeats: int

    def __len__(self) -> int: ...
    def sizes(self) -> list[Size]: ...
    def ids(self) -> list[str]: ...
    def load(self, index: int) -> tuple[Image.Image, str]: ...
    def check(self) -> None: ...


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


@dataclass(frozen=True)
class Part:
    """What a source gives to each step.

    Attributes:
        name: the source.
        groups: indexes of its images by shape; one shape where there are no buckets.
        quota: images in each batch, on each rank.
        repeats: how often an epoch draws each image.
        ids: the source's names of its images, for messages.
    """

    name: str
    groups: dict[Size, list[int]]
    quota: int
    repeats: int = 1
    ids: Sequence[str] = ()

    @property
    def indexes(self) -> list[int]:
        """All its images."""
        return [index for group in self.groups.values() for index in group]

    def steps(self, world_size: int, repeats: int | None = None) -> int:
        """Whole steps that it makes in an epoch, alone."""
        size, repeats = self.quota * world_size, repeats or self.repeats
        return sum(len(group) * repeats // size for group in self.groups.values())


def share_batch(batch_size: int, shares: Mapping[str, int | float]) -> dict[str, int]:
    """Parts of a batch in proportion to `shares`, by largest remainder, at least one for each; earlier ones
    win ties.

    Raises:
        ValueError: the batch is smaller than the number of sources, or a share isn't positive.
    """
    if batch_size < len(shares):
        raise ValueError(
            f"data.batch_size={batch_size} can't hold one image from each of the {len(shares)} sources "
            f"({', '.join(shares)}); set data.batch_size={len(shares)} or more"
        )
    if any(not share > 0 for share in shares.values()):
        raise ValueError(f"data.shares={dict(shares)}: expected positive numbers")
    total, spare = sum(shares.values()), batch_size - len(shares)
    exact = {name: batch_size * share / total for name, share in shares.items()}
    parts = dict.fromkeys(shares, 1)
    for _ in range(spare):
        neediest = max(parts, key=lambda name: round(exact[name] - parts[name], 9))
        parts[neediest] += 1
    return parts


def seeded(seed: int, epoch: int, name: str, *rest: int) -> np.random.Generator:
    """A stream of its own for each epoch, source and purpose, whatever process asks."""
    return np.random.default_rng([seed, epoch, zlib.crc32(name.encode()), *rest])


class MixedBatchSampler(Sampler[list[Draw]]):
    """One rank's share of each step of an epoch, from every source; see the module's text.

    Attributes:
        start: asked by `iter` for (epoch, batches of it to leave out).
    """

    def __init__(self, parts: Sequence[Part], *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        """
        Args:
            parts: the sources' parts; the first one decides the shapes.
            seed: of the order.
            rank: this process.
            world_size: number of processes.

        Raises:
            ValueError: an epoch would have no step; the message shows the arithmetic.
        """
        self.parts, self.seed, self.rank, self.world_size = tuple(parts), seed, rank, world_size
        self.start: Callable[[], tuple[int, int]] = lambda: self._position
        self._position = (0, 0)
        self._steps = max(part.steps(world_size) for part in self.parts)
        if not self._steps:
            raise ValueError(self._too_few())
        self._lead_repeats = self.parts[0].repeats
        while self.parts[0].steps(world_size, self._lead_repeats) < self._steps:
            self._lead_repeats += 1

    def fingerprint(self) -> dict[str, Any]:
        """What the order depends on beside the position, as plain values."""
        images = hashlib.sha256()
        for part in self.parts:
            images.update(repr((part.name, part.groups, part.repeats, list(part.ids))).encode())
        return {
            "seed": self.seed,
            "world_size": self.world_size,
            "batch": {part.name: part.quota for part in self.parts},
            "images": images.hexdigest()[:16],
        }

    @property
    def step_size(self) -> int:
        """Images of one step, over all ranks."""
        return sum(part.quota for part in self.parts) * self.world_size

    def set_epoch(self, epoch: int, steps: int = 0) -> None:
        """Makes the next `iter` yield `epoch` without its first `steps` batches, unless `start` is set."""
        self._position = (epoch, steps)

    def __len__(self) -> int:
        """Batches of a whole epoch, the same on each rank."""
        return self._steps

    def __iter__(self) -> Iterator[list[Draw]]:
        return self._batches(*self.start())  # asked now, not when the first batch is taken

    def _batches(self, epoch: int, skip: int) -> Iterator[list[Draw]]:
        streams = [self._shaped(epoch), *(self._flat(part, epoch) for part in self.parts[1:])]
        for chunks in islice(zip(*streams, strict=False), skip, self._steps):
            height, width = chunks[0][0]
            yield [
                Draw(part.name, index, epoch, occurrence, height, width)
                for part, (_, chunk) in zip(self.parts, chunks, strict=True)
                for index, occurrence in chunk[self.rank * part.quota : (self.rank + 1) * part.quota]
            ]

    def _shaped(self, epoch: int) -> Iterator[tuple[Size, list[tuple[int, int]]]]:
        """The first source's steps, each of one shape; repeated as often as fills the epoch."""
        lead, size = self.parts[0], self.parts[0].quota * self.world_size
        queues, starts = [], []
        for number, group in enumerate(lead.groups.values()):
            order = seeded(self.seed, epoch, lead.name, 0, number)
            queue = np.concatenate([order.permutation(group) for _ in range(self._lead_repeats)])
            queues.append(queue)
            starts += [(number, at) for at in range(0, len(queue) - size + 1, size)]
        if len(queues) > 1:
            order = seeded(self.seed, epoch, lead.name, 1)
            starts = [starts[i] for i in order.permutation(len(starts))]
        shapes = list(lead.groups)
        for number, at in starts:
            images = len(lead.groups[shapes[number]])
            yield shapes[number], [(int(queues[number][i]), i // images) for i in range(at, at + size)]

    def _flat(self, part: Part, epoch: int) -> Iterator[tuple[Size | None, list[tuple[int, int]]]]:
        """Another source's steps, whatever the shapes: all its images in a new order, over and over."""
        indexes, order = part.indexes, seeded(self.seed, epoch, part.name, 0)
        endless = ((int(i), turn) for turn in count() for i in order.permutation(indexes))
        while True:
            yield None, list(islice(endless, part.quota * self.world_size))

    def report(self) -> list[str]:
        """Lines on what an epoch is made of: each source, the steps, what drives them, the buckets."""
        longest = max(self.parts, key=lambda part: part.steps(self.world_size))
        lines = [
            f"{part.name}: {len(part.indexes)} images x {part.repeats} repeats, {part.quota} in each batch"
            for part in self.parts
        ]
        driven = f", as long as {longest.name} lasts; the others start over" if len(self.parts) > 1 else ""
        lines.append(f"an epoch has {self._steps} steps of {self.step_size} images{driven}")
        return lines + self._bucket_lines(self._lead_repeats)

    def _bucket_lines(self, repeats: int) -> list[str]:
        lead = self.parts[0]
        if len(lead.groups) < 2:
            return []
        return bucket_report(lead.groups, lead.ids, repeats, lead.quota * self.world_size)

    def _too_few(self) -> str:
        sums = [
            f"{part.name}: {len(part.indexes)} images x {part.repeats} repeats = "
            f"{len(part.indexes) * part.repeats} draws an epoch, but a step takes "
            f"{part.quota * self.world_size} "
            f"({part.quota} in each batch x {self.world_size} ranks)"
            for part in self.parts
        ]
        buckets = self._bucket_lines(self.parts[0].repeats)
        if buckets:
            remedy = (
                "Each bucket has to fill its own steps: set a smaller data.batch_size, more data.repeats, "
                "or data.buckets=false"
            )
        else:
            part = self.parts[0]
            repeats = math.ceil(part.quota * self.world_size / max(1, len(part.indexes)))
            remedy = f"Set a smaller data.batch_size, or data.repeats={repeats} or more"
        return "\n".join(["not one training step can be made", *sums, *buckets, remedy])


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

    def __iter__(self) -> Iterator[list[Draw]]:
        each = math.ceil(len(self.indexes) / self.world_size)
        mine = [
            Draw(self.name, self.indexes[i % len(self.indexes)], 0, 0, *self.shape, i >= len(self.indexes))
            for i in range(self.rank, each * self.world_size, self.world_size)
        ]
        for start in range(0, each, self.batch_size):
            yield mine[start : start + self.batch_size]
