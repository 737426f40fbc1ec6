"""Latents and text states that were computed once, kept in memory while they fit.

Shape legend: b batch, c latent channels, lh/lw latents.
"""

import hashlib
from collections.abc import Callable, Hashable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lit_sd.types import Conditioning, Pixels

Moments = tuple[Float[Tensor, "b c lh lw"], Float[Tensor, "b c lh lw"]]
"""Mean and standard deviation of a VAE's posterior."""


class MemoryCache:
    """What frozen encoders gave for a picture or a caption, by content; only what is missing is encoded.

    Pictures are told apart by their pixels after crop and flip, so nothing stale can be found. Each is
    encoded alone: its rounding must not depend on its neighbours, or a resumed run, whose cache is empty,
    would differ. Once the memory is used up, what is new is encoded each time.

    Args:
        megabytes: memory for tensors, in MiB.

    Raises:
        ValueError: `megabytes` is not positive.
    """

    def __init__(self, megabytes: int | float) -> None:
        if not megabytes > 0:
            raise ValueError(f"a cache of {megabytes} MiB holds nothing; expected more than 0")
        self.room = int(megabytes * 2**20)
        self._kept: dict[Hashable, tuple[Tensor | None, ...]] = {}

    def moments(self, pixels: Pixels, encode: Callable[[Tensor], Moments]) -> Moments:
        """The posterior's moments of each picture; `encode` is called on each that is new, `1 3 h w`."""
        keys = [
            ("picture", hashlib.blake2b(x.cpu().numpy().tobytes(), digest_size=16).digest()) for x in pixels
        ]
        mean, std = self._collect(keys, lambda row: encode(pixels[row : row + 1]))
        assert mean is not None
        assert std is not None
        return mean, std

    def text(self, captions: Sequence[str], encode: Callable[[list[str]], Conditioning]) -> Conditioning:
        """Text states of each caption; `encode` is called on each that is new."""

        def missing(row: int) -> tuple[Tensor, Tensor | None]:
            cond = encode([captions[row]])
            return cond.hidden, cond.pooled

        hidden, pooled = self._collect([("caption", caption) for caption in captions], missing)
        assert hidden is not None
        return Conditioning(hidden, pooled)

    def _collect(
        self, keys: Sequence[Hashable], encode: Callable[[int], tuple[Tensor | None, ...]]
    ) -> tuple[Tensor | None, ...]:
        items: dict[Hashable, tuple[Tensor | None, ...]] = {}
        for row, key in enumerate(keys):
            if key not in items:
                items[key] = self._kept[key] if key in self._kept else self._encoded(key, encode(row))
        columns = zip(*(items[key] for key in keys), strict=True)
        return tuple(None if column[0] is None else torch.stack(column) for column in columns)

    def _encoded(self, key: Hashable, parts: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        item = tuple(None if part is None else part[0].detach().clone() for part in parts)
        size = sum(part.numel() * part.element_size() for part in item if part is not None)
        if size <= self.room:
            self.room -= size
            self._kept[key] = item
        return item
