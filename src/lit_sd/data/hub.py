"""Hugging Face datasets as a source: of the hub or of a folder, whole on this machine or streamed."""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from lit_sd.data.caption_rules import Caption, CaptionRule
from lit_sd.data.folder import BadFiles
from lit_sd.data.hub_columns import Columns, datasets_library
from lit_sd.data.hub_rows import LocalRows
from lit_sd.data.hub_shards import StreamedRows
from lit_sd.data.packed.packing import Kept, MissingCaptions, Names, Policy
from lit_sd.data.source import Record, Source

log = logging.getLogger(__name__)

SHOWN_CAPTIONS = 10_000


class HubSource(Source):
    """A Hugging Face dataset with a column of images.

    It is read at random where it lies on this machine. A streamed one is cut into its own shards; an epoch
    goes through these one after the other, and each is packed into `cache_dir` when it is needed, so that
    only what is in use has to be there.
    """

    def __init__(
        self,
        root: str | os.PathLike | None,
        *,
        split: str = "train",
        config: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        image_column: str = "image",
        caption_column: str | None = "text",
        mask_column: str | None = None,
        control_column: str | None = None,
        weight_column: str | None = None,
        id_column: str | None = None,
        cache_dir: str | os.PathLike | None = None,
        cache_gb: int | float = 50,
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
            root: a dataset's name on the hub, or a folder: what `save_to_disk` wrote, or files that
                `load_dataset` knows, as Parquet.
            split: the split to read.
            config: the dataset's configuration, where it has several.
            revision: branch, tag or commit on the hub.
            streaming: read its shards as they are needed; else all of it is fetched first.
            image_column: column of encoded images.
            caption_column: column of texts, or of lists of texts; None needs `prompt`.
            mask_column: column of mask images.
            control_column: column of control images.
            weight_column: column of numbers: how often a turn draws the example.
            id_column: column of names; None numbers the examples.
            cache_dir: keeps what was learnt, and the shards of a streamed dataset; None keeps these in the
                folder of Hugging Face's own cache, and nothing else.
            cache_gb: GB that all shards in `cache_dir` may take.
            name: what messages call this source.
            key: config key of `root`, for messages.
            prompt: one caption for all images.
            weight: what this source's mean loss counts.
            repeats: how often an epoch draws each image.
            rule: how a draw's caption comes of the stored ones.
            alpha_mask: an image's transparency is its mask, where it has no other.
            bad_files: what to do about images that can't be read.
            max_bad_share: with `bad_files="skip"`, the share of bad images beyond which it is an error after
                all.
            missing_captions: what to do about single images without caption. That none has one is always an
                error.
            verify: decode each image once at set-up; else its header is enough.

        Raises:
            ValueError: an option is out of its range, or `root` is unset.
        """
        super().__init__(name, weight=weight, repeats=repeats, rule=rule, alpha_mask=alpha_mask)
        if root is None or not os.fspath(root).strip():
            raise ValueError(f"{key} is not set; set {key}=OWNER/NAME, or a folder with a dataset")
        if not cache_gb > 0:
            raise ValueError(f"data.cache_gb={cache_gb}: expected more than 0")
        if caption_column is None and prompt is None:
            raise ValueError("data.caption_column is not set; set it, or data.prompt")
        folder = Path(root).expanduser()
        self.root, self.key = str(folder.absolute()) if folder.exists() else os.fspath(root), key
        self.split, self.config, self.revision, self.streaming = split, config, revision, streaming
        self.columns = Columns(
            image_column, caption_column, mask_column, control_column, weight_column, id_column
        )
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser().absolute()
        self.cache_gb, self.verify = cache_gb, verify
        missing = "error" if caption_column is None else missing_captions  # then the prompt serves all
        self.policy = Policy(prompt, missing, bad_files, max_bad_share)
        self._rows: LocalRows | StreamedRows | None = None
        self._kept = Kept(0)
        self._sizes: Int[np.ndarray, "n 2"] = np.empty((0, 2), np.int32)
        self._weights: Float[np.ndarray, " n"] | None = None
        self._content = ""

    def check(self) -> None:
        """Opens the dataset and learns its images' sizes; later calls do nothing. `notes` then says what was
        found.

        Raises:
            ValueError: it is empty, a column is not there or holds something else, or images can't be read
                or have no caption, as the policies have it.
            OSError: it can't be found or fetched.
            ModuleNotFoundError: `datasets` isn't installed.
        """
        if self._rows is not None:
            return
        rows = self._open()
        facts = rows.learn()
        if not len(facts):
            raise ValueError(f"{self.key}={self.root}: split {self.split} holds no images")
        blank = np.setdiff1d(np.flatnonzero(facts.captions == 0), np.fromiter(facts.faults, np.int64))
        notes = self.policy.judge(
            self.root,
            len(facts),
            [f"{rows.name(row)} ({why})" for row, why in facts.faults.items()],
            Names(len(blank), lambda i: rows.name(int(blank[i]))),
        )
        self._kept = Kept(len(facts), [*facts.faults, *(blank.tolist() if self.policy.skips_blank else ())])
        if not len(self._kept):
            raise ValueError(f"{self.root}: no image is left: {'; '.join(notes)}")
        self._sizes, self._content, self.notes = facts.sizes, facts.identity(), notes
        self._weights = None if (facts.weights == 1).all() else facts.weights
        self._rows = rows
        for note in notes:
            log.info("%s: %s", self.name, note)

    def _open(self) -> LocalRows | StreamedRows:
        datasets = datasets_library()
        builder = None
        try:
            if any((Path(self.root) / name).is_file() for name in ("state.json", "dataset_dict.json")):
                dataset = _of_split(datasets.load_from_disk(self.root), self.split)
            elif self.streaming:
                builder = datasets.load_dataset_builder(self.root, name=self.config, revision=self.revision)
                dataset = builder.as_streaming_dataset(split=self.split)
            else:
                dataset = datasets.load_dataset(
                    self.root, name=self.config, revision=self.revision, split=self.split
                )
        except ModuleNotFoundError:
            raise
        except Exception as error:  # whatever the network's library raises
            raise self._refusal(error) from error
        columns = self._columns_of(dataset)
        if builder is None:
            return self._local(dataset, columns)
        return self._streamed(dataset, columns, builder)

    def _refusal(self, error: Exception) -> Exception:
        kind = ValueError if isinstance(error, ValueError) else OSError
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else kind
        why = " ".join(str(error).split()) or type(error).__name__
        return kind(
            f"{self.key}={self.root}, split {self.split}: no dataset can be opened: {why}; expected the name "
            "of one on the Hugging Face hub, which needs the network, or a folder with one"
        )

    def _columns_of(self, dataset: Any) -> Columns:
        where = f"{self.key}={self.root}"
        if dataset.features is None:
            raise ValueError(f"{where} doesn't say what its columns hold; set data.streaming=false")
        columns = self.columns
        if self.policy.one_for_all and columns.caption not in dataset.features:
            columns = replace(columns, caption=None)
        columns.check(where, dataset.features)
        return columns

    def _local(self, dataset: Any, columns: Columns) -> LocalRows:
        facts = None
        if self.cache_dir is not None:
            key = _short_hash([dataset._fingerprint, columns.used(), self.verify])
            facts = self.cache_dir / f"facts-{key}.npz"
        return LocalRows(dataset, columns, self.verify, facts)

    def _streamed(self, stream: Any, columns: Columns, builder: Any) -> StreamedRows:
        files = (builder.config.data_files or {}).get(self.split.split("+")[0], ())
        facts = [list(files), getattr(files, "origin_metadata", None), self.split, columns.used()]
        place = self.cache_dir or Path(datasets_library().config.HF_CACHE_HOME) / "lit-sd"
        folder = place / f"{builder.dataset_name}-{_short_hash([builder.hash, builder.config_id, *facts])}"
        return StreamedRows(stream, columns, self.verify, folder, int(self.cache_gb * 10**9))

    def _checked(self) -> LocalRows | StreamedRows:
        self.check()
        assert self._rows is not None
        return self._rows

    def __len__(self) -> int:
        self.check()
        return len(self._kept)

    def ids(self) -> Sequence[str]:
        """Name of each example, or its number; looked up when it is asked for."""
        rows = self._checked()
        return Names(len(self), lambda index: rows.name(self._kept.position(index)))

    def sizes(self, start: int = 0, stop: int | None = None) -> Int[np.ndarray, "n 2"]:
        """Upright (height, width) of the examples from `start` to before `stop`."""
        self.check()
        return self._kept.select(start, stop, lambda first, last: self._sizes[first:last])

    def draw_weights(self, start: int = 0, stop: int | None = None) -> Float[np.ndarray, " n"] | None:
        """How often each turn through the source draws each example; None is once each."""
        self.check()
        if self._weights is None:
            return None
        weights = self._weights
        return self._kept.select(start, stop, lambda first, last: weights[first:last])

    def record(self, index: int) -> Record:
        """An example as it is stored.

        Raises:
            OSError: it can't be read any more; the message names it.
        """
        position = self._position(index)
        try:
            record = self._checked().record(position)
        except OSError as error:
            raise OSError(f"{self.name}: {self._checked().name(position)}: {error}") from error
        return replace(record, captions=self.policy.captions(record.captions))

    def _position(self, index: int) -> int:
        self.check()
        return self._kept.position(index)

    def blocks(self) -> Int[np.ndarray, " b"]:
        """Where the shards of a streamed dataset start, and the end; one block where access is random."""
        starts = self._checked().starts
        return np.unique(self._kept.index(starts))

    def captions(self) -> list[str]:
        """The captions of all examples; of very many, the first 10,000, and of a streamed dataset's first
        shard.
        """
        rows = self._checked()
        end = int(self.blocks()[1])
        stored = (rows.captions(self._kept.position(index)) for index in range(end))
        every = (caption.text for own in stored for caption in self.policy.captions(own))
        return list(islice(every, SHOWN_CAPTIONS))

    def captions_of(self, index: int) -> tuple[Caption, ...]:
        """An example's captions, where its pixels aren't needed."""
        return self.policy.captions(self._checked().captions(self._position(index)))

    def identity(self) -> str:
        """Tells whether it holds the same images in the same order, streamed or not: by their sizes, in
        pixels and in bytes.
        """
        self.check()
        return _short_hash([self._content, self._kept.skipped.tolist()])

    def digest(self, index: int) -> bytes:
        """16 bytes that tell this example's pixels apart; known beforehand of streamed ones."""
        return self._checked().digest(self._position(index))

    def stamp(self, index: int) -> str | None:
        """The dataset's fingerprint and the row, where it is on this machine and holds its images itself."""
        return self._checked().stamp(self._position(index))


def _of_split(dataset: Any, split: str) -> Any:
    """The split of what `load_from_disk` gave, which may be one alone."""
    if not isinstance(dataset, dict):
        return dataset
    if split not in dataset:
        raise ValueError(f"there is no split {split}; there is {', '.join(dataset)}")
    return dataset[split]


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str, sort_keys=True).encode()).hexdigest()[:16]
