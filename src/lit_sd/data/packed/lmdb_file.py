"""The file of a packed dataset, as its readers see it: opened once per process and path, whoever asks.

It holds two tables. `records` has a packed record for each example, keyed by its number; `columns` has what
is asked of many examples at once, in chunks of `CHUNK` examples.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Float, Int

from lit_sd.data.caption_rules import Caption
from lit_sd.data.packed.packing import read_header, unpack
from lit_sd.data.source import Record

T = TypeVar("T")

FORMAT = "lit-sd-lmdb"
VERSION = 1
CHUNK = 4096
DATA, MANIFEST, PARTIAL = "data.mdb", "manifest.json", ".partial"
RECORDS, COLUMNS = b"records", b"columns"

_open_files: WeakValueDictionary[tuple[int, int], "LmdbFile"] = WeakValueDictionary()
_opening = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child forked while a thread opens a file would wait for ever
    os.register_at_fork(
        before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_opening.release
    )


def lmdb_library() -> ModuleType:
    """LMDB's Python module.

    Raises:
        ModuleNotFoundError: it isn't installed; the message says how to.
    """
    try:
        import lmdb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is needed for packed datasets: pip install 'lit-sd[data]'"
        ) from error
    return lmdb


def row_key(row: int) -> bytes:
    """Key of an example or a chunk: LMDB sorts by bytes."""
    return row.to_bytes(8, "big")


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the writer of a packed dataset says of it.

    Raises:
        ValueError: it isn't one, or only a part of one.
        FileNotFoundError: nothing is there.
    """
    again = "run the packing again, it goes on where it stopped, or delete the folder"
    partial = folder.with_name(folder.name + PARTIAL)
    if not folder.is_dir():
        if partial.is_dir():
            raise FileNotFoundError(f"{folder} was not packed to its end, {partial.name} is there; {again}")
        what = "is a file; expected the folder around it" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"{folder} {what}; relative paths count from the folder you started in")
    if folder.name.endswith(PARTIAL):
        raise ValueError(f"{folder} is half-written; {again}")
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} has no {MANIFEST}: it is half-written, or no packed dataset; expected what "
            f"`lit-sd prepare --to lmdb` writes"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        kind, version = manifest["format"], manifest["version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{folder / MANIFEST} can't be read ({error}); pack the dataset again") from error
    if kind != FORMAT or version != VERSION:
        raise ValueError(
            f"{folder}: expected {FORMAT}, version {VERSION}, got {kind}, version {version}; "
            "pack it with this version of lit-sd"
        )
    _check_length(folder / DATA, manifest["file_bytes"])
    return manifest


def _check_length(path: Path, expected: int) -> None:
    # LMDB maps the file into memory: reading past its end would kill the process.
    length = path.stat().st_size if path.is_file() else 0
    if length < expected:
        raise ValueError(
            f"{path} is truncated: {length:,} bytes, expected {expected:,}; copy it again, or delete the "
            "folder and pack the dataset again"
        )


def opened(folder: Path) -> "LmdbFile":
    """The file in a folder; the same object, as long as anyone holds it: LMDB must not open a file twice."""
    where = (folder / DATA).stat()
    with _opening:
        file = _open_files.get((where.st_dev, where.st_ino))
        if file is None:
            file = _open_files[where.st_dev, where.st_ino] = LmdbFile(folder)
        return file


