"""The DataModule: batches from named sources, whatever they are."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import lightning as L

from lit_sd.data.batching import MixedBatchSampler, OrderedBatchSampler, held_out
from lit_sd.data.buckets import buckets_of
from lit_sd.data.caches.choice import CacheChoice, CacheMode
from lit_sd.data.caches.latent_cache import LatentCache
from lit_sd.data.caches.latents import CacheDtype
from lit_sd.data.class_images import PriorRequest, PriorSource, refuse_shared_folders
from lit_sd.data.examples import Examples
from lit_sd.data.loading import ResumableLoader, load_batches, to_floats
from lit_sd.data.pools import Pool
from lit_sd.data.position import Position, ranks_of, same_on_all_ranks
from lit_sd.data.shares import make_pools, pool_sources, share_batch
from lit_sd.data.source import SHOWN_CAPTIONS, Source, scaled_up
from lit_sd.data.transforms import Where
from lit_sd.types import Batch

log = logging.getLogger(__name__)


class SDDataModule(L.LightningDataModule):
    """Batches (`lit_sd.types.Batch`) from named sources, the same ones after a resume in mid-epoch as without
    it.

    The trainer needs `use_distributed_sampler=False`: the batch sampler knows its rank.

    Attributes:
        before_setup: called on every rank when a fit is set up, before folders are read and once processes
            can talk to each other. It is where class images can be made; see `prior_requests`.
        fill_cache: called on every rank once sources are checked; gives the latents to read in place of
            pixels, see `lit_sd.caching`.
        latents: what it gave.
    """

    before_setup: Callable[[], None] | None = None
    fill_cache: Callable[[], LatentCache | None] | None = None
    latents: LatentCache | None = None

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        batch_size: int,
        resolution: int | Sequence[int] | None,
        flip: bool | int | float,
        num_workers: int,
        decoded_mb: int | float,
        seed: int,
        val: Source | None = None,
        val_share: int | float = 0.0,
        shares: Mapping[str, int | float] | None = None,
        buckets: bool = False,
        bucket_step: int = 8,
        bucket_max_ratio: int | float = 1.0,
        upscale: bool = True,
        fill: bool = False,
        shuffle_shards: int | None = None,
        crop: Where = "random",
        prior_sampling: Mapping[str, Any] | None = None,
        cache: CacheMode | bool = "off",
        cache_mb: int | float = 0,
        cache_dir: str | os.PathLike | None = None,
        cache_dtype: CacheDtype = "float32",
        cache_batch: int = 1,
        cache_texts: bool = True,
    ) -> None:
        """What has no default here has it in conf/data; what has one is off by default.

        Args:
            sources: training images by name; the first one is what `val_share` is taken of.
            batch_size: images of a batch, from all sources together, on each rank.
            resolution: side of the square images, a multiple of 8, or several such sides, of which each image
                gets what suits it; see `lit_sd.data.buckets.Buckets`. `lit_sd.run` puts the model's own size
                in None's place.
            flip: mirror images with this probability; True is one half.
            num_workers: processes that load images; 0 loads in this one.
            decoded_mb: memory for scaled images in each of them.
            seed: of the order, the crops and the flips.
            val: images to validate on.
            val_share: share of the first source's images to validate on instead, chosen by `seed` and by
                their names.
            shares: of a batch, by source. Sources that it does not name count as one with the first that it
                does; None draws from all sources as if they were one.
            buckets: give each batch the aspect ratio of its images.
            bucket_step: sides of buckets are multiples of it.
            bucket_max_ratio: the longest shape, as longer side over shorter.
            upscale: with buckets, scale small images up; else they keep their size.
            fill: fill up the last step of each bucket; else its draws are left out, other ones each epoch.
            shuffle_shards: shards, or other parts of large sources, that are mixed at a time; None shuffles
                each source as a whole.
            crop: where images are cropped: random, center, or mask.
            prior_sampling: how class images are drawn (steps, guidance, …), for whoever draws them.
            cache: with what follows, what is kept of frozen encoders' outputs; see
                `lit_sd.data.caches.choice.CacheChoice`. `lit_sd.caching` does what it says.

        Raises:
            ValueError: an option is out of its range.
        """
        super().__init__()
        if resolution is None:
            raise ValueError("data.resolution is not set; lit_sd.run fills in the model's")
        self.sources, self.val, self.val_share = dict(sources), val, val_share
        for name, source in self.sources.items():
            source.name = name
        self.resolutions = [resolution] if isinstance(resolution, int) else list(resolution)
        self.batch_size, self.num_workers = batch_size, num_workers
        self.flip, self.crop = 0.5 if flip is True else float(flip), crop
        self.fill, self.shuffle_shards = fill, shuffle_shards
        self.cache = CacheChoice(cache, cache_mb, cache_dir, cache_dtype, cache_batch, cache_texts)
        self.decoded_mb, self.seed, self.prior_sampling = decoded_mb, seed, dict(prior_sampling or {})
        self._check_options()
        self.buckets = buckets_of(self.resolutions, buckets, bucket_step, bucket_max_ratio, upscale)
        self.pools = pool_sources(self.sources, shares)
        self.quotas = share_batch(batch_size, {name: (shares or {}).get(name, 1.0) for name in self.pools})
        self._held: list[int] | None = None
        self._pools: list[Pool] | None = None
        self._resume: dict[str, Any] | None = None
        self._position: Position | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pools": None}  # each process plans for itself

    @property
    def resolution(self) -> int:
        """Side of the squares: of validation images, and where there are no buckets."""
        return self.resolutions[0]

    def _check_options(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty; expected one source or more")
        for key, least in (("data.batch_size", 1), ("data.num_workers", 0), ("seed", 0)):
            if (value := getattr(self, key.removeprefix("data."))) < least:
                raise ValueError(f"{key}={value}: expected {least} or more")
        if wrong := [side for side in self.resolutions if side < 8 or side % 8]:
            raise ValueError(f"data.resolution={wrong[0]}: expected a multiple of 8, the VAE's factor")
        if not 0 <= self.val_share < 1 or (self.val_share and self.val is not None):
            told = f"data.val_share={self.val_share}: expected 0 or more and less than 1"
            raise ValueError(f"{told}, and 0 with data.val_root")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"data.flip={self.flip}: expected true, false or a probability")
        if self.shuffle_shards is not None and self.shuffle_shards < 1:
            raise ValueError(f"data.shuffle_shards={self.shuffle_shards}: expected 1 or more, or null")
        refuse_shared_folders(self.prior_requests())

    def prior_requests(self) -> list[PriorRequest]:
        """Class images that have to be there before training, for each prior source."""
        return [source.request for source in self.sources.values() if isinstance(source, PriorSource)]

    def check(self, world_size: int = 1) -> None:
        """Reads every source once and does the sums of an epoch; cheap to call again. Class images may still
        be missing.

        Raises:
            ValueError: a source is empty or faulty, or not one step can be made.
            FileNotFoundError: a folder does not exist.
        """
        for source in [*self.sources.values(), *([] if self.val is None else [self.val])]:
            if not isinstance(source, PriorSource) or source.ready:
                source.check()
        self.batch_sampler(0, world_size)

    def report(self, world_size: int = 1) -> list[str]:
        """Lines on what an epoch is made of and what it leaves out, for the plan that is printed first."""
        lines = self.batch_sampler(0, world_size).report()
        validated = len(self.val) if self.val is not None else len(self.val_indexes())
        lines.append(f"validation: {validated} images" if validated else "validation: none")
        lines += [] if self.buckets is None else self.buckets.notes()
        if self.buckets is None or self.buckets.upscale:
            lines += scaled_up(self._first(), min(self.resolutions))
        for source in self.sources.values():
            lines += source.report()
        return lines if self.latents is None else lines + self.latents.notes

    def captions(self) -> list[str]:
        """Captions of training images, of each source the first ones."""
        return [c for source in self.sources.values() for c in islice(source.captions(), SHOWN_CAPTIONS)]

    def _first(self) -> Source:
        return next(iter(self.sources.values()))

    def val_indexes(self) -> list[int]:
        """The first source's images that are held out for validation.

        Raises:
            ValueError: nothing would be left to train on.
        """
        if self._held is None:
            self._held = held_out(self._first().ids(), self.val_share, self.seed) if self.val_share else []
        return self._held

    def batch_sampler(self, rank: int, world_size: int) -> MixedBatchSampler:
        """The order of training batches, for one rank.

        Raises:
            ValueError: not one step can be made.
        """
        if self._pools is None:
            self._pools = make_pools(
                {name: [self.sources[source] for source in names] for name, names in self.pools.items()},
                self.quotas,
                seed=self.seed,
                buckets=self.buckets,
                square=(self.resolution, self.resolution),
                shuffle_shards=self.shuffle_shards,
                aside=self.val_indexes(),
            )
        return MixedBatchSampler(
            self._pools, seed=self.seed, rank=rank, world_size=world_size, fill=self.fill
        )

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
                    self._pools = None
                source.check()
        self.check(world_size)
        if stage == "fit" and self.fill_cache is not None:
            self.latents = self.fill_cache()
        sampler = self.batch_sampler(0, world_size)
        same_on_all_ranks(sampler.fingerprint() | {"steps": len(sampler)}, world_size)
        for line in sampler.report() if rank == 0 else ():
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
            self.sources,
            seed=self.seed,
            flip=self.flip,
            crop=self.crop,
            decoded_mb=self.decoded_mb,
            latents=None if self.latents is None else self.latents.reader(self.sources, self.crop),
        )
        pools = {source: pool for pool, sources in self.pools.items() for source in sources}
        weights = {name: source.weight for name, source in self.sources.items()}
        return load_batches(examples, sampler, weights, pools, num_workers=self.num_workers, seed=self.seed)

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
        latents = None if self.latents is None else self.latents.reader({"val": source}, "center")
        examples = Examples({"val": source}, crop="center", decoded_mb=self.decoded_mb, latents=latents)
        return load_batches(
            examples, sampler, {"val": 1.0}, {"val": "val"}, num_workers=self.num_workers, seed=self.seed
        )

    test_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> Batch:
        """The batch with pixels in floats: workers send bytes, which take a quarter of the room."""
        return to_floats(batch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were trained on; see `lit_sd.data.position.Position`."""
        return {} if self._position is None else self._position.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the position for the next training loader."""
        self._resume = state_dict or None
