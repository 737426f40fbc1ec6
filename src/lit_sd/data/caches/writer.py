"""A cache on disk: values by keys of 16 bytes, in LMDB files that are written once and then never changed.

Each process that fills a cache writes a file of its own, a part: several writers of one file would wait for
each other, and harm it on a network drive. What a process had written when it was killed is kept.
"""

import fcntl
import json
import logging
import shutil
from pathlib import Path
from typing import IO
from uuid import uuid4

import numpy as np

from lit_sd.data.packed.lmdb_file import lmdb_library

log = logging.getLogger(__name__)

FORMAT, VERSION = "lit-sd-cache", 1
DATA, MANIFEST, KEYS, LOCK, PARTIAL = "data.mdb", "manifest.json", "keys.npy", "writer.lock", ".partial"
KEY = np.dtype("S16")
"""Keys in arrays. A single one taken out of an array loses the zeros at its end: use `tobytes` of a slice."""
ROOM = 1 << 28
"""Bytes that a part may grow to before more are asked for."""


class PartWriter:
    """Writes one part. Only its `close` makes it one that readers see.

    Args:
        folder: of the cache.
        kind: what the values are.
        every: entries, and
        every_bytes: bytes, after which what was written is made durable.
    """

    def __init__(self, folder: Path, kind: str, *, every: int = 32, every_bytes: int = 1 << 26) -> None:
        self.folder, self.kind, self.every, self.every_bytes = folder, kind, every, every_bytes
        name = uuid4().hex[:16]
        hidden, self.path = folder / f".{name}", folder / f"{name}{PARTIAL}"
        hidden.mkdir(parents=True)
        self._lock = _locked(hidden)
        hidden.rename(self.path)  # only now that it is locked: nobody may take it over
        self._waiting: list[tuple[bytes, bytes]] = []
        self._bytes, self._room, self.written = 0, ROOM, 0
        lmdb = lmdb_library()
        try:
            self._env = lmdb.open(str(self.path), map_size=self._room, lock=False)
        except lmdb.Error as error:
            raise _not_written(self.path / DATA, error) from error

    def write(self, key: bytes, value: bytes) -> None:
        """Adds a value; it is durable with the next `commit`.

        Raises:
            OSError: there is no room.
        """
        self._waiting.append((key, value))
        self._bytes += len(value)
        if len(self._waiting) >= self.every or self._bytes >= self.every_bytes:
            self.commit()

    def commit(self) -> None:
        """Makes durable what was written.

        Raises:
            OSError: there is no room.
        """
        lmdb = lmdb_library()
        while self._waiting:
            try:
                with self._env.begin(write=True) as change:
                    for pair in self._waiting:
                        change.put(*pair)
            except lmdb.MapFullError:
                self._room = 2 * (self._room + self._bytes)
                self._env.set_mapsize(self._room)
                continue
            except (lmdb.Error, OSError) as error:
                raise _not_written(self.path / DATA, error) from error
            self.written += len(self._waiting)
            self._waiting, self._bytes = [], 0

    def close(self) -> None:
        """Makes it a part, where anything was written.

        Raises:
            OSError: there is no room.
        """
        self.commit()
        self._env.close()
        _finish(self.path, self.kind)
        self._unlock()

    def abandon(self) -> None:
        """Leaves it as a kill would: `take_over` makes a part of what is durable."""
        self._env.close()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def take_over(folder: Path, kind: str) -> int:
    """Makes parts of what processes that are no more had made durable. Returns how many entries that are."""
    taken = 0
    for path in sorted(folder.glob(f"*{PARTIAL}")):
        lock = _locked(path)
        if lock is None:  # its writer lives
            continue
        with lock:
            try:
                taken += _finish(path, kind)
            except lmdb_library().Error as error:
                log.warning("%s was left half-written and can't be read (%s); it is deleted", path, error)
                shutil.rmtree(path, ignore_errors=True)
    return taken


def _not_written(path: Path, error: Exception) -> OSError:
    # LMDB calls a full disk an input/output error.
    free = shutil.disk_usage(path.parent).free / 2**20
    return OSError(
        f"{path} can't be written: {error} ({free:,.0f} MiB are free there). Make room, or set "
        "data.cache_dir to another disk; what was written is kept, and the next run goes on from there"
    )


def _locked(path: Path) -> IO[bytes] | None:
    """The lock of a part in the making, until closed or its process ends; None where it can't be had."""
    try:
        lock = (path / LOCK).open("wb")
    except FileNotFoundError:  # finished a moment ago
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def _finish(path: Path, kind: str) -> int:
    """Describes what is in a folder and gives it its name, or deletes it where that is nothing."""
    keys = _keys_in(path) if (path / DATA).is_file() else np.zeros(0, KEY)
    if not len(keys):
        shutil.rmtree(path, ignore_errors=True)
        return 0
    size = (path / DATA).stat().st_size
    manifest = {"format": FORMAT, "version": VERSION, "kind": kind, "entries": len(keys), "file_bytes": size}
    try:
        np.save(path / KEYS, keys)
        (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    except OSError as error:
        raise _not_written(path, error) from error
    part = path.rename(path.with_suffix(""))
    (part / LOCK).unlink(missing_ok=True)  # only now: without it another process could take over
    return len(keys)


def _keys_in(path: Path) -> np.ndarray:
    """All keys, sorted."""
    with (
        lmdb_library().open(str(path), map_size=mapped_size(path), readonly=True, lock=False) as env,
        env.begin() as view,
        view.cursor() as cursor,
    ):
        return np.frombuffer(b"".join(cursor.iternext(values=False)), KEY)


def mapped_size(path: Path) -> int:
    """Bytes of address space for a part that is only read."""
    return max((path / DATA).stat().st_size, 1 << 20)