class LmdbFile:
    """Random access to the examples in a packed file, from any thread and, after a fork, from any process.

    Args:
        folder: of the packed dataset.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: int | None = None
        self._env: Any = None
        self._tables: dict[bytes, Any] = {}

    def __del__(self) -> None:
        if self._env is not None:  # in a fork, LMDB's CFFI form would leave it open
            self._env.close()

    def _environment(self) -> Any:
        if self._process != os.getpid():
            with _opening:
                if self._process != os.getpid():
                    self._open()
        return self._env

    def _open(self) -> None:
        lmdb = lmdb_library()
        if self._env is not None:  # the parent's: closing it gives back this process's copy only
            self._env.close()
            self._env = None
        try:
            self._env = lmdb.open(
                str(self.folder),
                map_size=(self.folder / DATA).stat().st_size,
                readonly=True,
                create=False,
                lock=False,
                readahead=False,
                max_dbs=2,
            )
            self._tables = {name: self._env.open_db(name, create=False) for name in (RECORDS, COLUMNS)}
        except lmdb.Error as error:
            raise OSError(f"{self.folder / DATA} can't be opened: {error}") from error
        self._process = os.getpid()

    def __len__(self) -> int:
        env = self._environment()
        with env.begin() as view:
            return view.stat(self._tables[RECORDS])["entries"]

    def _read(self, table: bytes, key: bytes, take: Callable[[memoryview], T]) -> T | None:
        lmdb = lmdb_library()
        env = self._environment()
        try:
            with env.begin(db=self._tables[table], buffers=True) as view:
                value = view.get(key)
                return None if value is None else take(value)
        except lmdb.Error as error:
            raise OSError(f"{self.folder / DATA} can't be read: {error}") from error

    def _read_row(self, row: int, take: Callable[[memoryview], T]) -> T:
        try:
            found = self._read(RECORDS, row_key(row), take)
        except FileNotFoundError:  # the file as a whole is gone
            raise
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise OSError(f"{self.folder}: example {row} is damaged: {error}") from error
        if found is None:
            raise OSError(f"{self.folder}: example {row} is missing")
        return found

    def record(self, row: int) -> Record:
        """An example as it is stored.

        Raises:
            OSError: it is damaged.
        """
        return self._read_row(row, unpack)

    def header(self, row: int) -> dict[str, Any]:
        """What is known of an example beside its pixels; only the first bytes of it are read.

        Raises:
            OSError: it is damaged.
        """
        return self._read_row(row, read_header)

    def captions(self, row: int) -> tuple[Caption, ...]:
        """The captions of an example, without reading its pixels.

        Raises:
            OSError: it is damaged.
        """
        return tuple(Caption(**caption) for caption in self.header(row)["captions"])

    def sizes(self, first: int, last: int) -> Int[np.ndarray, "n 2"]:
        """(height, width) of the rows from `first` to before `last`."""
        return self._column(b"s", "<i4", first, last).reshape(-1, 2).astype(np.int32, copy=False)

    def weights(self, first: int, last: int) -> Float[np.ndarray, " n"]:
        """How often a turn draws the rows from `first` to before `last`."""
        return self._column(b"w", "<f8", first, last).astype(np.float64, copy=False)

    def caption_counts(self, first: int, last: int) -> Int[np.ndarray, " n"]:
        """How many captions the rows from `first` to before `last` have, 255 at most."""
        return self._column(b"c", "<u1", first, last).astype(np.int64)

    def names(self, total: int) -> Iterator[str]:
        """Ids of the first `total` rows, read in chunks."""
        for chunk in range(-(-total // CHUNK)):
            names = self._read(COLUMNS, b"i" + row_key(chunk), lambda value: json.loads(bytes(value)))
            if names is None:
                raise OSError(f"{self.folder}: the names of chunk {chunk} are missing")
            yield from names[: total - chunk * CHUNK]

    def _column(self, name: bytes, kind: str, first: int, last: int) -> np.ndarray:
        each = 2 if name == b"s" else 1
        pieces = [np.empty(0, kind)]
        for chunk in range(first // CHUNK, -(-last // CHUNK) if last > first else 0):
            data = self._read(COLUMNS, name + row_key(chunk), bytes)
            if data is None and name != b"w":
                raise OSError(f"{self.folder}: chunk {chunk} of a column is missing")
            values = np.ones(CHUNK, kind) if data is None else np.frombuffer(data, kind)
            low = max(first - chunk * CHUNK, 0)
            pieces.append(values[low * each : (last - chunk * CHUNK) * each])
        return np.concatenate(pieces)
