"""The DataModule, and `folder`, which makes it from what `data` holds in the configs."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from lit_sd.data.batching import (
    MixedBatchSampler,
    OrderedBatchSampler,
    Part,
    Position,
    Source,
    held_out,
    share_batch,
)
from lit_sd.data.buckets import make_buckets, sort_into_buckets
from lit_sd.data.examples import Examples, collate
from lit_sd.data.folder import BadFiles, FolderSource, MissingCaptions, PriorRequest, PriorSource

log = logging.getLogger(__name__)


class ResumableLoader(DataLoader):
    """A loader whose position the DataModule keeps; this tells Lightning that it can resume."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: see `SDDataModule.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do: see `SDDataModule.load_state_dict`."""


class SDDataModule(L.LightningDataModule):
    """Batches (`lit_sd.types.Batch`) from named sources, the same ones after a resume in mid-epoch as without
    it.

    The trainer needs `use_distributed_sampler=False`: the batch sampler knows its rank.

    Attributes:
        before_setup: called on every rank when a fit is set up, before folders are read and once processes
            can talk to each other. It is where class images can be made; see `prior_request`.
        prior_sampling: how class images are to be drawn, for whoever draws them.
    """

    before_setup: Callable[[], None] | None = None
    prior_sampling: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        val: Source | None = None,
        val_share: int | float = 0.0,
        shares: Mapping[str, int | float] | None = None,
        batch_size: int = 4,
        resolution: int = 512,
        buckets: bool = False,
        bucket_step: int = 64,
        bucket_max_ratio: int | float = 2.0,
        flip: bool | int | float = False,
        center_crop: bool = False,
        num_workers: int = 2,
        cache_mb: int | float = 256,
        seed: int = 0,
    ) -> None:
        """
        Args:
            sources: training images by name; the first one decides the shapes of buckets and is what
                `val_share` is taken of.
            val: images to validate on.
            val_share: share of the first source's images to validate on instead, chosen by `seed` and by
                their names.
            shares: each source's share of a batch; None gives them equal parts.
            batch_size: images of a batch, from all sources together, on each rank.
            resolution: side of the square images, a multiple of 8.
            buckets: give each batch the aspect ratio of its images.
            bucket_step: sides of buckets are multiples of it.
            bucket_max_ratio: the longest shape, as longer side over shorter.
            flip: mirror images with this probability; True is one half.
            center_crop: take the middle, not a random part.
            num_workers: processes that load images; 0 loads in this one.
            cache_mb: memory for scaled images in each of them.
            seed: of the order, the crops and the flips.

        Raises:
            ValueError: an option is out of its range.
        """
        super().__init__()
        if not sources:
            raise ValueError("data.sources is empty; expected one source or more")
        if batch_size < 1 or num_workers < 0 or seed < 0:
            raise ValueError(
                "expected data.batch_size of 1 or more, data.num_workers and seed of 0 or more; "
                f"got {batch_size}, {num_workers} and {seed}"
            )
        if resolution < 8 or resolution % 8:
            raise ValueError(f"data.resolution={resolution}: expected a multiple of 8, the VAE's factor")
        if not 0 <= val_share < 1 or (val_share and val is not None):
            raise ValueError(
                f"data.val_share={val_share}: expected 0 or more and less than 1, and 0 with data.val_root"
            )
        if not 0 <= flip <= 1:
            raise ValueError(f"data.flip={flip}: expected true, false or a probability")
        if shares is not None and set(shares) != set(sources):
            raise ValueError(f"data.shares names {sorted(shares)}, the sources are {sorted(sources)}")
        self.sources, self.val, self.val_share, self.seed = dict(sources), val, val_share, seed
        self.batch_size, self.resolution, self.num_workers = batch_size, resolution, num_workers
        self.flip = 0.5 if flip is True else float(flip)
        self.center_crop, self.cache_mb = center_crop, cache_mb
        self.shapes = (
            make_buckets(resolution, bucket_step, bucket_max_ratio) if buckets else [(resolution, resolution)]
        )
        self.quotas = share_batch(batch_size, {name: (shares or {}).get(name, 1.0) for name in sources})
        self._resume: dict[str, Any] | None = None
        self._position: Position | None = None
        self._refuse_shared_priors()

    def _refuse_shared_priors(self) -> None:
        prompts: dict[Path, str] = {}
        for request in self.prior_requests():
            if prompts.setdefault(request.folder, request.prompt) != request.prompt:
                raise ValueError(
                    f"two class prompts share the folder {request.folder}: {prompts[request.folder]!r} and "
                    f"{request.prompt!r}; give each its own"
                )

    def prior_requests(self) -> list[PriorRequest]:
        """Class images that have to be there before training, for each prior source."""
        return [source.request for source in self.sources.values() if isinstance(source, PriorSource)]

    def prior_request(self) -> PriorRequest | None:
        """(folder, prompt, count) of the class images that have to be there before training, if any.

        Raises:
            ValueError: there are several; `prior_requests` lists them.
        """
        requests = self.prior_requests()
        if len(requests) > 1:
            raise ValueError(f"there are {len(requests)} prior sources; use prior_requests()")
        return requests[0] if requests else None

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
            elif len(self.shapes) == 1:
                groups = {self.shapes[0]: [i for i in range(len(source)) if i not in aside]}
            else:
                sorted_in = sort_into_buckets(source.sizes(), self.shapes)
                kept = {shape: [i for i in group if i not in aside] for shape, group in sorted_in.items()}
                groups = {shape: group for shape, group in kept.items() if group}
            ids = () if parts else source.ids()
            parts.append(Part(name, groups, self.quotas[name], source.repeats, ids))
        return MixedBatchSampler(parts, seed=self.seed, rank=rank, world_size=world_size)

    def setup(self, stage: str | None = None) -> None:
        """Checks all sources, and says once what an epoch leaves out."""
        self._resume = self._position = None
        if stage == "fit" and self.before_setup is not None:
            self.before_setup()
        rank, world_size = self._ranks()
        if stage == "fit":
            for source in self.sources.values():
                source.check()
        self.check(world_size)
        if rank == 0:
            for line in self.batch_sampler(0, world_size).report():
                if "never trained on" in line:
                    log.warning(line)

    def _ranks(self) -> tuple[int, int]:
        if self.trainer is None:
            return 0, 1
        places = self.trainer.distributed_sampler_kwargs or {}
        rank, world_size = places.get("rank", 0), places.get("num_replicas", 1)
        if world_size > 1 and self.trainer._accelerator_connector.use_distributed_sampler:
            raise ValueError(
                "Lightning would replace the batch sampler by its own; set "
                "trainer.use_distributed_sampler=false"
            )
        return rank, world_size

    def train_dataloader(self) -> ResumableLoader:
        """Training batches of this rank.

        Raises:
            ValueError: a checkpoint is resumed in mid-epoch on other data or another batch.
        """
        rank, world_size = self._ranks()
        sampler = self.batch_sampler(rank, world_size)
        trainer: Any = self.trainer
        if trainer is not None:
            limit, progress = trainer.limit_train_batches, trainer.fit_loop.epoch_loop.batch_progress
            steps = min(len(sampler), limit if isinstance(limit, int) else int(len(sampler) * limit))
            # of a checkpoint, or of the loader that this one replaces
            then = self._resume or self.state_dict()
            self._position, self._resume = Position(sampler, steps, lambda: progress.total.processed), None
            if then:
                self._position.resume(then)
            sampler.start = (lambda: (0, 0)) if trainer.overfit_batches else self._position
        examples = Examples(
            self.sources, seed=self.seed, flip=self.flip, centre=self.center_crop, cache_mb=self.cache_mb
        )
        weights = {name: source.weight for name, source in self.sources.items()}
        return self._loader(examples, sampler, weights)

    def val_dataloader(self) -> ResumableLoader | list:
        """Validation batches of this rank: centred, never flipped; none without validation images.

        Padding weighs 0, so that the weighted sum of a batch is the mean of its own images.
        """
        rank, world_size = self._ranks()
        source = self._first() if self.val is None else self.val
        indexes: Sequence[int] = self.val_indexes() if self.val is None else range(len(self.val))
        if not indexes:
            return []
        square = (self.resolution, self.resolution)
        sampler = OrderedBatchSampler("val", indexes, square, self.batch_size, rank, world_size)
        return self._loader(
            Examples({"val": source}, centre=True, cache_mb=self.cache_mb), sampler, {"val": 1.0}
        )

    test_dataloader = val_dataloader

    def _loader(
        self, examples: Examples, sampler: MixedBatchSampler | OrderedBatchSampler, weights: dict[str, float]
    ) -> ResumableLoader:
        own_stream = torch.Generator().manual_seed(self.seed)  # else each epoch takes from the global one
        return ResumableLoader(
            examples,
            batch_sampler=sampler,
            collate_fn=partial(collate, weights=weights),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=own_stream,
        )

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were trained on; see `lit_sd.data.batching.Position`."""
        return {} if self._position is None else self._position.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the position for the next training loader."""
        self._resume = state_dict or None


