"""What the files of a source hold, told by their content; those that have not changed are not read again."""

import hashlib
import mmap
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from jaxtyping import Int, UInt8

from lit_sd.data.caches.leftovers import sweep
from lit_sd.data.caches.writer import KEY
from lit_sd.data.source import Source
from lit_sd.data.transforms import Size
from lit_sd.together import Together

_ROW = struct.Struct("<16sii")
STAMPS = "stamps.npy"
CHUNK = 1024
READERS = 8
"""Threads that read files: on a network drive most of the time is waiting."""


class Facts:
    """Digest and upright (height, width) of each example of a source, in a file that is mapped into memory.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_map": None}

    def _rows(self) -> mmap.mmap:
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._map

    def __len__(self) -> int:
        return len(self._rows()) // _ROW.size

    def __getitem__(self, index: int) -> tuple[bytes, Size]:
        """Digest and size of an example."""
        digest, height, width = _ROW.unpack_from(self._rows(), index * _ROW.size)
        return digest, (height, width)

    def digests(self, rows: Int[np.ndarray, " n"]) -> np.ndarray:
        """Digests of some examples, as an array `n` of 16 bytes each (V16)."""
        table = np.frombuffer(self._rows(), np.dtype([("digest", "V16"), ("size", "<i4", 2)]))
        return table["digest"][rows]

    def sizes(self, rows: Int[np.ndarray, " n"]) -> Int[np.ndarray, "n 2"]:
        """Sizes of some examples."""
        table = np.frombuffer(self._rows(), np.int32).reshape(-1, _ROW.size // 4)
        return table[rows, 4:]


def gather_facts(
    source: Source,
    folder: Path,
    together: Together | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Facts:
    """The facts of a source that is checked. All ranks call it, each reads a share.

    Args:
        source: what to read.
        folder: keeps the facts, and the digests of files by path, size and time.
        together: the ranks.
        advance: told of each so many examples that this rank is through with.

    Raises:
        OSError: a file can't be read.
    """
    together = together or Together()
    folder.mkdir(parents=True, exist_ok=True)
    stamps = Stamps(folder / STAMPS)
    mine = together.share(len(source))

    def read() -> tuple[Path, np.ndarray]:
        digests, new = _digests(source, mine, stamps, advance)
        rows = np.zeros((len(mine), _ROW.size), np.uint8)
        rows[:, :16] = digests
        sizes = np.asarray(source.sizes(mine.start, mine.stop), "<i4").reshape(-1, 2)
        rows[:, 16:] = np.ascontiguousarray(sizes).view(np.uint8)
        piece = folder / f".{uuid4().hex}.piece"
        piece.write_bytes(rows.tobytes())
        return piece, new

    def join(found: list[tuple[Path, np.ndarray]]) -> Path:
        aside, content = folder / f".{uuid4().hex}.tmp", hashlib.blake2b(digest_size=16)
        with aside.open("wb") as file:
            for piece, _ in found:
                content.update(rows := piece.read_bytes())
                file.write(rows)
                piece.unlink()
        # Named by what it holds: another run may be reading that of what a source held before.
        path = aside.replace(folder / f"{content.hexdigest()}.facts")
        stamps.add(np.concatenate([new for _, new in found]))
        sweep([*folder.glob(".*.piece"), *folder.glob(".*.tmp"), *folder.glob(".*.npy")])
        return path

    what = f"reading the images of {source.name}"
    found = together.run(what, read)
    joined = together.run(what, lambda: join(found) if together.rank == 0 else None)[0]
    assert joined is not None
    return Facts(joined)


def _digests(
    source: Source, rows: range, stamps: "Stamps", advance: Callable[[int], None]
) -> tuple[UInt8[np.ndarray, "n 16"], UInt8[np.ndarray, "m 32"]]:
    """Digests of some examples, and the stamps and digests of those that had to be read."""
    digests = np.zeros((len(rows), 16), np.uint8)
    new = [np.zeros((0, 32), np.uint8)]
    chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
    with ThreadPoolExecutor(READERS) as pool:

        def digest(index: int) -> bytes:
            return source.digest(index)

        for chunk in chunks:
            advance(len(chunk))
            # Threads pay for files that have to be looked at, not for kinds that know what they hold.
            each = map if source.stamp(chunk[0]) is None else pool.map
            told = list(each(source.stamp, chunk))
            stamped = np.array([stamp is not None for stamp in told])
            keys = np.zeros((len(chunk), 16), np.uint8)
            keys[stamped] = _rows_of(_hash(stamp) for stamp in told if stamp is not None)
            found, known = stamps.look_up(keys)
            plain, unknown = np.flatnonzero(~stamped), np.flatnonzero(stamped & ~known)
            found[plain] = _rows_of(digest(chunk[i]) for i in plain.tolist())
            found[unknown] = _rows_of(pool.map(digest, (chunk[i] for i in unknown.tolist())))
            start = chunk.start - rows.start
            digests[start : start + len(chunk)] = found
            new.append(np.concatenate([keys, found], 1)[unknown])
    return digests, np.concatenate(new)


def _rows_of(digests: Iterable[bytes]) -> UInt8[np.ndarray, "n 16"]:
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def _hash(stamp: str) -> bytes:
    return hashlib.blake2b(stamp.encode("utf-8", "surrogateescape"), digest_size=16).digest()


class Stamps:
    """Digests of files by their stamps, see `Source.stamp`; both of 16 bytes, in one sorted table.

    Args:
        path: of the table; it may not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        table = np.zeros((0, 32), np.uint8)
        if path.is_file():
            table = np.load(path)
            if table.dtype != np.uint8 or table.shape[1:] != (32,):
                raise ValueError(
                    f"{path}: expected a table of stamps and digests; delete it, it is made again"
                )
        self._table = table
        self._keys = np.ascontiguousarray(table[:, :16]).view(KEY)[:, 0]

    def look_up(self, stamps: UInt8[np.ndarray, "n 16"]) -> tuple[UInt8[np.ndarray, "n 16"], np.ndarray]:
        """The digest of each, and whether there is one."""
        if not len(self._keys):
            return np.zeros_like(stamps), np.zeros(len(stamps), bool)
        wanted = np.ascontiguousarray(stamps).view(KEY)[:, 0]
        rows = np.minimum(np.searchsorted(self._keys, wanted), len(self._keys) - 1)
        return self._table[rows, 16:].copy(), self._keys[rows] == wanted

    def add(self, rows: UInt8[np.ndarray, "m 32"]) -> None:
        """Keeps further stamps and digests, in the file too."""
        if not len(rows):
            return
        table = np.concatenate([self._table, rows])
        keys = np.ascontiguousarray(table[:, :16]).view(KEY)[:, 0]
        self._keys, first = np.unique(keys, return_index=True)
        self._save(table[first])

    def keep(self, digests: np.ndarray) -> int:
        """Drops all but those of some digests (V16), in the file too. Returns how many were dropped."""
        held = np.ascontiguousarray(self._table[:, 16:]).view(KEY)[:, 0]
        stay = np.isin(held, digests.view(KEY))
        if not stay.all():
            self._keys = self._keys[stay]
            self._save(self._table[stay])
        return int(np.count_nonzero(~stay))

    def _save(self, table: UInt8[np.ndarray, "n 32"]) -> None:
        self._table = table
        aside = self.path.with_name(f".{self.path.stem}.{uuid4().hex}.npy")
        np.save(aside, self._table)
        aside.replace(self.path)
