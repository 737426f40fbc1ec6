"""Sources that are drawn from as if they were one, by position in an endless sequence of draws.

A pool's sequence for a shape is a function of (seed, epoch) and of how many images each part of each source
holds, so any position of it can be told without what comes before. It goes through the pool in cycles; a
cycle draws each image as often as its source repeats it, and is cut into windows. A window takes an equal
share of every source: a turn through what is small, some parts (shards) of what is large. The parts come in
a new order each turn, the draws of a part in a new order, and those of a window are mixed once more.
"""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Int

from lit_sd.data.buckets import Buckets
from lit_sd.data.source import Source
from lit_sd.data.transforms import Size
from lit_sd.data.turns import Drawn, Member, joined, seeded

DRAWS_KEPT = 4_000_000
"""Draws of windows that are kept to be drawn from again: some hundred MB."""


class Pool:
    """Sources that are drawn from as if they were one; see the module's text.

    Attributes:
        name: what messages call it.
        quota: images in each batch, on each rank.
        undrawn: shapes whose images' weights come to no draw.
        shapes: those that are drawn, in the order of `data.resolution` and the buckets.
        cycle: draws of a cycle, by shape.

    Args:
        sources: what it draws from.
        buckets: None crops all images to the shape of whatever batch they come to.
        shuffle_shards: how many parts of a source are mixed at a time; None shuffles each source as a whole.
        aside: sorted indexes of the first source that are not drawn.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[Source],
        quota: int,
        *,
        seed: int = 0,
        buckets: Buckets | None = None,
        square: Size = (0, 0),
        shuffle_shards: int | None = None,
        aside: Sequence[int] = (),
    ) -> None:
        self.name, self.quota, self.seed, self.square = name, quota, seed, square
        self.members = [
            Member(
                source,
                number,
                buckets=buckets,
                square=square,
                aside=aside if number == 0 else (),
                whole=shuffle_shards is None,
            )
            for number, source in enumerate(sources)
        ]
        known = [square] if buckets is None else buckets.shapes
        found = {shape for member in self.members for shape in member.counts.sums}
        own = sorted(found - set(known), reverse=True)
        self.shapes: list[Size] = [shape for shape in [*known, *own] if shape in found]
        self.cycle = {shape: sum(self._turns(m, shape) for m in self.members) for shape in self.shapes}
        self.undrawn = [shape for shape in self.shapes if not self.cycle[shape]]
        self.shapes = [shape for shape in self.shapes if self.cycle[shape]]
        shards = [math.ceil((len(m.starts) - 1) / (shuffle_shards or 1)) for m in self.members]
        self.windows = max(n * m.source.repeats for n, m in zip(shards, self.members, strict=True))
        self._kept: OrderedDict[tuple, Drawn] = OrderedDict()
        self._bounds = lru_cache(maxsize=None)(self._window_bounds)

    @staticmethod
    def _turns(member: Member, shape: Size) -> int:
        """A member's draws of a shape in a cycle."""
        return member.draws(shape) * member.source.repeats

    @property
    def draws(self) -> int:
        """Draws of a cycle, of all shapes."""
        return sum(self.cycle[shape] for shape in self.shapes)

    @property
    def sharded(self) -> bool:
        """Whether a source is read part by part."""
        return any(len(member.starts) > 2 for member in self.members)

    def _window_bounds(self, shape: Size) -> Int[np.ndarray, " bounds"]:
        windows = np.arange(self.windows + 1)
        return sum(
            (windows * self._turns(m, shape) // self.windows for m in self.members), np.zeros_like(windows)
        )

    def take(self, epoch: int, shape: Size, start: int, count: int) -> Drawn:
        """`count` draws of a shape, from position `start` of the endless sequence."""
        pieces, bounds = [], self._bounds(shape)
        while count:
            cycle, at = divmod(start, self.cycle[shape])
            window = int(np.searchsorted(bounds, at, side="right")) - 1
            low = at - int(bounds[window])
            high = min(low + count, int(bounds[window + 1] - bounds[window]))
            pieces.append(self._window(epoch, cycle, window, shape).at(slice(low, high)))
            start, count = start + high - low, count - (high - low)
        return joined(pieces)

    def _window(self, epoch: int, cycle: int, window: int, shape: Size) -> Drawn:
        key = (epoch, cycle, window, shape)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        pieces: list[Drawn] = []
        for member in self.members:
            if each := self._turns(member, shape):
                begin = cycle * each
                low, high = (begin + w * each // self.windows for w in (window, window + 1))
                pieces += member.take(self.seed, epoch, shape, low, high)
        drawn = joined(pieces)
        rng = seeded(self.seed, epoch, self.name, 2, cycle, window, *shape)
        self._kept[key] = drawn = drawn.at(rng.permutation(len(drawn.image)))
        while len(self._kept) > 2 and sum(len(some.image) for some in self._kept.values()) > DRAWS_KEPT:
            self._kept.popitem(last=False)
        return drawn

    def fingerprint(self) -> str:
        """Tells whether the same images would come in the same order."""
        digest = hashlib.sha256(str(self.windows).encode())
        for member in self.members:
            digest.update(member.fingerprint().encode())
        return digest.hexdigest()[:16]

    @property
    def images(self) -> int:
        """Images of all sources."""
        return sum(sum(member.counts.held.values()) for member in self.members)

    def held(self, shape: Size) -> int:
        """Images of a shape."""
        return sum(member.counts.held.get(shape, 0) for member in self.members)

    def names(self, shape: Size) -> list[str]:
        """Ids of the images of a shape."""
        return [member.source.ids()[i] for member in self.members for i in member.images(shape)]
