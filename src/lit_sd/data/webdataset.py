"""Tar shards in webdataset's layout as a source of training examples, on disk or in object stores.

Each shard is indexed once; an example is then read by its place in the file. So the order of examples is the
sampler's alone, no rank or worker owns a shard, and a resumed run reads nothing of what went before.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from lit_sd.data.caption_rules import Caption, CaptionRule
from lit_sd.data.folder import BadFiles
from lit_sd.data.packed.packing import MissingCaptions, Names, Policy
from lit_sd.data.shards.files import ShardFiles
from lit_sd.data.shards.members import ROLES, Reading
from lit_sd.data.shards.remote import FetchedFiles, is_remote
from lit_sd.data.shards.report import Shard, judge
from lit_sd.data.shards.roots import Root, list_shards, shard_labels
from lit_sd.data.shards.rows import ShardRow, ShardRows
from lit_sd.data.shards.store import ShardIndexes
from lit_sd.data.shards.texts import captions_of as stored_captions
from lit_sd.data.shards.texts import extra_of, parse_json, weight_of
from lit_sd.data.shards.writer import ShardWriter
from lit_sd.data.source import Record, Source

__all__ = ["ShardSource", "ShardWriter"]

log = logging.getLogger(__name__)

CAPTIONS_TOLD = 10_000
WHOLE = 1_000_000
"""Examples of shards on this machine that are shuffled as one."""


class ShardSource(Source):
    """Images in `.tar` shards, with captions, masks and control images; see `lit_sd.data.shards.members` for
    their layout.
    """

    def __init__(
        self,
        root: Root | None,
        *,
        name: str = "images",
        key: str = "data.root",
        weight: int | float = 1.0,
        repeats: int = 1,
        rule: CaptionRule | None = None,
        alpha_mask: bool = False,
        prompt: str | None = None,
        caption_key: str | None = None,
        image_ext: str | None = None,
        missing_captions: MissingCaptions = "error",
        bad_files: BadFiles = "error",
        max_bad_share: int | float = 0.5,
        verify: bool = True,
        cache_dir: str | os.PathLike | None = None,
        cache_gb: int | float | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            root: the shards, as `lit_sd.data.shards.roots.list_shards` takes them.
            name: what messages call this source.
            key: config key of `root`, for messages.
            weight: what this source's mean loss counts.
            repeats: how often an epoch draws each image.
            rule: how a draw's caption comes of the stored ones.
            alpha_mask: an image's transparency is its mask, where it has no other.
            prompt: one caption for all images; with `missing_captions="prompt"`, for those without one.
            caption_key: ending of the caption files, or key in the `.json` files; None takes `.txt`, else
                the usual keys.
            image_ext: ending of the image, where examples have several: `jpg`, or `left.png`.
            missing_captions: what to do about single images without caption. That none has one is always an
                error.
            bad_files: what to do about images that can't be used and shards that are missing, cut off or no
                tar. Of a shard that is cut off, the examples before the last are used.
            max_bad_share: with `bad_files="skip"`, the share of bad images, and of missing shards, beyond
                which it is an error after all.
            verify: decode each image once, when its shard is indexed; False reads headers only of JPEG and
                PNG.
            cache_dir: where remote shards and all indexes go; None puts the indexes beside local shards.
            cache_gb: how much of remote shards is kept, in GB.
            storage_options: of fsspec's file systems.

        Raises:
            ValueError: an option is out of its range.
        """
        super().__init__(name, weight=weight, repeats=repeats, rule=rule, alpha_mask=alpha_mask)
        self.root, self.key = root, key
        self.policy = Policy(prompt, missing_captions, bad_files, max_bad_share)
        self.reading = Reading(caption_key, image_ext, verify)
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser().absolute()
        self.options = storage_options
        fetched = None
        if self.cache_dir is not None:
            fetched = FetchedFiles(self.cache_dir / "shards", limit_gb=cache_gb, options=storage_options)
        self._files = ShardFiles(fetched)
        self._rows: ShardRows | None = None

    def check(self) -> None:
        """Finds the shards and indexes those that are new; later calls do nothing. `notes` then says what
        was found.

        Raises:
            ValueError: no shards, or something bad in them, as the policies have it; all of it is named.
            FileNotFoundError: a folder or pattern finds nothing.
            OSError: a remote shard can't be fetched.
        """
        if self._rows is not None:
            return
        shards = list_shards(self.root, key=self.key, options=self.options)
        if self._files.fetched is None and (remote := [shard for shard in shards if is_remote(shard)]):
            raise ValueError(
                f"{self.key} names {len(remote)} remote shards like {remote[0]}; set "
                "data.cache_dir=FOLDER to where they are kept on this machine"
            )
        indexes = ShardIndexes(
            shards, self._files, self.reading, cache_dir=self.cache_dir, options=self.options
        )
        labels, entries = shard_labels(shards), indexes.entries(f"{self.name}: indexing shards")
        rows = ShardRows(indexes, entries, labels, self._files, self.policy.skips_blank)
        there = [
            Shard(number, label, entry)
            for number, (label, entry) in enumerate(zip(labels, entries, strict=True))
            if entry is not None
        ]
        absent = [label for label, entry in zip(labels, entries, strict=True) if entry is None]
        notes = judge(f"{self.key}={self.root}", there, absent, rows, self.policy)
        if not len(rows):
            raise ValueError(
                f"{self.key}={self.root}: no image is left: {'; '.join(notes) or 'none is there'}"
            )
        self._weighted = any(entry is not None and entry.weighted for entry in entries)
        self._rows, self.notes = rows, notes
        for note in notes:
            log.info("%s: %s", self.name, note)

    def _checked(self) -> ShardRows:
        self.check()
        assert self._rows is not None
        return self._rows

    def __len__(self) -> int:
        return len(self._checked())

    def ids(self) -> Sequence[str]:
        """Names of the examples: as they were packed, or else `SHARD/KEY`."""
        rows = self._checked()
        return Names(len(rows), rows.id_of, rows.ids)

    def blocks(self) -> Int[np.ndarray, " b"]:
        """Where each shard begins, and the end; shards of which nothing is used are left out. Of shards on
        this machine up to a million examples are one part: access to them is random, as to LMDB's.
        """
        rows = self._checked()
        if len(rows) <= WHOLE and not any(map(is_remote, rows.indexes.shards)):
            return np.array([0, len(rows)])
        return np.unique(rows.starts)

    def sizes(self, start: int = 0, stop: int | None = None) -> Int[np.ndarray, "n 2"]:
        """Upright (height, width) of the examples from `start` to before `stop`."""
        parts = [index.sizes[rows] for index, rows in self._checked().parts(start, stop)]
        return np.concatenate(parts) if parts else np.zeros((0, 2), np.int32)

    def draw_weights(self, start: int = 0, stop: int | None = None) -> Float[np.ndarray, " n"] | None:
        """How often each turn draws each example, where this project packed them with weights."""
        rows = self._checked()
        if not self._weighted:
            return None
        parts = [index.weights[some] for index, some in rows.parts(start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def record(self, index: int) -> Record:
        """An example as it is stored.

        Raises:
            OSError: it can't be read any more; the message names its shard.
        """
        rows = self._checked()
        found = rows.find(index)
        files = rows.read(found, ROLES)
        with self._naming(found):
            content = parse_json(files["json"]) if "json" in files else None
            captions = stored_captions(files.get("text"), content, self.reading.caption_key)
            weight = weight_of(content)
        return Record(
            id=rows.id(found),
            image=files["image"],
            suffix=found.suffix,
            captions=self.policy.captions(captions),
            mask=files.get("mask"),
            control=files.get("control"),
            weight=weight,
            extra=extra_of(content),
        )

    @contextmanager
    def _naming(self, found: ShardRow) -> Iterator[None]:
        """Makes an OSError that names the example of what is wrong in its texts."""
        try:
            yield
        except (ValueError, TypeError, KeyError) as error:
            rows = self._checked()
            raise OSError(f"{rows.labels[found.shard]}: {rows.id(found)}: {error}") from error

    def digest(self, index: int) -> bytes:
        """16 bytes that tell this example's pixels apart; what this project packed knows them."""
        rows = self._checked()
        found = rows.find(index)
        if found.span("json") is None or not found.packed_id:
            return super().digest(index)
        content = rows.read(found, ("json",))["json"]
        with self._naming(found):
            digest = parse_json(content).get("digest")
            if not isinstance(digest, str):
                raise ValueError(f"its digest is no hex string, but {digest!r}")
            return bytes.fromhex(digest)

    def stamp(self, index: int) -> str | None:
        """Shard, its size and time, and the place in it; None of what this project packed, which knows its
        digests, and may be copied.
        """
        rows = self._checked()
        found = rows.find(index)
        entry, span = found.details.entry, found.span("image")
        if entry.mtime_ns is None or span is None:
            return None
        return f"{rows.indexes.shards[found.shard]} {entry.filesize} {entry.mtime_ns} {span.start}"

    def captions(self) -> list[str]:
        """The captions of all examples; of very many, the first 10,000."""
        every = (caption.text for index in range(len(self)) for caption in self.captions_of(index))
        return list(islice(every, CAPTIONS_TOLD))

    def captions_of(self, index: int) -> tuple[Caption, ...]:
        """An example's captions, where its pixels aren't needed."""
        if self.policy.one_for_all:
            return self.policy.captions(())
        rows = self._checked()
        found = rows.find(index)
        files = rows.read(found, ("text", "json"))
        with self._naming(found):
            content = parse_json(files["json"]) if "json" in files else None
            stored = stored_captions(files.get("text"), content, self.reading.caption_key)
        return self.policy.captions(stored)

    def identity(self) -> str:
        """Tells whether it holds the same examples in the same order as when training began."""
        rows = self._checked()
        counted = "captioned" if rows.captioned else "samples"
        digest = hashlib.sha256(repr((counted, self.reading.caption_key)).encode())
        for label, entry in zip(rows.labels, rows.entries, strict=True):
            if entry is not None and (count := rows.used(entry)):
                digest.update(f"{label}\0{count}\0{entry.names}\0".encode())
        return digest.hexdigest()[:16]

    def counts_file(self, key: str) -> Path | None:
        """Beside the indexes, where there are many shards: each index would have to be read to count."""
        rows = self._checked()
        if len(self.blocks()) <= 2:
            return None
        depends = hashlib.sha256(key.encode())
        for entry in rows.entries:
            if entry is not None:
                depends.update(repr((entry.names, entry.filesize, entry.mtime_ns)).encode())
        folder = rows.indexes.folders[0].folder
        return folder / f"counts-{depends.hexdigest()[:16]}.npz" if os.access(folder, os.W_OK) else None
