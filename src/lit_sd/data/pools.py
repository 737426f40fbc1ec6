"""Sources that are drawn from as if they were one, by position in an endless sequence of draws.

A pool's sequence for a shape is a function of (seed, epoch) and of how many images each part of each source
holds, so any position of it can be told without what comes before. It goes through the pool in cycles; a
cycle draws each image as often as its source repeats it, and is cut into windows. A window takes an equal
share of every source: a turn through what is small, some parts (shards) of what is large. The parts come in
a new order each turn, the draws of a part in a new order, and those of a window are mixed once more.
"""

import hashlib
import math
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from lit_sd.data.buckets import Buckets
from lit_sd.data.source import Source
from lit_sd.data.transforms import Size

DRAWS_KEPT = 4_000_000
"""Draws of windows that are kept to be drawn from again: some hundred MB."""


def seeded(seed: int, epoch: int, name: str, *rest: int) -> np.random.Generator:
    """A stream of its own for each epoch, source and purpose, whatever process asks."""
    return np.random.default_rng([seed, epoch, zlib.crc32(name.encode()), *rest])


class Drawn(NamedTuple):
    """Some draws: number of the source in the pool, image, and the how manieth draw of it in the epoch."""

    member: Int[np.ndarray, " n"]
    image: Int[np.ndarray, " n"]
    occurrence: Int[np.ndarray, " n"]

    def at(self, rows: np.ndarray | slice) -> "Drawn":
        """Those of some rows."""
        return Drawn(self.member[rows], self.image[rows], self.occurrence[rows])


def joined(pieces: Sequence[Drawn]) -> Drawn:
    """All draws of the pieces, in a row."""
    if len(pieces) == 1:
        return pieces[0]
    return Drawn(*(np.concatenate([piece[i] for piece in pieces]) for i in range(3)))


