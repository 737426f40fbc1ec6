"""Near duplicates: pairs of 64-bit hashes that differ by few bits, found by banded lookup. They are joined to
clusters, and of each cluster the best is kept, and what is not near one that is kept.

The 64 bits are cut into d + 1 bands. Hashes that differ by at most d bits agree in at least one band, so that
only those with an equal band are compared, and no pair is missed. SQLite sorts by each band in turn, on disk
where that is needed; what shares a band is held in memory, 28 bytes an example.

Source: the pigeonhole bound of multi-index hashing, Norouzi et al. 2012, arXiv:1307.2982, sec. 3.1.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np

from lit_sd.prepare.database import Database

DIRECT = 1024
"""So many examples are compared pair by pair; more are cut into bands once more."""
DEPTH = 2


@dataclass(frozen=True)
class Bucket:
    """Examples that share a band: keys, hashes and mean colours of the four quarters."""

    keys: np.ndarray
    hashes: np.ndarray
    colours: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    def take(self, which: np.ndarray) -> "Bucket":
        """Some of them, by index or by mask."""
        return Bucket(self.keys[which], self.hashes[which], self.colours[which])


@dataclass(frozen=True)
class Likeness:
    """When two images look the same: their hashes differ by at most `bits`, their colours by at most `colour`
    levels of 255 on average.
    """

    bits: int
    colour: float

    def close(self, bucket: Bucket, among: np.ndarray, to: int) -> np.ndarray:
        """Which of a bucket's examples `among` (indexes) look like its example `to`; a mask."""
        near = np.bitwise_count(bucket.hashes[among] ^ bucket.hashes[to]) <= self.bits
        if near.any():
            hits = among[near]
            apart = np.abs(bucket.colours[hits].astype(np.int16) - bucket.colours[to].astype(np.int16))
            near[near] = apart.mean(axis=1) <= self.colour
        return near

    def pairs(self, bucket: Bucket) -> tuple[np.ndarray, np.ndarray] | None:
        """Indexes of a bucket's pairs, one by one compared; None where they are so many that it is cheaper to
        look for clusters.
        """
        apart = np.bitwise_count(bucket.hashes[:, None] ^ bucket.hashes[None, :])
        near = np.triu(apart <= self.bits, 1)
        if np.count_nonzero(near) > 8 * len(bucket):
            return None
        one, other = np.nonzero(near)
        colours = bucket.colours.astype(np.int16)
        alike = np.abs(colours[one] - colours[other]).mean(axis=1) <= self.colour
        return one[alike], other[alike]


def cut(bits: list[int], bands: int) -> list[list[int]]:
    """Bit positions dealt into bands of nearly equal width."""
    edges = [round(i * len(bits) / bands) for i in range(bands + 1)]
    return [bits[low:high] for low, high in pairwise(edges)]


def buckets(database: Database, query: str, distance: int, *, mixed: bool = False) -> Iterator[Bucket]:
    """All sets of examples among which pairs have to be looked for; most pairs are met in several.

    Args:
        database: where `query` is asked.
        query: gives the columns key, phash, colour and parts; images with other masks or control images
            (`parts`) are no duplicates.
        distance: bits by which the hashes of a pair differ at most.
        mixed: leave out those that hold only data, or only validation data.
    """
    for band in cut(list(range(64)), distance + 1):
        value = f"(phash >> {band[0]}) & {(1 << len(band)) - 1}"
        rows = database.rows(f"SELECT parts, {value}, key, phash, colour FROM ({query}) ORDER BY 1, 2, 3")
        rest = [bit for bit in range(64) if bit not in band]
        for _, group in groupby(rows, key=itemgetter(0, 1)):
            bucket = gather(group)
            if len(bucket) > 1 and (not mixed or bucket.keys.min() < 0 <= bucket.keys.max()):
                yield from smaller(bucket, rest, distance)


