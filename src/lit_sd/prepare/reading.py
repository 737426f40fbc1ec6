"""What is to be prepared, of any kind, read by index; an example that is broken is told as such and hinders
none of the others.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from lit_sd.data.buckets import listed
from lit_sd.data.source import Record, Source
from lit_sd.prepare.examples import Input, Unreadable
from lit_sd.prepare.folder_input import FolderInput
from lit_sd.spelling import hint

Kind = Literal["folder", "lmdb", "webdataset", "hub"]


class SourceInput(Input):
    """The examples of a source, and behind them those that the source itself leaves out as unreadable."""

    def __init__(
        self,
        kind: str,
        source: Source,
        left_out: list[tuple[str, str]] | None = None,
        complete: bool | None = None,
        stamp: str = "",
    ) -> None:
        source.check()
        self._stamp = stamp
        self.complete = complete
        self.kind, self.source, self.left_out = kind, source, left_out or []
        self.notes = list(source.notes)
        self._count = len(source)

    def __len__(self) -> int:
        return self._count + len(self.left_out)

    def fingerprint(self) -> str:
        return f"{len(self)}-{self.source.identity()}-{self._stamp}"

    def read(self, start: int, stop: int) -> Iterator[Record | Unreadable]:
        for index in range(start, stop):
            if index >= self._count:
                yield Unreadable(*self.left_out[index - self._count])
                continue
            try:
                yield self.source.record(index)
            except (OSError, ValueError, KeyError) as error:
                yield Unreadable(f"example {index}", str(error))


def stamp_of(data: str) -> str:
    """Tells whether files of packed data were written anew: their sizes and times; nothing of what is
    elsewhere.
    """
    path = Path(data).expanduser()
    files = sorted(path.glob("*")) if path.is_dir() else [path] if path.is_file() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:12]


def kind_of(data: str) -> Kind:
    """What a path or URL is, from what lies there.

    Raises:
        FileNotFoundError: nothing does.
        ValueError: it is half-written.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        if path.name.endswith(".partial"):
            raise ValueError(f"{data} is half-written; run the packing again, it goes on where it stopped")
        if (path / "data.mdb").is_file():
            return "lmdb"
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return "hub"  # as `save_to_disk` leaves it
        tars = any(path.glob("*.tar")) or (path / "index.json").is_file()
        return "webdataset" if tars else "folder"
    if path.with_name(path.name + ".partial").is_dir():
        raise FileNotFoundError(
            f"{data} was not packed to its end, {path.name}.partial is there; run the packing again, it goes "
            "on where it stopped"
        )
    if data.startswith("pipe:") or "://" in data or ".tar" in data:
        return "webdataset"
    what = "is a file; expected a folder, shards (.tar) or a URL" if path.exists() else "does not exist"
    raise FileNotFoundError(f"{data} {what}; for a dataset of the Hugging Face hub, add --from hub")


FOLDERS_ONLY = ("mask_root", "control_root", "repeat_folders")


def open_input(
    data: str,
    work: Path,
    name: str,
    kind: str | None = None,
    options: Mapping[str, Any] | None = None,
    storage: Mapping[str, Any] | None = None,
) -> Input:
    """What is to be read.

    Args:
        data: path, URL or name.
        work: a folder for lists and indexes; nothing is written where the data lies.
        name: of what is written there.
        kind: of `Kind`; None looks.
        options: of the reader, as `data=KIND` has them in the config: the caption's key, the split …
        storage: of fsspec's file systems, for shards that are elsewhere. They may be secret, and are written
            nowhere.

    Raises:
        ValueError: an option is none, or there is nothing that can be read.
        FileNotFoundError: nothing is there, or a shard that was named is not.
    """
    if kind is not None and kind not in get_args(Kind):
        raise ValueError(f"--from {kind}: there is no such kind{hint(kind, get_args(Kind))}")
    kind = kind or kind_of(data)
    chosen = dict(options or {})
    if kind == "webdataset":
        storage = chosen.pop("storage_options", storage)
    if kind != "folder":
        _refuse_folder_options(data, kind, chosen)
    match kind:
        case "folder":
            found: Input = bound(FolderInput, chosen)(Path(data), work, name, **chosen)
        case "lmdb":
            found = _open_lmdb(data, chosen)
        case "webdataset":
            found = _open_shards(data, work / f"{name}-index", chosen, storage)
        case _:
            found = _open_hub(data, work / f"{name}-hub", chosen)
    found.options = json.dumps(chosen, sort_keys=True) if chosen else ""
    return found