class Member:
    """One source's draws, by shape.

    Args:
        source: what is drawn from.
        number: in its pool.
        buckets: give the images their shapes; None gives all of them the same, `square`.
        square: that shape.
        aside: sorted indexes that are not drawn.
        whole: shuffle the source as one part.
    """

    def __init__(
        self,
        source: Source,
        number: int,
        *,
        buckets: Buckets | None,
        square: Size,
        aside: Sequence[int] = (),
        whole: bool = False,
    ) -> None:
        self.source, self.number, self.buckets, self.square = source, number, buckets, square
        self.aside = np.asarray(aside, np.int64)
        self.starts = np.array([0, len(source)]) if whole else np.asarray(source.blocks(), np.int64)
        self.held: dict[Size, int] = {}
        self._content = hashlib.sha256()
        self.draws = self._count()
        self._shapes_of = lru_cache(maxsize=64)(self._find_shapes)
        self._turn = lru_cache(maxsize=16)(self._order_of)

    def __getstate__(self) -> dict:
        raise TypeError("a plan is made in each process, not sent to it")

    def _codes(self, block: int) -> tuple[Int[np.ndarray, " n"], np.ndarray | None]:
        """Shape of each image of a part as one number, -1 for those set aside; and their draws per turn."""
        start, stop = int(self.starts[block]), int(self.starts[block + 1])
        if self.buckets is None:
            codes = np.full(stop - start, self.square[0] << 32 | self.square[1], np.int64)
        else:
            shapes = self.buckets.assign(self.source.sizes(start, stop))
            codes = shapes[:, 0] << 32 | shapes[:, 1]
        low, high = np.searchsorted(self.aside, [start, stop])
        codes[self.aside[low:high] - start] = -1
        return codes, self.source.draw_weights(start, stop)

    def _count(self) -> dict[Size, Int[np.ndarray, " blocks"]]:
        """Draws of each part in one turn, by shape."""
        blocks = len(self.starts) - 1
        if self.buckets is None and not len(self.aside) and self.source.draw_weights(0, 1) is None:
            self.held = {self.square: len(self.source)}
            return {self.square: np.diff(self.starts)}
        found: dict[int, np.ndarray] = {}
        exact: dict[int, float] = {}
        for block in range(blocks):
            codes, weights = self._codes(block)
            self._content.update(codes.tobytes() + (b"" if weights is None else weights.tobytes()))
            for code in np.unique(codes[codes >= 0]).tolist():
                here = codes == code
                before = exact.get(code, 0.0)
                exact[code] = before + (int(here.sum()) if weights is None else float(weights[here].sum()))
                # Of the sums so far, not of each part: many small ones would otherwise round to nothing.
                count = math.floor(exact[code] + 0.5) - math.floor(before + 0.5)
                found.setdefault(code, np.zeros(blocks, np.int64))[block] = count
                shape = (code >> 32, code & 0xFFFFFFFF)
                self.held[shape] = self.held.get(shape, 0) + int(here.sum())
        return {(code >> 32, code & 0xFFFFFFFF): counts for code, counts in found.items()}

    def fingerprint(self) -> str:
        """Tells whether it holds the same images, of the same shapes and weights."""
        source, content = self.source, self._content.copy()
        content.update(repr((source.name, source.repeats, source.identity(), len(source))).encode())
        content.update(self.starts.tobytes())
        return content.hexdigest()

    def images(self, shape: Size) -> list[int]:
        """Its images of a shape, all of them."""
        code = shape[0] << 32 | shape[1]
        found = [
            int(self.starts[block]) + np.flatnonzero(self._codes(block)[0] == code)
            for block in range(len(self.starts) - 1 if shape in self.draws else 0)
        ]
        return np.concatenate(found).tolist() if found else []

    def _find_shapes(self, block: int) -> tuple[np.ndarray, np.ndarray | None]:
        return self._codes(block)

    def _order_of(self, seed: int, epoch: int, turn: int, shape: Size) -> tuple[np.ndarray, np.ndarray]:
        """The order of the parts in a turn, and where each one's draws end."""
        order = seeded(seed, epoch, self.source.name, 0, turn).permutation(len(self.starts) - 1)
        return order, np.cumsum(self.draws[shape][order])

    def take(self, seed: int, epoch: int, shape: Size, start: int, stop: int) -> list[Drawn]:
        """The draws from `start` to before `stop` of the endless sequence of turns through a shape."""
        each = int(self.draws[shape].sum())
        pieces = []
        while start < stop:
            turn, low = divmod(start, each)
            high = min(each, low + stop - start)
            order, ends = self._turn(seed, epoch, turn, shape)
            first, last = np.searchsorted(ends, [low, high - 1], side="right")
            for place in range(first, last + 1):
                block = int(order[place])
                begin = int(ends[place]) - int(self.draws[shape][block])
                if begin == int(ends[place]):
                    continue
                cell = self._cell(seed, epoch, turn, block, shape)
                pieces.append(cell.at(slice(max(0, low - begin), high - begin)))
            start += high - low
        return pieces

    def _cell(self, seed: int, epoch: int, turn: int, block: int, shape: Size) -> Drawn:
        """A part's draws in a turn, in their order."""
        codes, weights = self._shapes_of(block)
        images = np.flatnonzero(codes == (shape[0] << 32 | shape[1]))
        rng = seeded(seed, epoch, self.source.name, 1, turn, block, *shape)
        count = int(self.draws[shape][block])
        again = np.zeros(count, np.int64)
        if weights is not None:
            # Systematic sampling: each image as often as its weight says, rounded down or up by chance.
            ends = np.cumsum(weights[images])
            points = (np.arange(count) + rng.random()) * (ends[-1] / count)
            rows = np.minimum(np.searchsorted(ends, points, side="right"), len(images) - 1)
            again = np.arange(count) - np.searchsorted(rows, rows)
            images = images[rows]
        mixed = rng.permutation(count)
        # Unlike for every draw of an image in the epoch, as far as 2^20 turns go.
        occurrence = turn + (again << 20)
        return Drawn(np.full(count, self.number), images[mixed] + int(self.starts[block]), occurrence[mixed])


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
        found = {shape for member in self.members for shape in member.draws}
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
        counts = member.draws.get(shape)
        return 0 if counts is None else int(counts.sum()) * member.source.repeats

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
        return sum(sum(member.held.values()) for member in self.members)

    def held(self, shape: Size) -> int:
        """Images of a shape."""
        return sum(member.held.get(shape, 0) for member in self.members)

    def names(self, shape: Size) -> list[str]:
        """Ids of the images of a shape."""
        return [member.source.ids()[i] for member in self.members for i in member.images(shape)]
