"""One source's draws: turn after turn through its images, part by part.

The parts come in a new order each turn, the draws of a part in a new order; any of them can be told without
what comes before.
"""

import hashlib
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lit_sd.data.buckets import Buckets
from lit_sd.data.counts import Counts, Part, code_of, count, kept
from lit_sd.data.source import Source
from lit_sd.data.transforms import Size


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


class Turn(NamedTuple):
    """One turn through a shape of a source.

    Attributes:
        order: of the parts.
        ends: where each one's draws end, in that order.
        counts: draws of each part.
        bounds: sums of all weights before each part, and of all; empty where nothing has a weight.
        first: where the first point lies, as a share of the points' distance.
    """

    order: Int[np.ndarray, " parts"]
    ends: Int[np.ndarray, " parts"]
    counts: Int[np.ndarray, " parts"]
    bounds: Float[np.ndarray, " bounds"]
    first: float


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
        self.counts = self._count()
        self._recent = lru_cache(maxsize=64)(self._part)
        self._turn = lru_cache(maxsize=16)(self._plan_of)

    def __getstate__(self) -> dict:
        raise TypeError("a plan is made in each process, not sent to it")

    def _part(self, block: int) -> Part:
        """The images of a part, as `lit_sd.data.counts` has it; -1 are those set aside."""
        start, stop = int(self.starts[block]), int(self.starts[block + 1])
        if self.buckets is None:
            codes = np.full(stop - start, code_of(self.square), np.int64)
        else:
            shapes = self.buckets.assign(self.source.sizes(start, stop))
            codes = shapes[:, 0] << 32 | shapes[:, 1]
        low, high = np.searchsorted(self.aside, [start, stop])
        codes[self.aside[low:high] - start] = -1
        return codes, self.source.draw_weights(start, stop)

    def _count(self) -> Counts:
        parts = len(self.starts) - 1
        if self.buckets is None and not len(self.aside) and self.source.draw_weights(0, 1) is None:
            return Counts({self.square: np.diff(self.starts)}, {self.square: len(self.source)}, "")
        depends = hashlib.sha256(repr((self.buckets, self.square)).encode())
        depends.update(self.starts.tobytes() + self.aside.tobytes())
        path = self.source.counts_file(depends.hexdigest()[:16])
        return kept(path, parts, lambda: count(parts, self._part))

    def fingerprint(self) -> str:
        """Tells whether it holds the same images, of the same shapes and weights."""
        source, content = self.source, hashlib.sha256(self.counts.content.encode())
        content.update(repr((source.name, source.repeats, source.identity(), len(source))).encode())
        content.update(self.starts.tobytes())
        return content.hexdigest()

    def images(self, shape: Size) -> list[int]:
        """Its images of a shape, all of them."""
        found = [
            int(self.starts[block]) + np.flatnonzero(self._part(block)[0] == code_of(shape))
            for block in np.flatnonzero(self.counts.sums.get(shape, ())).tolist()
        ]
        return np.concatenate(found).tolist() if found else []

    def draws(self, shape: Size) -> int:
        """Draws of a shape in one turn: its images' weights together, rounded."""
        sums = self.counts.sums.get(shape)
        return 0 if sums is None else math.floor(float(sums.sum()) + 0.5)

    def _plan_of(self, seed: int, epoch: int, turn: int, shape: Size) -> Turn:
        """How a turn goes through a shape.

        Weights are kept to by systematic sampling of the whole turn: of points at equal distances, the first
        at random, each image gets those that fall to its weight. So each is drawn as often as its weight
        says, rounded down or up by chance, however the parts divide them.
        """
        order = seeded(seed, epoch, self.source.name, 0, turn).permutation(len(self.starts) - 1)
        sums, draws = self.counts.sums[shape], self.draws(shape)
        if sums.dtype == np.int64:
            return Turn(order, np.cumsum(sums[order]), sums, np.zeros(0), 0.0)
        first = seeded(seed, epoch, self.source.name, 5, turn, *shape).random()
        ends = np.concatenate([[0.0], np.cumsum(sums)])
        points = np.ceil(ends * (draws / ends[-1]) - first).astype(np.int64)
        counts = np.diff(points)
        return Turn(order, np.cumsum(counts[order]), counts, ends, first)

    def take(self, seed: int, epoch: int, shape: Size, start: int, stop: int) -> list[Drawn]:
        """The draws from `start` to before `stop` of the endless sequence of turns through a shape."""
        each = self.draws(shape)
        pieces = []
        while start < stop:
            turn, low = divmod(start, each)
            high = min(each, low + stop - start)
            plan = self._turn(seed, epoch, turn, shape)
            first, last = np.searchsorted(plan.ends, [low, high - 1], side="right")
            for place in range(first, last + 1):
                block = int(plan.order[place])
                begin = int(plan.ends[place]) - int(plan.counts[block])
                if begin == int(plan.ends[place]):
                    continue
                cell = self._cell(seed, epoch, turn, block, shape)
                pieces.append(cell.at(slice(max(0, low - begin), high - begin)))
            start += high - low
        return pieces

    def _cell(self, seed: int, epoch: int, turn: int, block: int, shape: Size) -> Drawn:
        """A part's draws in a turn, in their order."""
        codes, weights = self._recent(block)
        images = np.flatnonzero(codes == code_of(shape))
        plan = self._turn(seed, epoch, turn, shape)
        count = int(plan.counts[block])
        again = np.zeros(count, np.int64)
        if weights is not None:
            images = images[weights[images] > 0]
            before = int(plan.counts[:block].sum())
            distance = plan.bounds[-1] / self.draws(shape)
            points = (before + np.arange(count) + plan.first) * distance - plan.bounds[block]
            rows = np.searchsorted(np.cumsum(weights[images]), points, side="right")
            rows = np.minimum(rows, len(images) - 1)  # rounding may take one past the last
            again = np.arange(count) - np.searchsorted(rows, rows)
            images = images[rows]
        mixed = seeded(seed, epoch, self.source.name, 1, turn, block, *shape).permutation(count)
        # Unlike for every draw of an image in the epoch, as far as 2^20 turns go.
        occurrence = turn + (again << 20)
        return Drawn(np.full(count, self.number), images[mixed] + int(self.starts[block]), occurrence[mixed])
