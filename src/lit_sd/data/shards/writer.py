"""Packing examples into tar shards that this project and webdataset read."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from lit_sd.aside import write_aside
from lit_sd.data.shards.index import Entry, index_shard, load_index, save_index
from lit_sd.data.shards.members import Reading
from lit_sd.data.shards.roots import LISTING
from lit_sd.data.shards.store import FOLDER, IndexFolder
from lit_sd.data.shards.texts import image_suffix, packed_json
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size

LOCK = "lock"


class ShardWriter:
    """Writes `00000.tar` and so on, each with its index, into a folder that appears when all is written.

    Until then the shards are in `OUT.partial`, each complete; equal examples give equal bytes.

    Attributes:
        written: examples in complete shards. After a kill and with `resume`, the caller goes on after these.

    Args:
        out: the folder to come; its parents are made.
        resume: go on with what a killed writer left, if it left anything.
        shard_mb: MiB after which a shard is full.
        shard_size: examples that fill one.

    Raises:
        FileExistsError: `out` is there already, or a part of it, without `resume`.
        OSError: another process writes to it.
        ModuleNotFoundError: webdataset is not installed.
        ValueError: a limit is not positive.
    """

    def __init__(
        self,
        out: str | os.PathLike,
        *,
        resume: bool = False,
        shard_mb: int | float = 256,
        shard_size: int = 1000,
    ) -> None:
        try:
            from webdataset import TarWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "shards are written with webdataset: pip install 'lit-sd[data]'"
            ) from error
        if not shard_mb > 0 or shard_size < 1:
            raise ValueError(f"shard_mb={shard_mb}, shard_size={shard_size}: expected more than 0 of both")
        self.out = Path(out).expanduser().absolute()
        self.partial = self.out.with_name(f"{self.out.name}.partial")
        self.limit, self.shard_size = int(shard_mb * 2**20), shard_size
        if self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir())):
            raise FileExistsError(f"{self.out} is there already; delete it, or pack to another folder")
        if self.partial.exists() and not resume:
            raise FileExistsError(
                f"{self.partial} is there, from a packing that didn't end; resume it, or delete that folder"
            )
        self._tar_writer = TarWriter
        self._index = IndexFolder(self.partial / FOLDER, Reading())
        self._entries: dict[str, Entry] = {}
        self._file: BinaryIO | None = None
        self._tar: Any = None
        self._count = self._bytes = 0
        self._closed = False
        self._index.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.partial / LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise OSError(f"another process is packing to {self.out}; wait for it, or stop it") from error
        self._recover()

    def _recover(self) -> None:
        """Takes up the complete shards that an earlier writer left, and drops what is behind them."""
        while (path := self.partial / f"{self._name}.tar").exists():
            index = load_index(self._index.path(self._name))
            if index is None or index.entry.filesize != path.stat().st_size:
                break
            self._entries[self._name] = index.entry
        for path in (*self.partial.glob(".*.tar"), *self.partial.glob("*.tar")):
            if path.stem not in self._entries:
                path.unlink(missing_ok=True)

    @property
    def _name(self) -> str:
        """Of the shard that is being written."""
        return f"{len(self._entries):05d}"

    @property
    def _aside(self) -> Path:
        return self.partial / f".{self._name}.tar"

    @property
    def written(self) -> int:
        """Examples in complete shards."""
        return sum(entry.samples for entry in self._entries.values())

    def write(self, record: Record, size: Size) -> None:
        """Adds an example.

        Args:
            record: its bytes are kept as they are.
            size: upright (height, width).
        """
        if self._tar is None:
            self._file = open(self._aside, "w+b")  # noqa: SIM115
            self._tar = self._tar_writer(
                self._file, user="lit-sd", group="lit-sd", mode=0o644, compress=False, encoder=False, mtime=0
            )
        files = {image_suffix(record.image, record.suffix): record.image, "json": packed_json(record, size)}
        if record.captions:
            files["txt"] = record.captions[0].text.encode()
        for role, data in (("mask", record.mask), ("control", record.control)):
            if data is not None:
                files[f"{role}.{image_suffix(data)}"] = data
        self._tar.write({"__key__": f"{self.written + self._count:09d}", **files})
        self._count += 1
        self._bytes += sum(len(data) for data in files.values())
        if self._count >= self.shard_size or self._bytes >= self.limit:
            self._finish()

    def _finish(self) -> None:
        """Completes the shard that is being written."""
        if self._tar is None or self._file is None:
            return
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        index = index_shard(self._file.fileno(), Reading(verify=False))
        self._file.close()
        if index.entry.samples != self._count:
            raise ValueError(f"{self._aside}: what was written can't be read back: {index.faults}")
        # The caller knows the images' sizes, so it has read them; and a copied shard has another time.
        entry = index.entry._replace(mtime_ns=None, verified=True)
        save_index(self._index.path(self._name), index.with_entry(entry))
        self._aside.rename(self.partial / f"{self._name}.tar")
        self._entries[self._name] = entry
        self._tar = self._file = None
        self._count = self._bytes = 0

    def close(self) -> None:
        """Writes what is left and the summary; only now a reader accepts the folder."""
        if self._closed:
            return
        self._finish()
        self._index.write_entries(self._entries)
        rows = [
            {"url": f"{name}.tar", "nsamples": entry.samples, "filesize": entry.filesize}
            for name, entry in self._entries.items()
        ]
        listing = {
            "__kind__": "wids-shard-index-v1",
            "wids_version": 1,
            "name": self.out.name,
            "shardlist": rows,
        }
        data = json.dumps(listing, indent=1).encode()
        write_aside(self.partial / LISTING, lambda file: file.write(data))
        os.rename(self.partial, self.out)
        (self.out / LOCK).unlink(missing_ok=True)  # only now: without it another could take over
        self._closed = True
        self._lock.release()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif self._tar is not None and self._file is not None:
            with contextlib.suppress(OSError):
                self._tar.close()
                self._file.close()
        self._lock.release()
