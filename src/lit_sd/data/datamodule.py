"""The DataModule, and `folder`, which makes it from what `data` holds in the configs."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L

from lit_sd.data.batching import MixedBatchSampler, OrderedBatchSampler, Part, Source, held_out, share_batch
from lit_sd.data.buckets import make_buckets, sort_into_buckets
from lit_sd.data.class_images import PriorRequest, PriorSource, class_images_of, refuse_shared_folders
from lit_sd.data.examples import Examples, ResumableLoader, load_batches
from lit_sd.data.folder import BadFiles, FolderSource, MissingCaptions
from lit_sd.data.position import Position, ranks_of

log = logging.getLogger(__name__)


class SDDataModule(L.LightningDataModule):
    """Batches (`lit_sd.types.Batch`) from named sources, the same ones after a resume in mid-epoch as without
    it.

    The trainer needs `use_distributed_sampler=False`: the batch sampler knows its rank.

    Attributes:
        before_setup: called on every rank when a fit is set up, before folders are read and once processes
            can talk to each other. It is where class images can be made; see `prior_requests`.
    """

    before_setup: Callable[[], None] | None = None

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        batch_size: int,
        resolution: int | None,
        flip: bool | int | float,
        num_workers: int,
        cache_mb: int | float,
        seed: int,
        val: Source | None = None,
        val_share: int | float = 0.0,
        shares: Mapping[str, int | float] | None = None,
        buckets: bool = False,
        bucket_step: int = 0,
        bucket_max_ratio: int | float = 0.0,
        center_crop: bool = False,
        prior_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """What has no default here has it in conf/data; what has one is off by default.

        Args:
            sources: training images by name; the first one decides the shapes of buckets and is what
                `val_share` is taken of.
            batch_size: images of a batch, from all sources together, on each rank.
            resolution: side of the square images, a multiple of 8. `lit_sd.run` puts the model's own size in
                None's place.
            flip: mirror images with this probability; True is one half.
            num_workers: processes that load images; 0 loads in this one.
            cache_mb: memory for scaled images in each of them.
            seed: of the order, the crops and the flips.
            val: images to validate on.
            val_share: share of the first source's images to validate on instead, chosen by `seed` and by
                their names.
            shares: each source's share of a batch; None gives them equal parts.
            buckets: give each batch the aspect ratio of its images.
            bucket_step: sides of buckets are multiples of it.
            bucket_max_ratio: the longest shape, as longer side over shorter.
            center_crop: take the middle, not a random part.
            prior_sampling: how class images are drawn (steps, guidance, …), for whoever draws them.

        Raises:
            ValueError: an option is out of its range.
        """
        super().__init__()
        if resolution is None:
            raise ValueError(
                "data.resolution is not set; `lit_sd.run` fills in the model's own, elsewhere give a value"
            )
        self.sources, self.val, self.val_share, self.shares = dict(sources), val, val_share, shares
        self.batch_size, self.resolution, self.num_workers = batch_size, resolution, num_workers
        self.flip, self.center_crop = 0.5 if flip is True else float(flip), center_crop
        self.cache_mb, self.seed, self.prior_sampling = cache_mb, seed, dict(prior_sampling or {})
        self._check_options()
        self.shapes = (
            make_buckets(resolution, bucket_step, bucket_max_ratio) if buckets else [(resolution, resolution)]
        )
        self.quotas = share_batch(batch_size, {name: (shares or {}).get(name, 1.0) for name in sources})
        self._resume: dict[str, Any] | None = None
        self._position: Position | None = None

    def _check_options(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; expected one source or more")
        if self.batch_size < 1 or self.num_workers < 0 or self.seed < 0:
            raise ValueError(
                "expected data.batch_size of 1 or more, data.num_workers and seed of 0 or more; "
                f"got {self.batch_size}, {self.num_workers} and {self.seed}"
            )
        if self.resolution < 8 or self.resolution % 8:
            raise ValueError(f"data.resolution={self.resolution}: expected a multiple of 8, the VAE's factor")
        if not 0 <= self.val_share < 1 or (self.val_share and self.val is not None):
            raise ValueError(
                f"data.val_share={self.val_share}: expected 0 or more and less than 1, and 0 with "
                "data.val_root"
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"data.flip={self.flip}: expected true, false or a probability")
        if self.shares is not None and set(self.shares) != set(self.sources):
            raise ValueError(
                f"data.shares names {sorted(self.shares)}, the sources are {sorted(self.sources)}"
            )
        refuse_shared_folders(self.prior_requests())

    def prior_requests(self) -> list[PriorRequest]:
        """Class images that have to be there before training, for each prior source."""
        return [source.request for source in self.sources.values() if isinstance(source, PriorSource)]

    def check(self, world_size: int = 1) -> None:
        """Reads every folder once and does the sums of an epoch; cheap to call again. Class images may still
        be missing.

        Raises:
            ValueError: a source is empty or faulty, or not one step can be made.
            FileNotFoundError: a folder does not exist.
        """
        for source in [*self.sources.values(), *([self.val] if self.val is not None else [])]:
            if not isinstance(source, PriorSource) or source.ready:
                source.check()
        self.batch_sampler(0, world_size)

    def report(self, world_size: int = 1) -> list[str]:
        """Lines on what an epoch is made of and what it leaves out, for the plan that is printed first."""
        lines = self.batch_sampler(0, world_size).report()
        validated = len(self.val) if self.val is not None else len(self.val_indexes())
        lines.append(f"validation: {validated} images" if validated else "validation: none")
        small = sum(min(size) < self.resolution for size in self._first().sizes())
        if small:
            lines.append(
                f"{small} images are smaller than data.resolution={self.resolution} and are scaled up"
            )
        for name, source in self.sources.items():
            lines += [f"{name}: {note}" for note in getattr(source, "notes", [])]
        return lines

    def captions(self) -> list[str]:
        """Captions of all training images, of the sources that can tell without loading images."""
        return [
            c for source in self.sources.values() if hasattr(source, "captions") for c in source.captions()
        ]

    def _first(self) -> Source:
        return next(iter(self.sources.values()))

    def val_indexes(self) -> list[int]:
        """The first source's images that are held out for validation.

        Raises:
            ValueError: nothing would be left to train on.
        """
        return held_out(self._first().ids(), self.val_share, self.seed) if self.val_share else []

    def batch_sampler(self, rank: int, world_size: int) -> MixedBatchSampler:
        """The order of training batches, for one rank.

        Raises:
            ValueError: not one step can be made.
        """
        aside = set(self.val_indexes())
        parts: list[Part] = []
        for name, source in self.sources.items():
            if parts:  # shapes are the first source's; the others' images are cropped to them
                groups = {self.shapes[0]: list(range(len(source)))}
            else:
                groups = sort_into_buckets(source.sizes(), self.shapes, aside)
            ids = () if parts else source.ids()
            parts.append(Part(name, groups, self.quotas[name], source.repeats, ids))
        return MixedBatchSampler(parts, seed=self.seed, rank=rank, world_size=world_size)

    def setup(self, stage: str | None = None) -> None:
        """Checks all sources, and says once what an epoch leaves out."""
        self._resume = self._position = None
        rank, world_size = ranks_of(self.trainer)
        if stage == "fit":
            if self.before_setup is not None:
                self.before_setup()
            for source in self.sources.values():
                if isinstance(source, PriorSource):
                    source.forget()  # `check` may have read what was made again since
                source.check()
        self.check(world_size)
        if rank == 0:
            for line in self.batch_sampler(0, world_size).report():
                if "never trained on" in line:
                    log.warning(line)

    def train_dataloader(self) -> ResumableLoader:
        """Training batches of this rank.

        Raises:
            ValueError: a checkpoint is resumed in mid-epoch on other data or another batch.
        """
        rank, world_size = ranks_of(self.trainer)
        sampler = self.batch_sampler(rank, world_size)
        trainer: Any = self.trainer
        if trainer is not None:
            then = self._resume or self.state_dict()  # of a checkpoint, or of the loader that this replaces
            self._position, self._resume = Position.of(trainer, sampler), None
            if then:
                self._position.resume(then)
            sampler.start = (lambda: (0, 0)) if trainer.overfit_batches else self._position
        examples = Examples(
            self.sources, seed=self.seed, flip=self.flip, centre=self.center_crop, cache_mb=self.cache_mb
        )
        weights = {name: source.weight for name, source in self.sources.items()}
        return load_batches(examples, sampler, weights, num_workers=self.num_workers, seed=self.seed)

    def val_dataloader(self) -> ResumableLoader | list:
        """Validation batches of this rank: centred, never flipped; none without validation images.

        Padding weighs 0, so that the weighted sum of a batch is the mean of its own images.
        """
        rank, world_size = ranks_of(self.trainer)
        source = self._first() if self.val is None else self.val
        indexes: Sequence[int] = self.val_indexes() if self.val is None else range(len(self.val))
        if not indexes:
            return []
        square = (self.resolution, self.resolution)
        sampler = OrderedBatchSampler(
            "val", indexes, square, batch_size=self.batch_size, rank=rank, world_size=world_size
        )
        examples = Examples({"val": source}, centre=True, cache_mb=self.cache_mb)
        return load_batches(examples, sampler, {"val": 1.0}, num_workers=self.num_workers, seed=self.seed)

    test_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were trained on; see `lit_sd.data.position.Position`."""
        return {} if self._position is None else self._position.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the position for the next training loader."""
        self._resume = state_dict or None


def folder(
    root: str | os.PathLike | None,
    *,
    prompt: str | None,
    caption_ext: str | None,
    caption_column: str | None,
    missing_captions: MissingCaptions,
    bad_files: BadFiles,
    max_bad_share: int | float,
    verify: bool,
    repeats: int,
    val_root: str | os.PathLike | None,
    class_root: str | os.PathLike | None = None,
    class_prompt: str | None = None,
    num_class_images: int = 0,
    prior_weight: int | float = 0.0,
    **options: Any,
) -> SDDataModule:
    """A folder of images, and DreamBooth's class images beside it where `prior_weight` isn't 0; `data` in the
    configs, whose defaults are conf/data/folder.yaml.

    Args:
        root: the folder, subfolders included.
        prompt: with what follows up to `repeats`, see `lit_sd.data.folder.FolderSource`.
        val_root: a folder to validate on, read like `root`.
        class_root: folder of the class images; None puts it beside `root`, as `<root>-prior`.
        class_prompt: with `num_class_images`, see `lit_sd.data.class_images.PriorSource`.
        prior_weight: what the mean loss of the class images counts; 0 trains without them.
        options: see `SDDataModule`.

    Raises:
        ValueError: an option is out of its range, or `root` is unset.
        FileNotFoundError: a folder does not exist.
    """
    read = partial(
        FolderSource,
        prompt=prompt,
        caption_ext=caption_ext,
        caption_column=caption_column,
        missing_captions=missing_captions,
        bad_files=bad_files,
        max_bad_share=max_bad_share,
        verify=verify,
    )
    images = read(root, repeats=repeats)
    sources: dict[str, Source] = {"images": images}
    if prior_weight:
        prior = class_images_of(images.root, class_root, class_prompt, num_class_images, prior_weight)
        sources = {"instance": images, "prior": prior}
    val = None if val_root is None else read(val_root, name="val", key="data.val_root")
    return SDDataModule(sources, val=val, **options)