def folder(
    root: str | os.PathLike | None,
    *,
    prompt: str | None = None,
    caption_ext: str | None = None,
    caption_column: str | None = None,
    missing_captions: MissingCaptions = "error",
    bad_files: BadFiles = "error",
    max_bad_share: int | float = 0.5,
    verify: bool = True,
    repeats: int = 1,
    val_root: str | os.PathLike | None = None,
    val_share: int | float = 0.0,
    class_root: str | os.PathLike | None = None,
    class_prompt: str | None = None,
    num_class_images: int = 100,
    prior_weight: int | float = 0.0,
    prior_sampling: dict[str, Any] | None = None,
    batch_size: int = 4,
    resolution: int | None = 512,
    buckets: bool = False,
    bucket_step: int = 64,
    bucket_max_ratio: int | float = 2.0,
    flip: bool | int | float = False,
    center_crop: bool = False,
    num_workers: int = 2,
    cache_mb: int | float = 256,
    seed: int = 0,
) -> SDDataModule:
    """A folder of images, and DreamBooth's class images beside it where `prior_weight` isn't 0; `data` in the
    configs.

    Args:
        root: the folder, subfolders included.
        prompt: with what follows up to `repeats`, see `lit_sd.data.folder.FolderSource`.
        val_root: a folder to validate on, read like `root`.
        class_root: folder of the class images; None puts it beside `root`, as `<root>-prior`.
        class_prompt: with `num_class_images`, see `lit_sd.data.folder.PriorSource`.
        prior_weight: what the mean loss of the class images counts; 0 trains without them.
        prior_sampling: how they are drawn (steps, guidance, …), for whoever draws them.
        batch_size: of both halves together; this and all that follows, and `val_share`: see `SDDataModule`.

    Raises:
        ValueError: an option is out of its range, or `root` is unset.
        FileNotFoundError: a folder does not exist.
    """
    reading: dict[str, Any] = {
        "prompt": prompt,
        "caption_ext": caption_ext,
        "caption_column": caption_column,
        "missing_captions": missing_captions,
        "bad_files": bad_files,
        "max_bad_share": max_bad_share,
        "verify": verify,
    }
    images = FolderSource(root, name="images", repeats=repeats, **reading)
    sources: dict[str, Source] = {"images": images}
    if resolution is None:
        raise ValueError(
            "data.resolution is not set; `lit_sd.run` fills in the model's own, elsewhere it needs a value"
        )
    if not prior_weight >= 0:
        raise ValueError(f"data.prior_weight={prior_weight}: expected 0 or more")
    if prior_weight:
        if class_root is None:
            class_root = images.root.with_name(f"{images.root.name}-prior")
        prior = PriorSource(class_root, class_prompt, num_class_images, weight=prior_weight)
        _refuse_nested(images.root, prior.root)
        sources = {"instance": images, "prior": prior}
    val = None if val_root is None else FolderSource(val_root, name="val", key="data.val_root", **reading)
    datamodule = SDDataModule(
        sources,
        val=val,
        val_share=val_share,
        batch_size=batch_size,
        resolution=resolution,
        buckets=buckets,
        bucket_step=bucket_step,
        bucket_max_ratio=bucket_max_ratio,
        flip=flip,
        center_crop=center_crop,
        num_workers=num_workers,
        cache_mb=cache_mb,
        seed=seed,
    )
    datamodule.prior_sampling = prior_sampling or {}
    return datamodule


def _refuse_nested(root: Path, class_root: Path) -> None:
    inner, outer = class_root.resolve(), root.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ValueError(
            f"data.class_root={class_root} and data.root={root} lie within one another, so that class images "
            "would train as the subject, or the other way round; give them separate folders"
        )
