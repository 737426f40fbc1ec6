"""What processes have written to a cache on disk, read as one; see `lit_sd.data.caches.writer`."""

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Bool

from lit_sd.data.caches.leftovers import sweep
from lit_sd.data.caches.writer import (
    DATA,
    FORMAT,
    KEY,
    KEYS,
    MANIFEST,
    PARTIAL,
    VERSION,
    mapped_size,
    take_over,
)
from lit_sd.data.packed.lmdb_file import lmdb_library
from lit_sd.together import Together

INDEX = ".index"
HIDDEN = "." + 16 * "[0-9a-f]"
"""Parts before they are locked, and those that are deleted."""

_open_parts: WeakValueDictionary[tuple[int, int], "_Part"] = WeakValueDictionary()


def _check(path: Path, kind: str) -> dict[str, Any]:
    """A part's manifest. Raises ValueError where it isn't whole, or something else."""
    advice = "delete it, and what it held is computed again; or set data.cache_dir to another folder"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        found = (manifest["format"], manifest["version"], manifest["kind"])
        entries, size = manifest["entries"], manifest["file_bytes"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no part of a cache ({error}); {advice}") from error
    if found != (FORMAT, VERSION, kind):
        raise ValueError(f"{path}: expected {FORMAT}, version {VERSION}, of {kind}, got {found}; {advice}")
    there = (path / DATA).stat().st_size if (path / DATA).is_file() else 0
    keys = (path / KEYS).stat().st_size if (path / KEYS).is_file() else 0
    if there != size or keys < 16 * entries:
        raise ValueError(
            f"{path} is damaged: expected {size:,} bytes and {entries:,} keys, got {there:,} and "
            f"{keys // 16:,}; {advice}"
        )
    return manifest


class _Part:
    """A part's file, opened when it is first read in a process: LMDB must not open a file twice in one."""

    def __init__(self, path: Path, entries: int) -> None:
        self.path, self.entries = path, entries
        self._process: int | None = None
        self._env: Any = None
        self._view: Any = None

    @classmethod
    def at(cls, path: Path, entries: int) -> "_Part":
        """The part in a folder; the same object, as long as anyone holds it."""
        where = (path / DATA).stat()
        part = _open_parts.get((where.st_dev, where.st_ino))
        if part is None:
            part = _open_parts[where.st_dev, where.st_ino] = cls(path, entries)
        return part

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._env is not None:
            self._view.abort()
            self._env.close()
            self._env = self._view = None

    def get(self, key: bytes) -> memoryview | None:
        """A value, as long as the part is held."""
        if self._process != os.getpid():
            self._close()  # after a fork, what the parent opened: this closes the child's copy
            # Values are long and lie in one piece, so reading ahead is right.
            self._env = lmdb_library().open(
                str(self.path), map_size=mapped_size(self.path), readonly=True, lock=False, create=False
            )
            self._view, self._process = self._env.begin(buffers=True), os.getpid()
            if self._view.stat()["entries"] != self.entries:
                raise ValueError(
                    f"{self.path / DATA} holds {self._view.stat()['entries']} entries, its manifest says "
                    f"{self.entries}; delete {self.path}, and what it held is computed again"
                )
        return self._view.get(key)


class Parts:
    """Reads all parts of a cache, those that `refresh` or `agree` found. It may be forked and pickled at any
    time.

    Args:
        folder: of the cache.
        kind: what the values are.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self._entries: dict[str, int] = {}
        self._forget()

    def refresh(self, names: Collection[str] | None = None) -> None:
        """Looks which parts there are; only at those of these names, where they are given.

        Raises:
            ValueError: something in the folder is damaged, or no part of a cache of this kind.
        """
        self._entries = {
            path.name: _check(path, self.kind)["entries"]
            for path in sorted(self.folder.glob("*"))
            if path.is_dir() and path.suffix != PARTIAL and not path.name.startswith(".")
            if names is None or path.name in names
        }
        self._forget()

    def agree(self, together: Together, expected: np.ndarray | None = None) -> None:
        """Makes all ranks see the same parts, and what processes that are no more had written too. All ranks
        call it.

        Args:
            together: the ranks.
            expected: keys (`KEY`) that there have to be values for.

        Raises:
            ValueError: as `refresh`.
            RuntimeError: a rank doesn't see them all.
        """

        def first() -> list[str]:
            if together.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                take_over(self.folder, self.kind)
                sweep(self.folder.glob(HIDDEN))
                self.refresh()
                self.write_index()
            return list(self._entries)

        def look() -> None:
            self.refresh(names)
            if len(self._entries) < len(names) or (expected is not None and not self.has(expected).all()):
                raise RuntimeError(
                    f"rank {together.rank} doesn't see all that is in {self.folder}; data.cache_dir has to "
                    "be on a storage that all ranks share"
                )

        names = together.run(f"looking through {self.folder}", first)[0]
        together.run(f"looking through {self.folder}", look)

    def _forget(self) -> None:
        self._parts: list[_Part] | None = None
        self._found: tuple[np.ndarray, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_parts": None, "_found": None}

    def __len__(self) -> int:
        """Entries in all parts."""
        return sum(self._entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum((self.folder / name / DATA).stat().st_size for name in self._entries)

    @property
    def names(self) -> list[str]:
        """Of the parts' folders."""
        return list(self._entries)

    def _opened(self) -> list[_Part]:
        if self._parts is None:
            self._parts = [_Part.at(self.folder / name, entries) for name, entries in self._entries.items()]
        return self._parts

    def _index(self) -> tuple[np.ndarray, np.ndarray]:
        """All keys, sorted, and the number of the part that each is in."""
        if self._found is None:
            stem = self._index_stem()
            if len(self._entries) == 1:
                keys = np.load(self.folder / next(iter(self._entries)) / KEYS, mmap_mode="r")
                self._found = keys, np.zeros(1, np.uint16)
            elif stem.with_suffix(".keys.npy").is_file():
                self._found = (
                    np.load(stem.with_suffix(".keys.npy"), mmap_mode="r"),
                    np.load(stem.with_suffix(".parts.npy"), mmap_mode="r"),
                )
            else:
                self._found = self._merged()
        return self._found

    def _merged(self) -> tuple[np.ndarray, np.ndarray]:
        each = [np.load(self.folder / name / KEYS) for name in self._entries]
        keys = np.concatenate([np.zeros(0, KEY), *each])
        parts = np.repeat(np.arange(len(each), dtype=np.uint16), [len(part) for part in each])
        order = np.argsort(keys, kind="stable")
        return keys[order], parts[order]

    def _index_stem(self) -> Path:
        names = hashlib.sha256("\n".join(self._entries).encode()).hexdigest()[:16]
        return self.folder / INDEX / names

    def write_index(self) -> None:
        """Keeps the index of several parts as files, so that other processes map it into memory instead of
        making their own.
        """
        stem = self._index_stem()
        if len(self._entries) < 2 or stem.with_suffix(".keys.npy").is_file():
            return
        stem.parent.mkdir(exist_ok=True)
        asides = set(stem.parent.glob("*.tmp.npy"))
        stale = [path for path in stem.parent.iterdir() if path not in asides]
        for name, column in zip(("parts", "keys"), reversed(self._merged()), strict=True):
            aside = stem.with_suffix(f".{uuid4().hex}.tmp.npy")
            np.save(aside, column)
            aside.replace(stem.with_suffix(f".{name}.npy"))
        for path in stale:
            path.unlink(missing_ok=True)
        sweep(asides)
        self._forget()

    def _places(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each key: its row in the index, and whether it is there at all."""
        known, _ = self._index()
        if not len(known):
            return np.zeros(len(keys), np.int64), np.zeros(len(keys), bool)
        rows = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        return rows, known[rows] == keys

    def has(self, keys: np.ndarray) -> Bool[np.ndarray, " n"]:
        """Which of the keys (`KEY`) there is a value for."""
        return self._places(keys)[1]

    def values(self, keys: Sequence[bytes]) -> list[memoryview | None]:
        """The value of each key, to be copied before the parts are let go of; None where there is none."""
        parts = self._opened()
        if len(parts) == 1:
            return [parts[0].get(key) for key in keys]
        rows, there = self._places(np.frombuffer(b"".join(keys), KEY))
        numbers = self._index()[1][rows] if there.any() else rows
        return [
            parts[number].get(key) if found else None
            for key, number, found in zip(keys, numbers.tolist(), there.tolist(), strict=True)
        ]
