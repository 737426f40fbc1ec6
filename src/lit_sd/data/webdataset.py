"""Tar shards in webdataset's layout as a source of training examples, on disk or in object stores.

Each shard is indexed once; an example is then read by its place in the file. So the order of examples is the
sampler's alone, no rank or worker owns a shard, and a resumed run reads nothing of what went before.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from lit_sd.data.caption_rules import Caption, CaptionRule
from lit_sd.data.folder import BadFiles
from lit_sd.data.packed.packing import MissingCaptions, Names, Policy
from lit_sd.data.shards.files import Recent, ShardFiles
from lit_sd.data.shards.index import Entry, ShardIndex
from lit_sd.data.shards.members import ROLES, Reading, name_of
from lit_sd.data.shards.remote import FetchedFiles, is_remote
from lit_sd.data.shards.report import Shard, judge
from lit_sd.data.shards.roots import Root, list_shards, shard_labels
from lit_sd.data.shards.store import ShardIndexes
from lit_sd.data.shards.texts import captions_of as stored_captions
from lit_sd.data.shards.texts import extra_of, parse_json, weight_of
from lit_sd.data.shards.writer import ShardWriter
from lit_sd.data.source import Record, Source

__all__ = ["ShardSource", "ShardWriter"]

log = logging.getLogger(__name__)

INDEXES_KEPT = 64
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
        self._counted = "captioned" if self.policy.skips_blank else "samples"
        self._checked = False
        self._recent: Recent[int, ShardIndex] = Recent(INDEXES_KEPT)

    def check(self) -> None:
        """Finds the shards and indexes those that are new; later calls do nothing. `notes` then says what
        was found.

        Raises:
            ValueError: no shards, or something bad in them, as the policies have it; all of it is named.
            FileNotFoundError: a folder or pattern finds nothing.
            OSError: a remote shard can't be fetched.
        """
        if self._checked:
            return
        shards = list_shards(self.root, key=self.key, options=self.options)
        if self._files.fetched is None and (remote := [shard for shard in shards if is_remote(shard)]):
            raise ValueError(
                f"{self.key} names {len(remote)} remote shards like {remote[0]}; set "
                "data.cache_dir=FOLDER to where they are kept on this machine"
            )
        self._indexes = ShardIndexes(
            shards, self._files, self.reading, cache_dir=self.cache_dir, options=self.options
        )
        self._labels = shard_labels(shards)
        self._entries = self._indexes.entries(f"{self.name}: indexing shards")
        there = [
            Shard(
                self._labels[number], entry, partial(self._indexes.load, number), partial(self._name, number)
            )
            for number, entry in enumerate(self._entries)
            if entry is not None
        ]
        absent = [label for label, e in zip(self._labels, self._entries, strict=True) if e is None]
        notes = judge(f"{self.key}={self.root}", there, absent, self.policy)
        counts = [0 if entry is None else self._used(entry) for entry in self._entries]
        self._starts = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))])
        if not self._starts[-1]:
            raise ValueError(
                f"{self.key}={self.root}: no image is left: {'; '.join(notes) or 'none is there'}"
            )
        self._weighted = any(entry is not None and entry.weighted for entry in self._entries)
        self._checked, self.notes = True, notes
        for note in notes:
            log.info("%s: %s", self.name, note)

    def _used(self, entry: Entry) -> int:
        """How many of a shard's examples count."""
        return getattr(entry, self._counted)

    def __len__(self) -> int:
        self.check()
        return int(self._starts[-1])

    def ids(self) -> Sequence[str]:
        """Names of the examples: as they were packed, or else `SHARD/KEY`."""
        self.check()
        return Names(len(self), self._id, self._ids)

    def blocks(self) -> Int[np.ndarray, " b"]:
        """Where each shard begins, and the end; shards of which nothing is used are left out. Of shards on
        this machine up to a million examples are one part: access to them is random, as to LMDB's.
        """
        self.check()
        if len(self) <= WHOLE and not any(map(is_remote, self._indexes.shards)):
            return np.array([0, len(self)])
        return np.unique(self._starts)

    def sizes(self, start: int = 0, stop: int | None = None) -> Int[np.ndarray, "n 2"]:
        """Upright (height, width) of the examples from `start` to before `stop`."""
        parts = [index.sizes[rows] for index, rows in self._parts(start, stop)]
        return np.concatenate(parts) if parts else np.zeros((0, 2), np.int32)

    def draw_weights(self, start: int = 0, stop: int | None = None) -> Float[np.ndarray, " n"] | None:
        """How often each turn draws each example, where this project packed them with weights."""
        self.check()
        if not self._weighted:
            return None
        parts = [index.weights[rows] for index, rows in self._parts(start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def record(self, index: int) -> Record:
        """An example as it is stored.

        Raises:
            OSError: it can't be read any more; the message names its shard.
        """
        shard, details, row = self._find(index)
        files = self._read(shard, details, row, ROLES)
        ident = self._name(shard, details, row)
        try:
            content = parse_json(files["json"]) if "json" in files else None
            captions = stored_captions(files.get("text"), content, self.reading.caption_key)
            weight = weight_of(content)
        except ValueError as error:
            raise OSError(f"{self._labels[shard]}: {ident}: {error}") from error
        return Record(
            id=ident,
            image=files["image"],
            suffix=name_of(details.names[row])[1],
            captions=self.policy.captions(captions),
            mask=files.get("mask"),
            control=files.get("control"),
            weight=weight,
            extra=extra_of(content),
        )

    def digest(self, index: int) -> bytes:
        """16 bytes that tell this example's pixels apart; what this project packed knows them."""
        shard, details, row = self._find(index)
        if details.span(row, "json") is not None and details.ids[row]:
            try:
                return bytes.fromhex(parse_json(self._read(shard, details, row, ("json",))["json"])["digest"])
            except (ValueError, TypeError, KeyError) as error:
                raise OSError(
                    f"{self._labels[shard]}: {details.ids[row]}: its digest is no hex string"
                ) from error
        return super().digest(index)

    def captions(self) -> list[str]:
        """The captions of all examples; of very many, the first 10,000."""
        every = (caption.text for index in range(len(self)) for caption in self.captions_of(index))
        return list(islice(every, CAPTIONS_TOLD))

    def captions_of(self, index: int) -> tuple[Caption, ...]:
        """An example's captions, where its pixels aren't needed."""
        if self.policy.one_for_all:
            return self.policy.captions(())
        shard, details, row = self._find(index)
        files = self._read(shard, details, row, ("text", "json"))
        content = parse_json(files["json"]) if "json" in files else None
        return self.policy.captions(stored_captions(files.get("text"), content, self.reading.caption_key))

    def identity(self) -> str:
        """Tells whether it holds the same examples in the same order as when training began."""
        self.check()
        digest = hashlib.sha256(repr((self._counted, self.reading.caption_key)).encode())
        for label, entry in zip(self._labels, self._entries, strict=True):
            if entry is not None and (count := self._used(entry)):
                digest.update(f"{label}\0{count}\0{entry.names}\0".encode())
        return digest.hexdigest()[:16]

    def counts_file(self, key: str) -> Path | None:
        """Beside the indexes, where there are many shards: each index would have to be read to count."""
        if len(self.blocks()) <= 2:
            return None
        depends = hashlib.sha256(key.encode())
        for entry in self._entries:
            if entry is not None:
                depends.update(repr((entry.names, entry.filesize, entry.mtime_ns)).encode())
        folder = self._indexes.folders[0].folder
        return folder / f"counts-{depends.hexdigest()[:16]}.npz" if os.access(folder, os.W_OK) else None

    def _details(self, shard: int) -> ShardIndex:
        entry = self._entries[shard]
        index = self._indexes.load(shard)
        if entry is None or index.entry.names != entry.names:
            raise OSError(f"{self._indexes.shards[shard]}: its index changed while it was in use; start anew")
        if self._used(entry) < entry.samples:
            return index.take(np.flatnonzero(index.captioned))
        return index

    def _find(self, index: int) -> tuple[int, ShardIndex, int]:
        """Number of an example's shard, the shard's index, and the example's row there."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} examples, asked for number {index}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, self._recent.get(shard, self._details), index - int(self._starts[shard])

    def _parts(self, start: int, stop: int | None) -> Iterator[tuple[ShardIndex, slice]]:
        """The shards of a range of examples, and the rows of each."""
        start, stop, _ = slice(start, stop).indices(len(self))
        while start < stop:
            shard, details, row = self._find(start)
            count = min(stop - start, int(self._starts[shard + 1]) - start)
            yield details, slice(row, row + count)
            start += count

    def _read(self, shard: int, details: ShardIndex, row: int, roles: Sequence[str]) -> dict[str, bytes]:
        spans = {role: span for role in roles if (span := details.span(row, role)) is not None}
        if not spans:
            return {}
        key = name_of(details.names[row])[0]
        return self._files.read(self._indexes.shards[shard], key, spans, details.entry.filesize)

    def _name(self, shard: int, details: ShardIndex, row: int) -> str:
        """Id of an example."""
        key = name_of(details.names[row])[0].removeprefix("./")
        return details.ids[row] or f"{self._labels[shard]}/{key}"

    def _id(self, index: int) -> str:
        return self._name(*self._find(index))

    def _ids(self) -> Iterator[str]:
        for shard, count in enumerate(np.diff(self._starts).tolist()):
            if count:
                details = self._recent.get(shard, self._details)
                yield from (self._name(shard, details, row) for row in range(count))
