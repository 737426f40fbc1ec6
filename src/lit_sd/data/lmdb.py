"""Packed datasets as a source: one LMDB file with a manifest beside it, read at random."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from rich.progress import track

from lit_sd.data.caption_rules import Caption, CaptionRule
from lit_sd.data.folder import BadFiles
from lit_sd.data.packed.lmdb_file import LmdbFile, opened, read_manifest
from lit_sd.data.packed.lmdb_writer import LmdbWriter
from lit_sd.data.packed.packing import Kept, MissingCaptions, Names, Policy, measure
from lit_sd.data.source import Record, Source

__all__ = ["LmdbSource", "LmdbWriter"]

log = logging.getLogger(__name__)

BLOCK = 1_000_000
"""Examples that are shuffled as one; of more, parts of `PART` are."""
PART = 2**15
STEP = 1024
SHOWN_CAPTIONS = 10_000


class LmdbSource(Source):
    """A folder that `LmdbWriter` has written.

    The file is opened in each process when it is first needed there, so the source may be forked and pickled
    at any time.
    """

    def __init__(
        self,
        root: str | os.PathLike | None,
        *,
        name: str = "images",
        key: str = "data.root",
        prompt: str | None = None,
        weight: int | float = 1.0,
        repeats: int = 1,
        rule: CaptionRule | None = None,
        alpha_mask: bool = False,
        bad_files: BadFiles = "error",
        max_bad_share: int | float = 0.5,
        missing_captions: MissingCaptions = "error",
        verify: bool = False,
    ) -> None:
        """
        Args:
            root: the folder.
            name: what messages call this source.
            key: config key of `root`, for messages.
            prompt: one caption for all images.
            weight: what this source's mean loss counts.
            repeats: how often an epoch draws each image.
            rule: how a draw's caption comes of the stored ones.
            alpha_mask: an image's transparency is its mask, where it has no other.
            bad_files: what to do about images that can't be read, where `verify` finds them.
            max_bad_share: with `bad_files="skip"`, the share of bad images beyond which it is an error after
                all.
            missing_captions: what to do about single images without caption. That none has one is always an
                error.
            verify: decode each image once at set-up; what packed them has done so already.

        Raises:
            ValueError: an option is out of its range, or `root` is unset.
            FileNotFoundError: there is no such folder, or its packing didn't end.
        """
        super().__init__(name, weight=weight, repeats=repeats, rule=rule, alpha_mask=alpha_mask)
        if root is None or not os.fspath(root).strip():
            raise ValueError(f"{key} is not set; set {key}=FOLDER to a packed dataset")
        self.root, self.key, self.verify = Path(root).expanduser().absolute(), key, verify
        self.policy = Policy(prompt, missing_captions, bad_files, max_bad_share)
        if not self.root.is_dir():
            self._manifest_of_root()
        self._manifest: dict[str, Any] | None = None
        self._kept = Kept(0)
        self._file: LmdbFile | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def _manifest_of_root(self) -> dict[str, Any]:
        try:
            return read_manifest(self.root)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"{self.key}: {error}") from error

    @property
    def _rows(self) -> LmdbFile:
        if self._file is None:
            self._file = opened(self.root)
        return self._file

    def check(self) -> None:
        """Reads the manifest; later calls do nothing. `notes` then says what was found.

        Raises:
            ValueError: it is half-written, damaged or empty; or with images that can't be read or have no
                caption, as the policies have it.
            FileNotFoundError: nothing is there.
            ModuleNotFoundError: LMDB isn't installed.
        """
        if self._manifest is not None:
            return
        manifest = self._manifest_of_root()
        total = manifest["count"]
        if len(self._rows) != total:
            raise ValueError(
                f"{self.root}: the manifest says {total} examples, the file holds {len(self._rows)}; delete "
                "the folder and pack the dataset again"
            )
        if not total:
            raise ValueError(f"{self.key}={self.root} holds no images")
        bad = self._find_bad(total) if self.verify else {}
        blank = self._find_blank(total, bad) if manifest["uncaptioned"] else np.empty(0, np.int64)
        notes = self.policy.judge(
            str(self.root),
            total,
            [f"{self._stored_name(row)} ({why})" for row, why in bad.items()],
            Names(len(blank), lambda i: self._stored_name(int(blank[i]))),
        )
        self._kept = Kept(total, [*bad, *(blank.tolist() if self.policy.skips_blank else ())])
        if not len(self._kept):
            raise ValueError(f"{self.root}: no image is left: {'; '.join(notes)}")
        self._manifest, self.notes = manifest, notes
        for note in notes:
            log.info("%s: %s", self.name, note)

    def _find_bad(self, total: int) -> dict[int, str]:
        """What is wrong with the images that can't be decoded, by row."""

        def fault(row: int) -> str | None:
            try:
                record = self._rows.record(row)
                measure(record.image, whole=True)
                if record.digest.hex() != self._rows.header(row)["digest"]:
                    return "its bytes are not those that were packed"
            except OSError as error:
                return str(error)
            return None

        bad: dict[int, str] = {}
        with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as threads:
            for start in track(range(0, total, STEP), f"checking {self.root.name}", disable=total <= STEP):
                rows = range(start, min(total, start + STEP))
                faults = zip(rows, threads.map(fault, rows), strict=True)
                bad |= {row: why for row, why in faults if why is not None}
        return bad

    def _find_blank(self, total: int, bad: dict[int, str]) -> Int[np.ndarray, " n"]:
        """Rows without caption, but for the bad ones."""
        blocks = range(0, total, BLOCK)
        counts = (self._rows.caption_counts(start, min(total, start + BLOCK)) for start in blocks)
        found = [start + np.flatnonzero(count == 0) for start, count in zip(blocks, counts, strict=True)]
        return np.setdiff1d(np.concatenate(found), np.fromiter(bad, np.int64))

    def _stored_name(self, row: int) -> str:
        try:
            return self._rows.header(row)["id"]
        except OSError:
            return f"example {row}"

    def _checked(self) -> dict[str, Any]:
        self.check()
        assert self._manifest is not None
        return self._manifest

    def _position(self, index: int) -> int:
        self.check()
        return self._kept.position(index)

    def __len__(self) -> int:
        self.check()
        return len(self._kept)

    def ids(self) -> Sequence[str]:
        """Name of each example; looked up when it is asked for."""
        return Names(len(self), self._name, self._names)

    def _name(self, index: int) -> str:
        return self._rows.header(self._position(index))["id"]

    def _names(self) -> Iterator[str]:
        skipped = set(self._kept.skipped.tolist())
        names = self._rows.names(self._kept.total)
        return (name for row, name in enumerate(names) if row not in skipped)

    def sizes(self, start: int = 0, stop: int | None = None) -> Int[np.ndarray, "n 2"]:
        """Upright (height, width) of the examples from `start` to before `stop`."""
        self.check()
        return self._kept.select(start, stop, self._rows.sizes)

    def draw_weights(self, start: int = 0, stop: int | None = None) -> Float[np.ndarray, " n"] | None:
        """How often each turn through the source draws each example; None is once each."""
        if not self._checked()["weighted"]:
            return None
        return self._kept.select(start, stop, self._rows.weights)

    def record(self, index: int) -> Record:
        """An example as it is stored.

        Raises:
            OSError: it can't be read any more; the message names it.
        """
        record = self._rows.record(self._position(index))
        return replace(record, captions=self.policy.captions(record.captions))

    def blocks(self) -> Int[np.ndarray, " b"]:
        """One block up to `BLOCK` examples; more are shuffled by parts, so that the plan of an epoch stays
        small.
        """
        part = BLOCK if len(self) <= BLOCK else PART
        return np.append(np.arange(0, len(self), part), len(self))

    def captions(self) -> list[str]:
        """The captions of all examples; of very many, the first 10,000."""
        every = (caption.text for i in range(len(self)) for caption in self.captions_of(i))
        return list(islice(every, SHOWN_CAPTIONS))

    def captions_of(self, index: int) -> tuple[Caption, ...]:
        """An example's captions, where its pixels aren't needed."""
        return self.policy.captions(self._rows.captions(self._position(index)))

    def identity(self) -> str:
        """Tells whether it holds the same examples in the same order: of the manifest."""
        digest = hashlib.sha256(self._checked()["identity"].encode())
        digest.update(self._kept.skipped.tobytes())
        return digest.hexdigest()[:16]

    def digest(self, index: int) -> bytes:
        """16 bytes that tell this example's pixels apart, without reading them."""
        return bytes.fromhex(self._rows.header(self._position(index))["digest"])
