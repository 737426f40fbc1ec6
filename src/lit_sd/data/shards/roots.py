"""Which shards `data.root` means: paths, folders, patterns, brace ranges, URLs and lists of shards."""

import glob
import hashlib
import json
import os
import posixpath
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lit_sd.data.folder import list_folder
from lit_sd.data.shards.remote import Options, fetch, is_remote, list_remote, local_path

LISTING = "index.json"
"""A list of shards in the form of webdataset's `wids`, as our writer leaves one with them."""
Root = str | os.PathLike | Sequence[str | os.PathLike]


def list_shards(root: Root | None, *, key: str = "data.root", options: Options | None = None) -> list[str]:
    """Absolute paths or URLs of the shards, in the order in which they were named; a folder's are sorted.

    Args:
        root: one or several of: a `.tar`, a folder of them, a pattern (`*.tar`), a brace range
            (`{00000..00099}.tar`), a URL, `pipe:command`, a `.json` with a `shardlist`; several in one string
            are joined by `::`.
        key: config key of `root`, for messages.
        options: of fsspec's file systems.

    Raises:
        ValueError: it names no shard, one twice, or one that can't be read by index.
        FileNotFoundError: a folder or pattern finds nothing. A missing `.tar` is told later.
    """
    parts = [root] if root is None or isinstance(root, (str, os.PathLike)) else list(root)
    texts = ["" if part is None else os.fspath(part).strip() for part in parts]
    if not texts or not all(texts):
        raise ValueError(
            f"{key} is not set; set {key}=FOLDER to a folder of .tar files, or to a pattern or URL like "
            "s3://bucket/{00000..00099}.tar"
        )
    shards = [shard for text in texts for shard in _expand(text, key, options)]
    seen: set[str] = set()
    for shard in shards:
        if shard in seen:
            raise ValueError(
                f"{key} names the shard {shard} twice; to draw its images more often set repeats"
            )
        seen.add(shard)
        _refuse(shard, key)
    return shards


def _refuse(shard: str, key: str) -> None:
    path = shard.partition("?")[0]
    if not path.endswith(".tar") and re.search(r"\.(tgz|tar\.\w+)$", path) and not shard.startswith("pipe:"):
        raise ValueError(
            f"{key}: {shard} is compressed, so no image in it can be read alone; unpack it to a plain .tar "
            "(images hardly shrink)"
        )
    folder = posixpath.dirname(shard)
    if not is_remote(shard) and folder.endswith(".partial"):
        raise ValueError(f"{key}: {folder} was left half-written; run what writes it again, and it goes on")


def _expand(text: str, key: str, options: Options | None) -> list[str]:
    if not text.startswith("pipe:") and not is_remote(text) and local_path(text).exists():
        return _resolve(text, key, options)  # whatever characters its name has
    return [shard for piece in _spread(text, key) for shard in _resolve(piece, key, options)]


def _spread(text: str, key: str) -> list[str]:
    """The URLs of a text with `::`, braces, and `${NAME}` from the environment, as webdataset has them."""
    if "::" not in text and "{" not in text:
        return [text]
    try:
        from webdataset.shardlists import expand_urls
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{key}={text} is expanded by webdataset: pip install 'lit-sd[data]'"
        ) from error
    try:
        return list(expand_urls(text))
    except AssertionError as error:  # a variable that is not set
        raise ValueError(f"{key}={text}: {error}") from error


def _resolve(piece: str, key: str, options: Options | None) -> list[str]:
    if piece.startswith("pipe:"):
        return [piece]
    found = _remote(piece, options) if is_remote(piece) else _local(piece, key)
    if not found:
        raise FileNotFoundError(f"{key}={piece}: no .tar files there")
    return found


def _remote(url: str, options: Options | None) -> list[str]:
    path = url.partition("?")[0]
    if path.endswith(".json"):
        return _shardlist(url, options)
    if ".tar" in posixpath.basename(path) and not re.search(r"[*\[]", path):
        return [url]
    return list_remote(url, ".tar", options)


def _local(piece: str, key: str) -> list[str]:
    path = local_path(piece)
    if path.is_dir():
        found = {os.path.join(path, name) for name in list_folder(path).others if name.endswith(".tar")}
        if (listing := path / LISTING).is_file():
            found.update(_shardlist(str(listing), None))  # it knows of those that got lost
        return sorted(found)
    if path.suffix == ".json" and path.is_file():
        return _shardlist(str(path), None)
    if glob.has_magic(piece) and not path.exists():
        return sorted(name for name in glob.glob(str(path), recursive=True) if name.endswith(".tar"))
    if path.is_file() or path.suffix == ".tar":
        return [str(path)]
    what = "does not exist; relative paths count from the folder you started in"
    if path.with_name(f"{path.name}.partial").is_dir():
        what = f"was not packed to its end: {path.name}.partial is there; run the packing again, it goes on"
    raise FileNotFoundError(f"{key}={piece} {what}")


def _shardlist(url: str, options: Options | None) -> list[str]:
    """The shards that an `index.json` lists, as webdataset's `wids` and our writer write it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "index.json") if is_remote(url) else local_path(url)
        if is_remote(url):
            fetch(url, path, options)
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["shardlist"]
            names = [str(row["url"]) for row in rows]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f'{url}: expected {{"shardlist": [{{"url": …, "nsamples": …}}, …]}} ({error!r})'
            ) from error
    base = posixpath.dirname(url)
    for name in names:
        if name.startswith("pipe:"):  # commands come from the user, never from data
            raise ValueError(f"{url} lists the command {name!r}; name it in the config to have it run")
    return [name if is_remote(name) or name.startswith("/") else posixpath.join(base, name) for name in names]


def shard_labels(shards: Sequence[str]) -> list[str]:
    """What messages and ids call each shard: its file's stem, or where stems repeat, what tells its path from
    those of the others.
    """
    stems = [_stem(shard) for shard in shards]
    if len(set(stems)) == len(stems):
        return stems
    common = os.path.commonprefix(list(shards)).rpartition("/")[0]  # noqa: RUF071 -- URLs too
    return [shard[len(common) :].lstrip("/").removesuffix(".tar") for shard in shards]


def _stem(shard: str) -> str:
    named = re.findall(
        r"([^\s/'\"]+)\.tar\b", shard if shard.startswith("pipe:") else shard.partition("?")[0]
    )
    return named[-1] if named else hashlib.sha256(shard.encode()).hexdigest()[:12]