def _refuse_folder_options(data: str, kind: str, options: Mapping[str, Any]) -> None:
    if wrong := [option for option in FOLDERS_ONLY if option in options]:
        raise ValueError(
            f"--{wrong[0].replace('_', '-')} is for folders, but {data} is read as {kind}, which has masks, "
            "control images and weights in its examples; leave the option out"
        )


def bound(reader: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """The reader, if it has such options.

    Raises:
        ValueError: it has not; the message names the nearest.
    """
    taken = {"name", "key", "prompt", "weight", "repeats", "rule", "limit"}
    taken |= {"bad_files", "max_bad_share", "missing_captions", "verify", "alpha_mask", "cache_dir"}
    known = [
        p.name
        for p in inspect.signature(reader).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in taken
    ]
    for option in options:
        if option not in known:
            raise ValueError(f"--read {option}: there is no such option here{hint(option, known)}")
    return reader


TOLERANT: dict[str, Any] = {
    "key": "input",
    "bad_files": "skip",
    "max_bad_share": 1.0,
    "missing_captions": "empty",
}


def _open_lmdb(data: str, options: dict[str, Any]) -> Input:
    from lit_sd.data.lmdb import LmdbSource
    from lit_sd.data.packed.lmdb_file import read_manifest

    manifest = read_manifest(Path(data).expanduser().absolute())
    # One prompt for all is how a source is opened of which no example has a caption.
    blank = {"prompt": ""} if manifest["uncaptioned"] == manifest["count"] else {}
    return SourceInput(
        "lmdb",
        bound(LmdbSource, options)(data, **TOLERANT, **blank, **options),
        complete=True,
        stamp=stamp_of(data),
    )


def _open_shards(data: str, cache: Path, options: dict[str, Any], storage: Mapping[str, Any] | None) -> Input:
    from lit_sd.data.shards.files import ShardFiles
    from lit_sd.data.shards.remote import FetchedFiles
    from lit_sd.data.shards.roots import list_shards, shard_labels
    from lit_sd.data.shards.store import ShardIndexes
    from lit_sd.data.webdataset import ShardSource

    reader = bound(ShardSource, options)
    tolerant = TOLERANT | {"verify": False, "cache_dir": cache, "storage_options": storage}
    source = reader(data, **tolerant, **options)
    shards = list_shards(data, key="input", options=storage)
    files = ShardFiles(FetchedFiles(cache / "shards", options=storage))
    indexes = ShardIndexes(shards, files, source.reading, cache_dir=cache, options=storage)
    entries, labels = indexes.entries("indexing"), shard_labels(shards)
    if not Path(data).expanduser().is_dir():  # of a folder, its list says whether it is complete
        _require_all(data, labels, entries)
    try:
        source.check()
    except ValueError as error:
        if "has a caption" not in str(error):
            raise
        source = reader(data, **tolerant, prompt="", **options)
        source.check()
    left_out = []
    for number, (label, entry) in enumerate(zip(labels, entries, strict=True)):
        if entry is not None and entry.bad:
            named = [(f"{label}/{key}", why) for key, why in indexes.load(number).faults.items()]
            rest = entry.bad - len(named)
            left_out += named + [(f"{label}/?{i}", "it can't be read") for i in range(rest)]
    complete = listed_complete(data, len(source) + len(left_out))
    return SourceInput("webdataset", source, left_out, complete, stamp_of(data))


def _require_all(data: str, labels: Sequence[str], entries: Sequence[Any]) -> None:
    pairs = zip(labels, entries, strict=True)
    if absent := [f"{label} (there is no such shard)" for label, entry in pairs if entry is None]:
        raise FileNotFoundError(
            f"input={data}: {len(absent)} of {len(labels)} shards can't be used: {listed(absent)}; restore "
            "them, or name only those that are there"
        )


def listed_complete(data: str, there: int) -> bool | None:
    """Whether shards hold as many examples as the list beside them says; None without a list."""
    try:
        listing = json.loads((Path(data).expanduser() / "index.json").read_text(encoding="utf-8"))
        return sum(shard["nsamples"] for shard in listing["shardlist"]) == there
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _open_hub(data: str, cache: Path, options: dict[str, Any]) -> Input:
    from lit_sd.data.hub import HubSource  # type: ignore[import-not-found,unused-ignore]

    reader = bound(HubSource, options)
    tolerant = TOLERANT | {"cache_dir": cache}
    source = reader(data, **tolerant, **options)
    try:
        source.check()
    except ValueError as error:
        if "has a caption" not in str(error):
            raise
        source = reader(data, **tolerant, prompt="", **options)
    return SourceInput("hub", source)
