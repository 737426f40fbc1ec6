"""A source of pictures in memory whose encoded bytes a test can change, for tests of caches."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d

from lit_sd.data.caption_rules import Caption
from lit_sd.data.source import Record, Source


def png(image: Image.Image | np.ndarray) -> bytes:
    """An image as the bytes of a PNG file."""
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, "PNG")
    return file.getvalue()


def noise(seed: int, size: tuple[int, int] = (16, 16)) -> bytes:
    """A seeded picture of noise."""
    return png(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


class PictureSource(Source):
    """Pictures of these (height, width); `reads` counts how often one is opened."""

    def __init__(self, sizes: Sequence[tuple[int, int]], *, name: str = "images", **options: Any) -> None:
        super().__init__(name, **options)
        self.pictures = [noise(i, size) for i, size in enumerate(sizes)]
        self.masks: list[bytes | None] = [None] * len(sizes)
        self.controls: list[bytes | None] = [None] * len(sizes)
        self.texts = [f"picture {i}" for i in range(len(sizes))]
        self.versions: list[int] | None = [0] * len(sizes)
        self.all = np.array(sizes, np.int32)
        self.reads = 0

    def edit(self, index: int, picture: bytes) -> None:
        self.pictures[index] = picture
        if self.versions is not None:
            self.versions[index] += 1

    def check(self) -> None: ...

    def __len__(self) -> int:
        return len(self.pictures)

    def ids(self) -> list[str]:
        return [f"{self.name}/{i}" for i in range(len(self))]

    def sizes(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.all[start:stop]

    def captions_of(self, index: int) -> tuple[Caption, ...]:
        return (Caption(self.texts[index]),)

    def stamp(self, index: int) -> str | None:
        return None if self.versions is None else f"{self.name} {index} {self.versions[index]}"

    def record(self, index: int) -> Record:
        self.reads += 1
        return Record(
            self.ids()[index],
            self.pictures[index],
            ".png",
            self.captions_of(index),
            mask=self.masks[index],
            control=self.controls[index],
        )


class CountingEncoder:
    """Stands in for a VAE: its means are those of 8 x 8 pixels; `seen` has all pictures it was given."""

    def __init__(self) -> None:
        self.seen: list[np.ndarray] = []

    def __call__(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen += list(pictures.numpy())
        return moments_of(pictures)


def moments_of(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `CountingEncoder` gives for pictures `b h w 3`."""
    means = avg_pool2d(pictures.permute(0, 3, 1, 2).float(), 8)
    mean = torch.cat([means, means[:, :1] + 1], 1)
    return mean, mean / 256 + 0.5