def gather(rows: Iterable[tuple]) -> Bucket:
    """A bucket of rows, as arrays from the start: there may be a million in one."""
    keys, hashes, colours = bytearray(), bytearray(), bytearray()
    for _, _, key, phash, colour in rows:
        keys += key.to_bytes(8, "little", signed=True)
        hashes += phash.to_bytes(8, "little", signed=True)
        colours += colour
    return Bucket(
        np.frombuffer(keys, "<i8"),
        np.frombuffer(hashes, "<u8"),
        np.frombuffer(colours, np.uint8).reshape(len(keys) // 8, -1),
    )


def smaller(bucket: Bucket, bits: list[int], distance: int, depth: int = 0) -> Iterator[Bucket]:
    """The bucket, or where it is large, buckets of those that agree in one more band of the bits that are
    left: a pair that is still to be found agrees in one of these too.
    """
    if len(bucket) <= DIRECT or depth == DEPTH or len(bits) < 2 * (distance + 1):
        yield bucket
        return
    for band in cut(bits, distance + 1):
        mask = np.uint64(sum(1 << bit for bit in band))
        values = bucket.hashes & mask
        order = np.argsort(values, kind="stable")
        starts = np.flatnonzero(np.diff(values[order])) + 1
        rest = [bit for bit in bits if bit not in band]
        for part in np.split(order, starts):
            if len(part) > 1:
                yield from smaller(bucket.take(part), rest, distance, depth + 1)


def links(bucket: Bucket, likeness: Likeness) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Keys of examples that look the same, as (some, others): enough pairs to join all that belong together.

    Of many alike, whatever is found leaves the search, so that a thousand copies of one image are compared
    a thousand times, not a million.
    """
    if len(bucket) <= DIRECT and (pairs := likeness.pairs(bucket)) is not None:
        if len(pairs[0]):
            yield bucket.keys[pairs[0]], bucket.keys[pairs[1]]
        return
    left = np.arange(len(bucket))
    while len(left) > 1:
        waiting, left = [int(left[0])], left[1:]
        while waiting and len(left):
            pivot = waiting.pop()
            near = likeness.close(bucket, left, pivot)
            if near.any():
                found, left = left[near], left[~near]
                waiting += found.tolist()
                yield np.broadcast_to(bucket.keys[pivot], len(found)), bucket.keys[found]


class Clusters:
    """Which examples belong together, directly or through others: a forest in a file, so that its size costs
    no memory.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.parents = np.memmap(path, np.int64, "w+", shape=(max(1, count),))
        for start in range(0, count, 1 << 20):
            self.parents[start : start + (1 << 20)] = np.arange(start, min(count, start + (1 << 20)))

    def root(self, key: int) -> int:
        """The example that stands for the cluster: its first."""
        parents = self.parents
        while (parent := int(parents[key])) != key:
            parents[key] = parents[parent]
            key = parent
        return key

    def join(self, one: int, other: int) -> None:
        """Two examples belong together from now on."""
        one, other = self.root(one), self.root(other)
        if one != other:
            self.parents[max(one, other)] = min(one, other)

    def join_all(self, some: np.ndarray, others: np.ndarray) -> None:
        """Pairs that belong together from now on; those that are known to are passed over at once."""
        news = self.parents[some] != self.parents[others]
        for one, other in zip(some[news].tolist(), others[news].tolist(), strict=True):
            self.join(one, other)
            self.parents[other] = self.parents[one] = self.root(one)

    def members(self) -> Iterator[tuple[int, int]]:
        """(example, root) of all that were joined, the roots too."""
        for start in range(0, len(self.parents), 1 << 16):
            block = self.parents[start : start + (1 << 16)]
            for key in np.flatnonzero(block != np.arange(start, start + len(block))) + start:
                root = self.root(int(key))
                yield int(key), root
                yield root, root


def find_clusters(database: Database, query: str, likeness: Likeness, clusters: Clusters) -> None:
    """Joins what looks the same."""
    for bucket in buckets(database, query, likeness.bits):
        for some, others in links(bucket, likeness):
            clusters.join_all(some, others)


def keepers(bucket: Bucket, likeness: Likeness) -> np.ndarray:
    """For which kept example each one is refused, as indexes [n]; its own, where it is kept itself.

    Each is refused for the first that is kept and looks like it: what looks like a refused one only, stays.

    Args:
        bucket: in the order in which they are to be kept, the best first.
        likeness: when two look the same.
    """
    kept = np.full(len(bucket), -1)
    bands = _by_band(bucket, likeness.bits)
    for i in range(len(bucket)):
        if kept[i] >= 0:
            continue
        kept[i] = i
        for groups, places in bands:
            group = groups[places[i]]
            group = group[kept[group] < 0]
            near = likeness.close(bucket, group, i)
            kept[group[near]] = i
            groups[places[i]] = group[~near]
    return kept


def _by_band(bucket: Bucket, distance: int) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """For each band, the indexes that share its bits, and in which of these groups each example is. All are
    in one group where they are few.
    """
    masks = [0]
    if len(bucket) > DIRECT:
        masks = [sum(1 << bit for bit in band) for band in cut(list(range(64)), distance + 1)]
    found = []
    for mask in masks:
        _, places = np.unique(bucket.hashes & np.uint64(mask), return_inverse=True)
        order = np.argsort(places, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(places[order])) + 1)
        found.append((groups, places))
    return found


def find_leaks(
    database: Database, query: str, likeness: Likeness, found: Callable[[int, int, int], None]
) -> None:
    """Calls `found(key, other, distance)` for each example (key 0 and up) that looks like one of the
    validation data (key below 0), once or several times.
    """
    for bucket in buckets(database, query, likeness.bits, mixed=True):
        train = np.flatnonzero(bucket.keys >= 0)
        for val in np.flatnonzero(bucket.keys < 0):
            near = likeness.close(bucket, train, int(val))
            for i in train[near]:
                apart = int(np.bitwise_count(bucket.hashes[i] ^ bucket.hashes[val]))
                found(int(bucket.keys[i]), int(bucket.keys[val]), apart)
            train = train[~near]  # one reason is enough, and many copies stay cheap
