"""What set-up learns of the rows of a Hugging Face dataset, and rows that are on this machine."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8
from rich.progress import track

from lit_sd.aside import write_aside
from lit_sd.data.caption_rules import Caption
from lit_sd.data.hub_columns import Columns, captions_of, judge, number, rows_of
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size

STEP = 64
"""Rows that are read at once."""

_AT_ONCE = 64
"""Steps that are given to the threads together: all would hold their results."""
COLUMNS = ("sizes", "lengths", "weights", "captions")


@dataclass
class Facts:
    """What set-up learns of some rows.

    Attributes:
        sizes: upright (height, width); 0 for images that can't be read.
        lengths: bytes of the encoded image.
        weights: how often a turn draws the example.
        captions: how many the example has.
        faults: why an image can't be read, by row.
        names: what the examples are called, where a column says it.
    """

    sizes: Int[np.ndarray, "n 2"]
    lengths: Int[np.ndarray, " n"]
    weights: Float[np.ndarray, " n"]
    captions: UInt8[np.ndarray, " n"]
    faults: dict[int, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def collect(cls, judged: Iterable[tuple[Record, Size, str | None]], named: bool) -> "Facts":
        """From what `judge` says of rows, one after the other."""
        rows: list[tuple[int, int, int, float, int]] = []
        faults, names = {}, []
        for record, size, fault in judged:
            if fault is not None:
                faults[len(rows)] = fault
            if named:
                names.append(record.id)
            own = sum(bool(caption.text.strip()) for caption in record.captions)
            rows.append((*size, len(record.image), record.weight, min(own, 255)))
        heights, widths, lengths, weights, captions = zip(*rows, strict=True) if rows else ((),) * 5
        return cls(
            np.array([heights, widths], np.int32).T,
            np.array(lengths, np.int64),
            np.array(weights, np.float64),
            np.array(captions, np.uint8),
            faults,
            names,
        )

    @classmethod
    def joined(cls, parts: Sequence["Facts"]) -> "Facts":
        """Of all parts, in a row."""
        starts = np.cumsum([0, *map(len, parts)]).tolist()
        return cls(
            sizes=np.concatenate([part.sizes for part in parts]),
            lengths=np.concatenate([part.lengths for part in parts]),
            weights=np.concatenate([part.weights for part in parts]),
            captions=np.concatenate([part.captions for part in parts]),
            faults={
                start + row: why
                for start, part in zip(starts, parts, strict=False)
                for row, why in part.faults.items()
            },
            names=[name for part in parts for name in part.names],
        )

    def save(self, path: Path) -> None:
        """Writes them to a file, aside first."""
        texts = json.dumps([list(self.faults.items()), self.names]).encode()
        columns = {name: getattr(self, name) for name in COLUMNS}
        columns["texts"] = np.frombuffer(texts, np.uint8)
        write_aside(path, lambda file: np.savez_compressed(file, **columns))

    @classmethod
    def load(cls, path: Path) -> "Facts | None":
        """From a file; None where there is none."""
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as found:
            faults, names = json.loads(found["texts"].tobytes())
            columns = {name: found[name] for name in COLUMNS}
            return cls(**columns, faults=dict(faults), names=names)

    def identity(self) -> str:
        """Tells the images and their order apart."""
        columns = np.column_stack([self.sizes, self.lengths]).astype("<i8")
        return hashlib.sha256(columns.tobytes()).hexdigest()


class LocalRows:
    """Rows that are on this machine, read at random.

    Args:
        dataset: a `datasets.Dataset`.
        columns: where examples come from.
        verify: decode each image when learning.
        facts: a file that keeps what was learnt.
    """

    def __init__(self, dataset: Any, columns: Columns, verify: bool, facts: Path | None) -> None:
        self.columns, self._verify, self._kept = columns, verify, facts
        self._dataset = columns.of(dataset)
        self._ids = None if columns.id is None else self._dataset.select_columns([columns.id])
        self._texts = None if columns.caption is None else self._dataset.select_columns([columns.caption])
        self.starts: Int[np.ndarray, " b"] = np.array([0, len(self._dataset)])

    def learn(self) -> Facts:
        """Sizes and more of all rows, read in threads."""
        if self._kept is not None and (facts := Facts.load(self._kept)) is not None:
            return facts
        starts = range(0, len(self._dataset), STEP)
        with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as threads:
            groups = [starts[i : i + _AT_ONCE] for i in range(0, len(starts), _AT_ONCE)]
            shown = track(groups, "reading image headers", disable=len(groups) < 2)
            parts = [part for group in shown for part in threads.map(self._learn_some, group)]
        facts = Facts.joined(parts or [Facts.collect([], False)])
        if self._kept is not None:
            facts.save(self._kept)
        return facts

    def _learn_some(self, start: int) -> Facts:
        return Facts.collect(self._judged(start), False)

    def _judged(self, start: int) -> Iterator[tuple[Record, Size, str | None]]:
        for offset, row in enumerate(rows_of(self._dataset[start : start + STEP])):
            yield judge(self.columns, row, number(start + offset), self._verify)

    def record(self, position: int) -> Record:
        """The example of a row.

        Raises:
            OSError: its image is missing.
        """
        return self.columns.record(self._dataset[position], number(position))

    def name(self, position: int) -> str:
        """What the example of a row is called."""
        return number(position) if self._ids is None else str(self._ids[position][self.columns.id])

    def captions(self, position: int) -> tuple[Caption, ...]:
        """The captions of a row."""
        return () if self._texts is None else captions_of(self._texts[position][self.columns.caption])

    def digest(self, position: int) -> bytes:
        """16 bytes that tell the row's pixels apart."""
        return self.record(position).digest

    def stamp(self, position: int) -> str | None:
        """The dataset's fingerprint, its files' sizes and times, and the row; None where these don't tell its
        images: some are files outside of it, or all of it is in memory alone.
        """
        return None if self._state is None else f"{self._state} {position}"

    @cached_property
    def _state(self) -> str | None:
        files = [Path(file["filename"]).stat() for file in self._dataset.cache_files]
        if not files or any(_outside(self._dataset.data.column(name)) for name in self.columns.images):
            return None
        # The fingerprint tells where images came from, not what was in them when they were saved.
        return " ".join([self._dataset._fingerprint, *(f"{f.st_size} {f.st_mtime_ns}" for f in files)])


def _outside(column: Any) -> bool:
    """Whether a column of images, a `pyarrow.ChunkedArray`, names files instead of holding them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_struct(column.type):
        return not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type))
    held, named = (pc.is_valid(pc.struct_field(column, field)) for field in ("bytes", "path"))
    return bool(pc.any(pc.and_(named, pc.invert(held))).as_py())
