"""Writing a packed dataset: a folder with one LMDB file and a manifest."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from lit_sd.data.packed.lmdb_file import (
    CHUNK,
    COLUMNS,
    DATA,
    FORMAT,
    MANIFEST,
    PARTIAL,
    RECORDS,
    VERSION,
    lmdb_library,
    row_key,
)
from lit_sd.data.packed.packing import pack
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size

FIRST_MAP = 2**26
"""Bytes that the file may take at first; doubled each time that it is full."""

COMMIT_BYTES = 2**26
_LOCK, _TOTALS = "lock", b"totals"


class LmdbWriter:
    """Packs examples, in order, into the folder `out`, which is there only once all is written.

    What is written goes to `out.partial`, in batches; a batch is there whole or not at all, whenever the
    process dies. A reader accepts the folder after `close`.

    Attributes:
        written: how many examples an earlier writer, which was killed, has left; go on after these.

    Args:
        out: the folder; its parents are made.
        resume: go on with what an earlier writer left, if it left anything.
        commit_every: examples that are written in one batch, at most.

    Raises:
        FileExistsError: `out` is there already, or a part of it, without `resume`.
        OSError: another process writes to it.
        ValueError: what was left is damaged.
        ModuleNotFoundError: LMDB isn't installed.
    """

    def __init__(self, out: str | os.PathLike, *, resume: bool = False, commit_every: int = 1000) -> None:
        lmdb_library()
        self.out = Path(out).expanduser().absolute()
        self._folder = self.out.with_name(self.out.name + PARTIAL)
        self._commit_every = commit_every
        if self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise FileExistsError(f"{self.out} is there already; delete it, or pack to another folder")
        if self._folder.exists() and not resume:
            raise FileExistsError(
                f"{self._folder} is there, from a packing that didn't end; resume it, or delete that folder"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._folder / _LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise OSError(f"another process is packing to {self.out}; wait for it, or stop it") from error
        self._env: Any = self._open()
        self._tables = {name: self._env.open_db(name) for name in (RECORDS, COLUMNS)}
        self._batch: list[bytes] = []
        self._pending = 0
        self._columns: dict[bytes, bytes] = {}
        self._totals = dict.fromkeys(("bytes", "uncaptioned", "weighted", "masks", "controls"), 0)
        self._chain = ""
        self._chunk = _Chunk()
        self.written = self._rows = self._restore()

    def _file_bytes(self) -> int:
        path = self._folder / DATA
        return path.stat().st_size if path.exists() else 0

    def _open(self) -> Any:
        lmdb = lmdb_library()
        path = self._folder / DATA
        try:
            env = lmdb.open(
                str(self._folder), map_size=max(FIRST_MAP, self._file_bytes()), lock=False, max_dbs=2
            )
        except lmdb.Error as error:
            raise ValueError(f"{path} is damaged ({error}); delete {self._folder} and pack again") from error
        pages = env.info()["last_pgno"] + 1
        if self._file_bytes() < pages * env.stat()["psize"]:
            env.close()
            raise ValueError(f"{path} is truncated; delete {self._folder} and pack again")
        return env

    def _restore(self) -> int:
        """Takes up what an earlier writer left; its number of examples."""
        with self._env.begin() as view:
            rows = view.stat(self._tables[RECORDS])["entries"]
            if rows:
                self._totals, self._chain = json.loads(view.get(_TOTALS, db=self._tables[COLUMNS]))
                key = row_key(rows // CHUNK)
                self._chunk = _Chunk.read(lambda name: view.get(name + key, db=self._tables[COLUMNS]))
        return rows

    def write(self, record: Record, size: Size) -> None:
        """Adds an example.

        Args:
            record: the example.
            size: its upright (height, width).

        Raises:
            ValueError: what is known of it besides is no plain values.
            OSError: it can't be written, as on a full disk.
        """
        digest = record.digest
        data = pack(record, size, digest)
        captions = sum(bool(caption.text.strip()) for caption in record.captions)
        self._batch.append(data)
        self._pending += len(data)
        self._totals["bytes"] += len(data)
        self._totals["uncaptioned"] += not captions
        self._totals["weighted"] += record.weight != 1
        self._totals["masks"] += record.mask is not None
        self._totals["controls"] += record.control is not None
        self._chunk.add(record, digest, size, captions)
        self._rows += 1
        if self._rows % CHUNK == 0:
            self._columns |= self._chunk.columns(row_key(self._rows // CHUNK - 1))
            self._chain = self._chunk.link(self._chain)
            self._chunk = _Chunk()
        if len(self._batch) >= self._commit_every or self._pending >= COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        lmdb = lmdb_library()
        columns = self._columns | {_TOTALS: json.dumps([self._totals, self._chain]).encode()}
        if self._rows % CHUNK:
            columns |= self._chunk.columns(row_key(self._rows // CHUNK))
        while True:
            try:
                with self._env.begin(write=True) as change:
                    for row, data in enumerate(self._batch, self._rows - len(self._batch)):
                        change.put(row_key(row), data, db=self._tables[RECORDS], append=True)
                    for key, data in columns.items():
                        change.put(key, data, db=self._tables[COLUMNS])
                break
            except lmdb.MapFullError:
                self._env.set_mapsize(2 * self._env.info()["map_size"])
            except lmdb.Error as error:
                raise OSError(
                    f"{self._folder / DATA} can't be written: {error}; resume the packing"
                ) from error
        self._batch, self._columns, self._pending = [], {}, 0

    def close(self) -> None:
        """Writes what is left, and the manifest; only now a reader accepts the folder."""
        if self._env is None:
            return
        self._commit()
        self._release()
        manifest = {"format": FORMAT, "version": VERSION, "count": self._rows, **self._totals}
        manifest |= {"identity": self._chunk.link(self._chain), "file_bytes": self._file_bytes()}
        with open(self._folder / f"{MANIFEST}.new", "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, self._folder / MANIFEST)
        os.rename(self._folder, self.out)
        (self.out / _LOCK).unlink(missing_ok=True)  # only now: without it another could take over
        self._lock.release()

    def _release(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def __enter__(self) -> "LmdbWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        self._release()
        self._lock.release()


class _Chunk:
    """Columns of the chunk that is being filled."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.digests: list[bytes] = []
        self.sizes: list[Size] = []
        self.weights: list[float] = []
        self.captions: list[int] = []

    @classmethod
    def read(cls, column: Any) -> "_Chunk":
        """From the columns that `column` gives by name; empty, where it gives none."""
        chunk = cls()
        names = column(b"i")
        if names is None:
            return chunk
        chunk.names = json.loads(names)
        digests, weights = column(b"d"), column(b"w")
        chunk.digests = [digests[start : start + 16] for start in range(0, len(digests), 16)]
        chunk.sizes = [tuple(size) for size in np.frombuffer(column(b"s"), "<i4").reshape(-1, 2).tolist()]
        ones = np.ones(len(chunk.names))
        chunk.weights = (ones if weights is None else np.frombuffer(weights, "<f8")).tolist()
        chunk.captions = list(column(b"c"))
        return chunk

    def add(self, record: Record, digest: bytes, size: Size, captions: int) -> None:
        self.names.append(record.id)
        self.digests.append(digest)
        self.sizes.append(size)
        self.weights.append(record.weight)
        self.captions.append(min(captions, 255))

    def columns(self, key: bytes) -> dict[bytes, bytes]:
        """As they are stored; weights that are all 1 are not."""
        columns = {
            b"i" + key: json.dumps(self.names).encode(),
            b"d" + key: b"".join(self.digests),
            b"s" + key: np.array(self.sizes, "<i4").tobytes(),
            b"c" + key: bytes(self.captions),
        }
        if any(weight != 1 for weight in self.weights):
            columns[b"w" + key] = np.array(self.weights, "<f8").tobytes()
        return columns

    def link(self, chain: str) -> str:
        """Tells the examples up to here apart, from what told those before."""
        digest = hashlib.sha256(chain.encode() + json.dumps(self.names).encode())
        digest.update(b"".join(self.digests))
        return digest.hexdigest()
