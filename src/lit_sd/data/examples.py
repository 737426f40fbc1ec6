"""Examples by draw, batches of them, and the loader that makes these."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lit_sd.data.batching import Draw, MixedBatchSampler, OrderedBatchSampler
from lit_sd.data.caches.latents import LatentReader, floats_of, one_everywhere
from lit_sd.data.caption_rules import Caption
from lit_sd.data.pools import seeded
from lit_sd.data.source import Source
from lit_sd.data.transforms import (
    Size,
    Where,
    cover_size,
    cut,
    draw_crop,
    mask_box,
    scale_to,
)
from lit_sd.types import Batch, Sample


class Scaled(NamedTuple):
    """An example scaled to cover its shape; `size` is the whole image's."""

    image: Image.Image
    size: Size
    captions: tuple[Caption, ...]
    mask: Image.Image | None
    control: Image.Image | None

    @property
    def nbytes(self) -> int:
        """Of the pixels, as Pillow holds them: four bytes for RGB."""
        pixels = self.image.width * self.image.height
        return pixels * (4 + (self.mask is not None) + 4 * (self.control is not None))


def scale_example(source: Source, index: int, target: Size) -> Scaled:
    """An example scaled to cover a shape. Raises OSError where it can't be read; the message names it."""
    picture = source.load(index, target)
    cover = cover_size(picture.size, target)
    mask, control = (
        None if part is None else scale_to(part, cover) for part in (picture.mask, picture.control)
    )
    return Scaled(scale_to(picture.image, cover), picture.size, picture.captions, mask, control)


