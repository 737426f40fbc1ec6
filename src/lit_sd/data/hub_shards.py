"""Rows of a streamed Hugging Face dataset: each of its shards is packed on this machine when it is first
needed, and the ones that were not used for longest make room for others.
"""

import os
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int
from rich.progress import Progress

from lit_sd.data.caption_rules import Caption
from lit_sd.data.hub_columns import Columns, judge, number, rows_of
from lit_sd.data.hub_rows import Facts
from lit_sd.data.packed.lmdb_file import DATA, MANIFEST, PARTIAL, LmdbFile, opened, read_manifest
from lit_sd.data.packed.lmdb_writer import LmdbWriter
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size

OPEN = 4
"""Shards that a process keeps open; an open one takes disk space though it was thrown out."""

BATCH = 16
TRIES = 5


class StreamedRows:
    """Rows of a dataset that isn't on this machine; those of one shard are read at random.

    Args:
        stream: a `datasets.IterableDataset`.
        columns: where examples come from.
        verify: decode each image when learning.
        folder: where this dataset's shards are kept; other datasets' are beside it.
        room: bytes that all shards beside each other may take; the one in use may exceed it.
    """

    def __init__(self, stream: Any, columns: Columns, verify: bool, folder: Path, room: int) -> None:
        self.columns, self._verify, self._folder, self._room = columns, verify, folder, room
        self._stream = columns.of(stream)
        self._count: int = self._stream.num_shards
        self.starts: Int[np.ndarray, " b"] = np.zeros(1, np.int64)
        self._open: OrderedDict[int, LmdbFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": OrderedDict()}

    def _place(self, shard: int) -> Path:
        return self._folder / "shards" / f"{shard:06d}"

    def _facts(self, shard: int) -> Path:
        return self._folder / ("decoded" if self._verify else "headers") / f"{shard:06d}.npz"

    def _lock(self, shard: int) -> FileLock:
        (self._folder / "locks").mkdir(parents=True, exist_ok=True)
        return FileLock(self._folder / "locks" / f"{shard:06d}")

    def learn(self) -> Facts:
        """Sizes and more of all rows; each shard is read through once, by whichever process comes first.

        Raises:
            OSError: a shard can't be read.
        """
        unknown = [shard for shard in range(self._count) if not self._facts(shard).is_file()]
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        with Progress(disable=not unknown or not first) as progress:
            bar = progress.add_task("reading shards", total=self._count, completed=self._count - len(unknown))
            for wait in (0, -1):  # at first those that no other process is at
                for shard in list(unknown):
                    if self._learn_one(shard, wait):
                        unknown.remove(shard)
                        progress.advance(bar)
        parts = [Facts.load(self._facts(shard)) for shard in range(self._count)]
        known = [part for part in parts if part is not None]
        self.starts = np.cumsum([0, *map(len, known)])
        return Facts.joined([replace(part, names=[]) for part in known])

    def _learn_one(self, shard: int, wait: int) -> bool:
        try:
            with self._lock(shard).acquire(timeout=wait):
                if not self._facts(shard).is_file():
                    self._fetch(shard)
        except Timeout:
            return False
        return True

    def _fetch(self, shard: int) -> None:
        """Packs a shard; its lock is held.

        Raises:
            OSError: it can't be read, or isn't what it was.
        """
        place = self._place(shard)
        for old in (place, place.with_name(place.name + PARTIAL)):  # damaged, or left by a killed process
            _throw_out(old)
        try:
            with LmdbWriter(place) as writer:
                facts = Facts.collect(self._packed(shard, writer), self.columns.id is not None)
        except Exception as error:  # whatever the network's library raises
            raise OSError(f"shard {shard} of {self._count} can't be read: {error}") from error
        before = Facts.load(self._facts(shard))
        if before is not None and before.identity() != facts.identity():
            _throw_out(place)
            raise OSError(f"shard {shard} of {self._count} has changed since it was measured; start again")
        facts.save(self._facts(shard))
        self._make_room(place)

    def _packed(self, shard: int, writer: LmdbWriter) -> Iterator[tuple[Record, Size, str | None]]:
        # In batches: row by row, a worker of a DataLoader would be given its own share of the rows only.
        batches = self._stream.shard(num_shards=self._count, index=shard).iter(batch_size=BATCH)
        for i, row in enumerate(row for batch in batches for row in rows_of(batch)):
            record, size, fault = judge(self.columns, row, str(i), self._verify)
            writer.write(record, size)
            yield record, size, fault

    def _make_room(self, new: Path) -> None:
        for left in self._folder.glob("shards/.*"):  # a process was killed while it deleted this
            shutil.rmtree(left, ignore_errors=True)
        found = []
        for place in self._folder.parent.glob("*/shards/??????"):
            try:
                found.append(((place / MANIFEST).stat().st_mtime, (place / DATA).stat().st_size, place))
            except FileNotFoundError:  # thrown out by another process
                continue
        taken = sum(size for _, size, _ in found)
        for _, size, place in sorted(found):
            if taken > self._room and place != new:
                _throw_out(place)
                taken -= size

    def _shard(self, shard: int) -> LmdbFile:
        file = self._open.get(shard)
        if file is None:
            file = self._open[shard] = self._opened(shard)
        self._open.move_to_end(shard)
        if len(self._open) > OPEN:
            self._open.popitem(last=False)
        return file

    def _opened(self, shard: int) -> LmdbFile:
        place, found = self._place(shard), None
        for _ in range(TRIES):
            try:
                os.utime(place / MANIFEST)
                read_manifest(place)
                found = opened(place)
                len(found)
                return found
            except (ValueError, OSError):
                found = None
                with self._lock(shard):
                    if not _is_whole(place):
                        self._fetch(shard)
        raise OSError(f"{place}: others threw this shard out as soon as it was there; raise data.cache_gb")

    def _read(self, position: int, method: str) -> Any:
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        row = position - int(self.starts[shard])
        try:
            return getattr(self._shard(shard), method)(row)
        except FileNotFoundError:  # thrown out since, and this process, a fork, has to open it anew
            self._open.pop(shard, None)
            return getattr(self._shard(shard), method)(row)

    def record(self, position: int) -> Record:
        """The example of a row.

        Raises:
            OSError: its shard can't be fetched.
        """
        record = self._read(position, "record")
        return record if self.columns.id is not None else replace(record, id=number(position))

    def captions(self, position: int) -> tuple[Caption, ...]:
        """The captions of a row."""
        return self._read(position, "captions")

    def digest(self, position: int) -> bytes:
        """16 bytes that tell the row's pixels apart."""
        return bytes.fromhex(self._read(position, "header")["digest"])

    def stamp(self, position: int) -> None:
        """None: what was packed knows its digests."""

    def name(self, position: int) -> str:
        """What the example of a row is called."""
        if self.columns.id is None:
            return number(position)
        shard = int(np.searchsorted(self.starts, position, side="right")) - 1
        return _names(self._facts(shard))[position - int(self.starts[shard])]


@lru_cache(maxsize=4)
def _names(path: Path) -> list[str]:
    facts = Facts.load(path)
    return [] if facts is None else facts.names


def _is_whole(place: Path) -> bool:
    try:
        read_manifest(place)
    except (ValueError, OSError):
        return False
    return True


def _throw_out(folder: Path) -> None:
    """Deletes a folder, which others may be reading, so that none of them finds a part of it."""
    gone = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        return
    shutil.rmtree(gone, ignore_errors=True)
