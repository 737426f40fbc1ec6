"""Examples by draw, batches of them, and the loader that makes these."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lit_sd.data.batching import Draw, MixedBatchSampler, OrderedBatchSampler, Source, seeded
from lit_sd.data.transforms import Size, cut, draw_crop, scale_to_cover
from lit_sd.types import Batch, Sample


class Examples(Dataset):
    """Examples of several sources by `Draw`; the same draw gives the same example, whatever process asks.

    Scaled images are kept in memory up to `cache_mb` in each process: photos from a phone take longer to
    decode and scale than a step takes.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        seed: int = 0,
        flip: float = 0.0,
        centre: bool = False,
        cache_mb: int | float = 0,
    ) -> None:
        self.sources, self.seed, self.flip, self.centre = dict(sources), seed, flip, centre
        self._ids: dict[str, list[str]] = {}
        self._room = int(cache_mb * 2**20)
        self._kept: dict[tuple[str, int, int, int], tuple[np.ndarray, Size, str]] = {}

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources.values())

    def __getitem__(self, draw: Draw) -> tuple[Sample, bool]:
        """The example, and whether it is padding."""
        scaled, original, caption = self._scaled(draw)
        target = (draw.height, draw.width)
        rng = seeded(self.seed, draw.epoch, draw.source, 2, draw.image, draw.occurrence)
        crop = draw_crop(scaled.shape[:2], target, rng, flip=self.flip, centre=self.centre)
        if draw.source not in self._ids:
            self._ids[draw.source] = self.sources[draw.source].ids()
        sample: Sample = {
            "id": self._ids[draw.source][draw.image],
            "source": draw.source,
            "pixels": cut(scaled, target, crop),
            "caption": caption,
            "original_size": original,
            "crop_top_left": (crop.top, crop.left),
        }
        return sample, draw.padding

    def _scaled(self, draw: Draw) -> tuple[np.ndarray, Size, str]:
        key = (draw.source, draw.image, draw.height, draw.width)
        if key in self._kept:
            return self._kept[key]
        image, caption = self.sources[draw.source].load(draw.image)
        scaled = np.asarray(scale_to_cover(image, (draw.height, draw.width)))
        item = (scaled, (image.height, image.width), caption)
        if scaled.nbytes <= self._room:
            self._room -= scaled.nbytes
            self._kept[key] = item
        return item


def collate(items: Sequence[tuple[Sample, bool]], weights: Mapping[str, float]) -> Batch:
    """A batch; an example weighs its source's weight over their number in the batch, and padding 0."""
    samples = [sample for sample, _ in items]
    counted = [sample["source"] for sample, padding in items if not padding]
    weight = [
        0.0 if padding else weights[sample["source"]] / counted.count(sample["source"])
        for sample, padding in items
    ]
    pixels = torch.stack([sample["pixels"] for sample in samples])
    return {
        "ids": [sample["id"] for sample in samples],
        "source": [sample["source"] for sample in samples],
        "pixels": pixels,
        "captions": [sample["caption"] for sample in samples],
        "weight": torch.tensor(weight, dtype=torch.float32),
        "original_size": torch.tensor([sample["original_size"] for sample in samples]),
        "crop_top_left": torch.tensor([sample["crop_top_left"] for sample in samples]),
        "target_size": torch.tensor([tuple(pixels.shape[-2:])] * len(samples)),
    }


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
    *,
    num_workers: int,
    seed: int,
) -> ResumableLoader:
    """The loader of the sampler's batches; `weights` are the sources'."""
    own_stream = torch.Generator().manual_seed(seed)  # else each epoch takes from the global one
    return ResumableLoader(
        examples,
        batch_sampler=sampler,
        collate_fn=partial(collate, weights=weights),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        generator=own_stream,
    )
