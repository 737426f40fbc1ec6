"""Reading parts of shards by offset, in any process, without keeping many of them open."""

import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from lit_sd.data.shards.members import BLOCK, Span
from lit_sd.data.shards.remote import FetchedFiles, is_remote

K = TypeVar("K")
V = TypeVar("V")

AGAIN = "it has changed: delete its index, in the folder shard-index beside it or in data.cache_dir"
OPEN_SHARDS = 16
NEAR = 2**16
"""Files of an example with at most so many other bytes between them are read at once."""


class Recent(Generic[K, V]):
    """What was asked for last, by key. Each process has its own, and nothing is pickled."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of a key, which `make` gives where it isn't kept."""
        if self._process != os.getpid():  # forked: nothing that was open in the parent is used here
            self._reset()
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value = make(key)
        with self._lock:
            self._values[key] = value
            while len(self._values) > self.limit:
                self._values.popitem(last=False)
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {"limit": self.limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.limit = state["limit"]
        self._reset()


class _Open:
    """An open file, closed once nobody reads it any more; `known` once an example was where it should be."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.known = descriptor, False

    def __del__(self) -> None:
        os.close(self.descriptor)


class ShardFiles:
    """Shards on disk, or fetched from elsewhere when they are first read.

    Args:
        fetched: where remote ones go; None where there are none.
    """

    def __init__(self, fetched: FetchedFiles | None = None) -> None:
        self.fetched = fetched
        self._opened: Recent[str, _Open] = Recent(OPEN_SHARDS)

    def open(self, shard: str) -> int:
        """A descriptor, to be closed by the caller.

        Raises:
            FileNotFoundError: there is no such shard.
            OSError: it can't be read.
        """
        if not is_remote(shard):
            return os.open(shard, os.O_RDONLY)
        assert self.fetched is not None
        return self.fetched.open(shard)

    def read(self, shard: str, key: str, spans: Mapping[str, Span], filesize: int) -> dict[str, bytes]:
        """Files of an example.

        Args:
            shard: path or URL.
            key: of the example.
            spans: where they lie, by role.
            filesize: bytes of the shard.

        Raises:
            OSError: the shard can't be read, or is another one than was indexed.
        """
        opened = self._opened.get(shard, lambda name: _Open(self.open(name)))
        if os.fstat(opened.descriptor).st_size != filesize:
            raise OSError(f"{shard}: it is not the {filesize} bytes that were indexed; {AGAIN}")
        low = min(span.start for span in spans.values()) - BLOCK
        high = max(span.start + span.size for span in spans.values())
        together = high - low <= NEAR + sum(span.size + BLOCK for span in spans.values())
        block = os.pread(opened.descriptor, high - low, low) if together else None
        found = {}
        for role, span in spans.items():
            begin = span.start - BLOCK
            if block is not None:
                part = block[begin - low : begin - low + BLOCK + span.size]
            else:
                part = os.pread(opened.descriptor, BLOCK + span.size, begin)
            whole = len(part) == BLOCK + span.size
            if not whole or not (opened.known or _tells(part[:BLOCK], key, span.size)):
                raise OSError(f"{shard}: {key} is no longer where it was indexed; {AGAIN}")
            found[role] = part[BLOCK:]
        opened.known = True
        return found


def _tells(header: bytes, key: str, size: int) -> bool:
    """Whether a tar header is that of a file of this key and size."""
    try:
        told = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    # Long names, and in some kinds of tar those with other letters, stand elsewhere in full.
    named = not key.isascii() or key.startswith(told.name) or told.name.startswith(key)
    return told.size == size and named


def modified(shard: str) -> tuple[int, int] | None:
    """(bytes, time of last change in ns) of a shard on disk; None where it is missing."""
    try:
        stat = os.stat(shard)
    except FileNotFoundError:
        return None
    return stat.st_size, stat.st_mtime_ns
