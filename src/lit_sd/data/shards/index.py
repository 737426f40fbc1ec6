"""The index of a shard: where each example's files lie in the tar, and what set-up has to know of them."""

import hashlib
import json
import os
import zipfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_sd.aside import write_aside
from lit_sd.data.shards.members import ROLES, Reading, Row, Span, read_example, read_members

VERSION = 1
SHOWN = 20
"""Faults that are kept by name."""


class Entry(NamedTuple):
    """A shard, in the summary of all.

    Attributes:
        samples: examples that can be used.
        captioned: those of them that have a caption.
        alpha: those that have transparency.
        weighted: whether one has a weight other than 1.
        bad: examples that can't be used.
        scattered: examples whose files don't lie together.
        broken: why the shard holds no more, or "".
        filesize: bytes of the tar.
        mtime_ns: when it was last written; None in a shard that was packed with its index, which may be
            copied.
        verified: whether its images were decoded.
        names: tells its examples' ids apart from others.
    """

    samples: int
    captioned: int
    alpha: int
    weighted: bool
    bad: int
    scattered: int
    broken: str
    filesize: int
    mtime_ns: int | None
    verified: bool
    names: str


@dataclass(frozen=True)
class ShardIndex:
    """The examples of a shard.

    Attributes:
        entry: what the summary keeps.
        spans: start and bytes of each example's files, in the order of `ROLES`; -1 where there is none.
        sizes: upright (height, width).
        weights: how often a turn draws each.
        captioned: which have a caption.
        names: of the images' members.
        ids: given by this project's packers, else "".
        faults: some of the examples that can't be used, and why.
        endings: what the files are called after their keys, and how many of each.
    """

    entry: Entry
    spans: Int[np.ndarray, "n roles 2"]
    sizes: Int[np.ndarray, "n 2"]
    weights: Float[np.ndarray, " n"]
    captioned: Bool[np.ndarray, " n"]
    names: list[str]
    ids: list[str]
    faults: dict[str, str]
    endings: dict[str, int]

    def span(self, row: int, role: str) -> Span | None:
        """Where a file of an example lies."""
        start, size = self.spans[row, ROLES.index(role)].tolist()
        return None if start < 0 else Span(start, size)

    def take(self, rows: np.ndarray) -> "ShardIndex":
        """The index of some of the examples."""
        picked = rows.tolist()
        return ShardIndex(
            self.entry,
            self.spans[rows],
            self.sizes[rows],
            self.weights[rows],
            self.captioned[rows],
            [self.names[row] for row in picked],
            [self.ids[row] for row in picked],
            self.faults,
            self.endings,
        )

    def with_entry(self, entry: Entry) -> "ShardIndex":
        """The same index under another entry."""
        return replace(self, entry=entry)


def index_shard(descriptor: int, reading: Reading) -> ShardIndex:
    """Reads a shard once. Files need not lie together to be found by their key.

    Args:
        descriptor: of the open tar.
        reading: how.
    """
    stat = os.fstat(descriptor)
    with open(os.dup(descriptor), "rb") as file:
        file.seek(0)
        members = read_members(file, stat.st_size)
    rows: list[Row] = []
    faults: dict[str, str] = {}
    for key, group in members.groups.items():
        try:
            row = read_example(descriptor, group, reading)
        except ValueError as error:
            faults[key.encode(errors="backslashreplace").decode()] = str(error)
        else:
            if row is not None:
                rows.append(row)
    entry = Entry(
        samples=len(rows),
        captioned=sum(row.captioned for row in rows),
        alpha=sum(row.alpha for row in rows),
        weighted=any(row.weight != 1 for row in rows),
        bad=len(faults),
        scattered=sum(group.scattered for group in members.groups.values()),
        broken=members.broken,
        filesize=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        verified=reading.verify,
        names=hashlib.sha256("\0".join(row.id or row.name for row in rows).encode()).hexdigest()[:16],
    )
    endings = Counter(f".{ext}" for group in members.groups.values() for ext in group.files)
    return ShardIndex(
        entry,
        np.array([row.spans for row in rows], np.int64).reshape(-1, len(ROLES), 2),
        np.array([row.size for row in rows], np.int32).reshape(-1, 2),
        np.array([row.weight for row in rows], np.float64),
        np.array([row.captioned for row in rows], bool),
        [row.name for row in rows],
        [row.id for row in rows],
        dict(list(faults.items())[:SHOWN]),
        dict(endings.most_common(SHOWN)),
    )


def save_index(path: Path, index: ShardIndex) -> None:
    """Writes an index; readers see all of it or nothing."""
    told = {
        "version": VERSION,
        "entry": index.entry._asdict(),
        "faults": index.faults,
        "endings": index.endings,
    }
    texts = {
        "names": "\0".join(index.names),
        "ids": "\0".join(index.ids) if any(index.ids) else "",
        "told": json.dumps(told),
    }
    arrays: dict[str, Any] = {k: np.frombuffer(v.encode(), np.uint8) for k, v in texts.items()}
    arrays |= {"spans": index.spans, "sizes": index.sizes}
    arrays |= {"weights": index.weights} if index.entry.weighted else {}
    arrays |= {"captioned": index.captioned} if not index.captioned.all() else {}
    write_aside(path, lambda file: np.savez_compressed(file, **arrays))


def load_index(path: Path) -> ShardIndex | None:
    """Reads an index; None where there is none, or one that this version can't read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            told = json.loads(arrays["told"].tobytes())
            if told["version"] != VERSION:
                return None
            entry = Entry(**told["entry"])
            names = arrays["names"].tobytes().decode().split("\0") if entry.samples else []
            ids = arrays["ids"].tobytes().decode()
            index = ShardIndex(
                entry,
                arrays["spans"],
                arrays["sizes"],
                arrays["weights"] if "weights" in arrays else np.ones(entry.samples),
                arrays["captioned"] if "captioned" in arrays else np.ones(entry.samples, bool),
                names,
                ids.split("\0") if ids else [""] * entry.samples,
                told["faults"],
                told["endings"],
            )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    same = len(index.spans) == len(index.sizes) == len(names) == len(index.ids) == entry.samples
    return index if same else None
