"""Where the indexes of shards are kept: a file each, and a summary of all in one, so that set-up reads that
alone.

Indexes of local shards go into a folder beside them, others into the cache. Indexes that were published with
the shards are used where they are.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

from lit_sd.aside import write_aside
from lit_sd.data.shards.files import ShardFiles, modified
from lit_sd.data.shards.index import (
    VERSION,
    Entry,
    ShardIndex,
    index_shard,
    load_index,
    save_index,
)
from lit_sd.data.shards.members import Reading
from lit_sd.data.shards.remote import Options, fetch, is_remote, lock_in

FOLDER = "shard-index"
SUMMARY = "index"
THREADS = min(8, 2 * (os.cpu_count() or 1))


class IndexFolder:
    """Indexes of the shards of one folder.

    Args:
        folder: where they are.
        reading: how the shards are read; indexes of other readings lie beside them.
        origin: path or URL of a folder with more of them, to read only.
        options: of the origin's file system.
    """

    def __init__(
        self, folder: Path, reading: Reading, *, origin: str | None = None, options: Options | None = None
    ) -> None:
        self.folder, self.reading, self.origin, self.options = folder, reading, origin, options

    @property
    def summary(self) -> Path:
        """The file with all entries."""
        return self.folder / f"{SUMMARY}{self.reading.tag}.json"

    def path(self, name: str) -> Path:
        """The file of one index."""
        return self.folder / f"{name}{self.reading.tag}.npz"

    def entries(self) -> dict[str, Entry]:
        """What the summary knows, by name of the shard."""
        if not self.summary.exists():
            self._take(self.summary)
        return self._read_summary()

    def _read_summary(self) -> dict[str, Entry]:
        try:
            content = json.loads(self.summary.read_text(encoding="utf-8"))
            if content["version"] != VERSION or content["fields"] != list(Entry._fields):
                return {}
            return {name: Entry(*row) for name, row in content["shards"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def add_entries(self, entries: dict[str, Entry]) -> None:
        """Puts entries into the summary, beside those that others put there."""
        with lock_in(self.folder, "summary"):
            self.write_entries(self._read_summary() | entries)

    def write_entries(self, entries: dict[str, Entry]) -> None:
        """Writes the summary anew."""
        content = {"version": VERSION, "fields": Entry._fields, "shards": dict(sorted(entries.items()))}
        data = json.dumps(content, separators=(",", ":")).encode()
        write_aside(self.summary, lambda file: file.write(data))

    def load(self, name: str) -> ShardIndex | None:
        """One index, where there is one."""
        path = self.path(name)
        index = load_index(path)
        if index is None and not path.exists() and self._take(path):
            index = load_index(path)
        return index

    def _take(self, path: Path) -> bool:
        """Copies a file from the origin, where it has it."""
        if self.origin is None:
            return False
        try:
            fetch(f"{self.origin}/{path.name}", path, self.options)
        except (FileNotFoundError, PermissionError):  # stores that hide what is missing deny it
            return False
        return True


class ShardIndexes:
    """Indexes of some shards, in whatever folders; made where they are missing.

    Attributes:
        shards: paths or URLs.
        names: of their indexes.
        folders: of their indexes.

    Args:
        files: opens the shards.
        reading: how they are read.
        cache_dir: where indexes go; None is beside the shards.
        options: of fsspec's file systems.

    Raises:
        ValueError: there is no place for the indexes.
    """

    def __init__(
        self,
        shards: Sequence[str],
        files: ShardFiles,
        reading: Reading,
        *,
        cache_dir: Path | None = None,
        options: Options | None = None,
    ) -> None:
        self.shards, self.files, self.reading = list(shards), files, reading
        self.names: list[str] = []
        self.folders: list[IndexFolder] = []
        made: dict[str, IndexFolder] = {}
        for shard in self.shards:
            parent, name = _parent_and_name(shard)
            if parent not in made:
                origin = None if parent == "pipe:" else f"{parent}/{FOLDER}"
                beside = Path(parent, FOLDER)
                # Its copy would stay when the shards are packed anew.
                there = not is_remote(shard) and beside.is_dir() and os.access(beside, os.W_OK)
                if cache_dir is None or there:
                    made[parent] = IndexFolder(beside, reading)
                else:
                    folder = cache_dir / FOLDER / hashlib.sha256(parent.encode()).hexdigest()[:16]
                    made[parent] = IndexFolder(folder, reading, origin=origin, options=options)
            self.names.append(name)
            self.folders.append(made[parent])

    def load(self, number: int) -> ShardIndex:
        """The index of a shard, in full.

        Raises:
            OSError: it is gone, and so is the shard.
        """
        index = self.folders[number].load(self.names[number])
        return self._make(number) if index is None else index

    def entries(self, progress: str) -> list[Entry | None]:
        """The entry of each shard, None for those that don't exist; indexes what is new or has changed.

        Args:
            progress: title of the bar that shows after two seconds.

        Raises:
            OSError: a shard can't be read.
            ValueError: indexes can't be written.
        """
        known: dict[IndexFolder, dict[str, Entry]] = {f: f.entries() for f in dict.fromkeys(self.folders)}
        found: list[Entry | None] = []
        missing: list[int] = []
        for number, (shard, folder, name) in enumerate(
            zip(self.shards, self.folders, self.names, strict=True)
        ):
            entry = known[folder].get(name)
            stat = None if is_remote(shard) else modified(shard)
            if not is_remote(shard) and stat is None:
                entry = None
            elif entry is None or not self._fits(entry, stat):
                entry = None
                missing.append(number)
            found.append(entry)
        added: dict[IndexFolder, dict[str, Entry]] = defaultdict(dict)
        for number, entry in zip(missing, self._index_all(missing, progress), strict=True):
            found[number] = entry
            if entry is not None:
                added[self.folders[number]][self.names[number]] = entry
        for folder, entries in added.items():
            folder.add_entries(entries)
        return found

    def _fits(self, entry: Entry, stat: tuple[int, int] | None) -> bool:
        """Whether an entry is of this shard, as it is now; remote ones are taken not to change."""
        if self.reading.verify and not entry.verified:
            return False
        return stat is None or (entry.filesize == stat[0] and entry.mtime_ns in (None, stat[1]))

    def _index_all(self, numbers: list[int], progress: str) -> list[Entry | None]:
        from tqdm import tqdm

        for folder in dict.fromkeys(self.folders[number] for number in numbers):
            _require_writable(folder.folder)
        done: list[Entry | None] = []
        threads = ThreadPoolExecutor(THREADS)
        # Ranks begin at different places, and find done what others did.
        first = own_share(len(numbers)).start
        numbers = numbers[first:] + numbers[:first]
        try:
            with tqdm(total=len(numbers), desc=progress, unit="shard", delay=2, leave=False) as bar:
                for start in range(0, len(numbers), 32 * THREADS):
                    for entry in threads.map(self._entry, numbers[start : start + 32 * THREADS]):
                        done.append(entry)
                        bar.update()
        finally:
            threads.shutdown(cancel_futures=True)
        return done[len(done) - first :] + done[: len(done) - first]

    def _entry(self, number: int) -> Entry | None:
        """The entry of a shard that the summary doesn't have, or not as it is now."""
        shard = self.shards[number]
        index = load_index(self.folders[number].path(self.names[number]))
        stat = None if is_remote(shard) else modified(shard)
        if index is not None and self._fits(index.entry, stat):
            return index.entry
        try:
            return self._make(number).entry
        except FileNotFoundError:
            return None

    def _make(self, number: int) -> ShardIndex:
        descriptor = self.files.open(self.shards[number])
        try:
            index = index_shard(descriptor, self.reading)
        finally:
            os.close(descriptor)
        save_index(self.folders[number].path(self.names[number]), index)
        return index


def _parent_and_name(shard: str) -> tuple[str, str]:
    """The folder of a shard and the name of its index there."""
    if shard.startswith("pipe:"):
        return "pipe:", hashlib.sha256(shard.encode()).hexdigest()[:16]
    path, mark, query = shard.partition("?") if is_remote(shard) else (shard, "", "")
    parent, _, file = path.rpartition("/")
    name = file.removesuffix(".tar") + mark + query
    clean = re.sub(r"[^\w.+ -]", "_", name)[:100]
    return parent, clean if clean == name else f"{clean}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{uuid4().hex}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"the index of the shards can't be written to {folder} ({error.strerror}); "
            "set data.cache_dir=FOLDER to a place for it"
        ) from error


def own_share(total: int) -> range:
    """The part of so many pieces of work that is this process's, before ranks can talk to each other: by what
    torchrun, Lightning or SLURM told it.
    """
    for rank, world_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world_size in os.environ:
            at, of = int(os.environ[rank]), int(os.environ[world_size])
            return range(at * total // of, (at + 1) * total // of)
    return range(total)
