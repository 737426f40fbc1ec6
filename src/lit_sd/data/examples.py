"""Examples by draw."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch.utils.data import Dataset

from lit_sd.data.batching import Draw
from lit_sd.data.caches.latents import LatentReader
from lit_sd.data.slots import Slots
from lit_sd.data.source import Picture, Source
from lit_sd.data.transforms import Where, cut, draw_crop, mask_box
from lit_sd.data.turns import seeded
from lit_sd.types import Sample


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
        slots: Slots | None = None,
    ) -> None:
        self.sources, self.seed, self.flip, self.crop = dict(sources), seed, flip, crop
        self.latents, self.slots = latents, slots
        self._ids: dict[str, Sequence[str]] = {}
        self._room = int(decoded_mb * 2**20)
        self._kept: dict[tuple[str, int, int, int], Picture] = {}

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources.values())

    def __getitem__(self, draw: Draw) -> tuple[Sample, bool]:
        """The example, and whether it is padding."""
        return self._cached([draw])[0] if self.latents is not None else self._decoded(draw)

    def __getitems__(self, draws: Sequence[Draw]) -> list[tuple[Sample, bool]]:
        """The examples of a batch, of one shape; their pixels lie side by side."""
        if self.latents is not None:
            return self._cached(draws)
        shape = (len(draws), draws[0].height, draws[0].width, 3)
        room = np.empty(shape, np.uint8) if self.slots is None else self.slots.room(shape)
        return [self._decoded(draw, into) for draw, into in zip(draws, room, strict=True)]

    def _decoded(self, draw: Draw, into: np.ndarray | None = None) -> tuple[Sample, bool]:
        scaled, source = self._loaded(draw, into), self.sources[draw.source]
        target = (draw.height, draw.width)
        rng = seeded(self.seed, draw.epoch, draw.source, 4, draw.image, draw.occurrence)
        box = mask_box(scaled.mask) if self.crop == "mask" and scaled.mask is not None else None
        cover = scaled.image.shape
        crop = draw_crop((cover[0], cover[1]), target, rng, flip=self.flip, where=self.crop, box=box)
        sample: Sample = {
            "id": self._id(draw),
            "source": draw.source,
            "pixels": cut(scaled.image, target, crop, into),
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

    def _cached(self, draws: Sequence[Draw]) -> list[tuple[Sample, bool]]:
        assert self.latents is not None
        flips, captions = zip(*map(self._flip_and_caption, draws), strict=True)
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

    def _flip_and_caption(self, draw: Draw) -> tuple[bool, str]:
        source = self.sources[draw.source]
        stored = source.captions_of(draw.image)
        fixed = source.rule.fixed(stored)
        if fixed is not None and self.flip in (0.0, 1.0):  # there is nothing to draw
            return self.flip == 1.0, fixed
        rng = seeded(self.seed, draw.epoch, draw.source, 4, draw.image, draw.occurrence)
        flip = bool(rng.random(3)[0] < self.flip)  # as `draw_crop` draws it
        return flip, source.rule.draw(stored, rng)

    def _id(self, draw: Draw) -> str:
        if draw.source not in self._ids:
            self._ids[draw.source] = self.sources[draw.source].ids()
        return self._ids[draw.source][draw.image]

    def _loaded(self, draw: Draw, into: np.ndarray | None) -> Picture:
        target = (draw.height, draw.width)
        key = (draw.source, draw.image, *target)
        if key in self._kept:
            return self._kept[key]
        if self._room >= draw.height * draw.width * 3:
            into = None  # it may be kept, and that room is only lent
        item = self.sources[draw.source].load(draw.image, target, into)
        if item.nbytes <= self._room:
            self._room -= item.nbytes
            self._kept[key] = item
        return item
