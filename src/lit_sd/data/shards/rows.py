"""The examples of all shards, by number: which shard holds one, and what its files hold."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lit_sd.data.shards.files import Recent, ShardFiles
from lit_sd.data.shards.index import Entry, ShardIndex
from lit_sd.data.shards.members import Span, name_of
from lit_sd.data.shards.store import ShardIndexes

INDEXES_KEPT = 64


class ShardRow(NamedTuple):
    """Where an example is: number of its shard, the shard's index, and its row there."""

    shard: int
    details: ShardIndex
    row: int

    def span(self, role: str) -> Span | None:
        """Where a file of it lies in the shard."""
        return self.details.span(self.row, role)

    @property
    def key(self) -> str:
        """What the names of its files begin with."""
        return name_of(self.details.names[self.row])[0]

    @property
    def suffix(self) -> str:
        """Of its image's file."""
        return name_of(self.details.names[self.row])[1]

    @property
    def packed_id(self) -> str:
        """What it was called where this project packed it, else ""."""
        return self.details.ids[self.row]


class ShardRows:
    """Examples by number; of each shard those that count.

    Attributes:
        starts: number of each shard's first example, and the end.

    Args:
        indexes: of the shards.
        entries: of them; None for shards that are missing.
        labels: what ids call the shards.
        files: reads them.
        captioned: count only examples that have a caption.
    """

    def __init__(
        self,
        indexes: ShardIndexes,
        entries: Sequence[Entry | None],
        labels: Sequence[str],
        files: ShardFiles,
        captioned: bool,
    ) -> None:
        self.indexes, self.entries, self.labels, self.files = indexes, list(entries), list(labels), files
        self.captioned = captioned
        counts = [0 if entry is None else self.used(entry) for entry in entries]
        self.starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        self._recent: Recent[int, ShardIndex] = Recent(INDEXES_KEPT)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def used(self, entry: Entry) -> int:
        """How many of a shard's examples count."""
        return entry.captioned if self.captioned else entry.samples

    def find(self, number: int) -> ShardRow:
        """An example. Raises IndexError where there are fewer."""
        if not 0 <= number < len(self):
            raise IndexError(f"there are {len(self)} examples, asked for number {number}")
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return ShardRow(shard, self._recent.get(shard, self._index), number - int(self.starts[shard]))

    def parts(self, start: int, stop: int | None) -> Iterator[tuple[ShardIndex, slice]]:
        """The shards of a range of examples, and the rows of each."""
        start, stop, _ = slice(start, stop).indices(len(self))
        while start < stop:
            found = self.find(start)
            count = min(stop - start, int(self.starts[found.shard + 1]) - start)
            yield found.details, slice(found.row, found.row + count)
            start += count

    def read(self, found: ShardRow, roles: Sequence[str]) -> dict[str, bytes]:
        """Files of an example. Raises OSError where they can't be read any more."""
        spans = {role: span for role in roles if (span := found.span(role)) is not None}
        if not spans:
            return {}
        filesize = found.details.entry.filesize
        return self.files.read(self.indexes.shards[found.shard], found.key, spans, filesize)

    def id(self, found: ShardRow) -> str:
        """An example's id."""
        return found.packed_id or f"{self.labels[found.shard]}/{found.key.removeprefix('./')}"

    def id_of(self, number: int) -> str:
        """That of an example by number."""
        return self.id(self.find(number))

    def id_in(self, shard: int, index: ShardIndex, row: int) -> str:
        """That of a row of a shard's whole index."""
        return self.id(ShardRow(shard, index, row))

    def ids(self) -> Iterator[str]:
        """Those of all examples."""
        for shard, count in enumerate(np.diff(self.starts).tolist()):
            if count:
                index = self._recent.get(shard, self._index)
                yield from (self.id(ShardRow(shard, index, row)) for row in range(count))

    def _index(self, shard: int) -> ShardIndex:
        entry = self.entries[shard]
        index = self.indexes.load(shard)
        if entry is None or index.entry.names != entry.names:
            raise OSError(f"{self.indexes.shards[shard]}: its index changed while it was in use; start anew")
        if self.used(entry) < entry.samples:
            return index.take(np.flatnonzero(index.captioned))
        return index