class Examples(Dataset):
    """Examples of several sources by `Draw`; the same draw gives the same example, whatever process asks.

    Scaled images are kept in memory up to `decoded_mb` in each process: photos from a phone take longer to
    decode and scale than a step takes. With `latents`, images are not opened at all: an example has the
    moments of its latents in place of pixels.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        seed: int = 0,
        flip: float = 0.0,
        crop: Where = "random",
        decoded_mb: int | float = 0,
        latents: LatentReader | None = None,
    ) -> None:
        self.sources, self.seed, self.flip, self.crop = dict(sources), seed, flip, crop
        self.latents = latents
        self._ids: dict[str, Sequence[str]] = {}
        self._room = int(decoded_mb * 2**20)
        self._kept: dict[tuple[str, int, int, int], Scaled] = {}

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources.values())

    def __getitem__(self, draw: Draw) -> tuple[Sample, bool]:
        """The example, and whether it is padding."""
        if self.latents is not None:
            return self._cached([draw])[0]
        scaled, source = self._scaled(draw), self.sources[draw.source]
        target = (draw.height, draw.width)
        rng = seeded(self.seed, draw.epoch, draw.source, 4, draw.image, draw.occurrence)
        box = mask_box(scaled.mask) if self.crop == "mask" and scaled.mask is not None else None
        cover = (scaled.image.height, scaled.image.width)
        crop = draw_crop(cover, target, rng, flip=self.flip, where=self.crop, box=box)
        sample: Sample = {
            "id": self._id(draw),
            "source": draw.source,
            "pixels": cut(scaled.image, target, crop),
            "caption": source.rule.draw(scaled.captions, rng),
            "original_size": scaled.size,
            "crop_top_left": (crop.top, crop.left),
            "target_size": target,
        }
        if scaled.mask is not None:
            sample["mask"] = cut(scaled.mask, target, crop)
        if scaled.control is not None:
            sample["control"] = cut(scaled.control, target, crop)
        return sample, draw.padding

    def __getitems__(self, draws: Sequence[Draw]) -> list[tuple[Sample, bool]]:
        """The examples of a batch, of one shape."""
        return [self[draw] for draw in draws] if self.latents is None else self._cached(draws)

    def _cached(self, draws: Sequence[Draw]) -> list[tuple[Sample, bool]]:
        assert self.latents is not None
        flips, captions = [], []
        for draw in draws:
            source = self.sources[draw.source]
            rng = seeded(self.seed, draw.epoch, draw.source, 4, draw.image, draw.occurrence)
            flips.append(bool(rng.random(3)[0] < self.flip))  # as `draw_crop` draws it
            captions.append(source.rule.draw(source.captions_of(draw.image), rng))
        items = []
        for draw, caption, found in zip(draws, captions, self.latents.read(draws, flips), strict=True):
            sample: Sample = {
                "id": self._id(draw),
                "source": draw.source,
                "moments": found.moments,
                "caption": caption,
                "original_size": found.size,
                "crop_top_left": found.corner,
                "target_size": (draw.height, draw.width),
            }
            if found.mask is not None:
                sample["mask"] = found.mask
            items.append((sample, draw.padding))
        return items

    def _id(self, draw: Draw) -> str:
        if draw.source not in self._ids:
            self._ids[draw.source] = self.sources[draw.source].ids()
        return self._ids[draw.source][draw.image]

    def _scaled(self, draw: Draw) -> Scaled:
        target = (draw.height, draw.width)
        key = (draw.source, draw.image, *target)
        if key in self._kept:
            return self._kept[key]
        item = scale_example(self.sources[draw.source], draw.image, target)
        if item.nbytes <= self._room:
            self._room -= item.nbytes
            self._kept[key] = item
        return item


def collate(
    items: Sequence[tuple[Sample, bool]], weights: Mapping[str, float], pools: Mapping[str, str]
) -> dict[str, Any]:
    """A batch, its pixels as they were decoded; an example weighs its source's weight over the number of its
    pool's examples in the batch, and padding 0.

    Args:
        items: examples, and whether each is padding.
        weights: of the sources.
        pools: name of the pool that each source belongs to.
    """
    samples = [sample for sample, _ in items]
    counted = [pools[sample["source"]] for sample, padding in items if not padding]
    weight = [
        0.0 if padding else weights[sample["source"]] / counted.count(pools[sample["source"]])
        for sample, padding in items
    ]
    shown = "moments" if "moments" in samples[0] else "pixels"
    batch: dict[str, Any] = {
        "ids": [sample["id"] for sample in samples],
        "source": [sample["source"] for sample in samples],
        shown: stack([sample[shown] for sample in samples]),  # type: ignore[literal-required]
        "captions": [sample["caption"] for sample in samples],
        "weight": torch.tensor(weight, dtype=torch.float32),
        "original_size": torch.tensor([sample["original_size"] for sample in samples]),
        "crop_top_left": torch.tensor([sample["crop_top_left"] for sample in samples]),
        "target_size": torch.tensor([sample["target_size"] for sample in samples]),
    }
    masks = [sample["mask"] for sample in samples if "mask" in sample]
    if masks:
        whole = one_everywhere(masks[0])  # what has no mask counts in full
        batch["mask"] = stack([sample.get("mask", whole) for sample in samples])
    controls = [sample["control"] for sample in samples if "control" in sample]
    if controls:
        if len(controls) < len(samples):
            without = next(sample["id"] for sample in samples if "control" not in sample)
            raise ValueError(f"{without} has no control image, but others of its batch have; give all one")
        batch["control"] = stack(controls)
    return batch


def stack(arrays: Sequence[np.ndarray]) -> Tensor:
    """A tensor of equal arrays, in shared memory where a worker makes it, so that it is not copied again."""
    shape = (len(arrays), *arrays[0].shape)
    first = torch.from_numpy(np.empty(0, arrays[0].dtype))
    if get_worker_info() is None:
        out = torch.empty(shape, dtype=first.dtype)
    else:
        shared = first.untyped_storage()._new_shared(math.prod(shape) * first.element_size())
        out = first.new_empty(0).set_(shared).view(first.dtype).reshape(shape)
    np.stack(arrays, out=out.numpy())
    return out


def to_floats(batch: dict[str, Any]) -> Batch:
    """The batch as `lit_sd.types.Batch` has it: `b h w c` in bytes becomes `b c h w` in floats, on the device
    where the bytes are; and what came out of a cache becomes the floats that it stands for.
    """
    made = dict(batch)
    for name in ("pixels", "mask", "control", "moments"):
        if name in batch and batch[name].dtype == torch.uint8:
            made[name] = batch[name].permute(0, 3, 1, 2).float().contiguous() / 255
        elif name in batch:
            made[name] = floats_of(batch[name])
    if "pixels" in batch:
        made["pixels"] = made["pixels"] * 2 - 1
    return made  # type: ignore[return-value]


class ResumableLoader(DataLoader):
    """A loader whose position the DataModule keeps; this tells Lightning that it can resume."""

    def state_dict(self) -> dict[str, Any]:
        """Empty: see `lit_sd.data.datamodule.SDDataModule.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do: see `lit_sd.data.datamodule.SDDataModule.state_dict`."""


def load_batches(
    examples: Examples,
    sampler: MixedBatchSampler | OrderedBatchSampler,
    weights: Mapping[str, float],
    pools: Mapping[str, str],
    *,
    num_workers: int,
    seed: int,
) -> ResumableLoader:
    """The loader of the sampler's batches; see `collate` for `weights` and `pools`."""
    if examples.latents is not None:
        num_workers = 0  # taking a batch of latents from a worker costs as much as reading it
    own_stream = torch.Generator().manual_seed(seed)  # else each epoch takes from the global one
    return ResumableLoader(
        examples,
        batch_sampler=sampler,
        collate_fn=partial(collate, weights=weights, pools=pools),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=own_stream,
    )
