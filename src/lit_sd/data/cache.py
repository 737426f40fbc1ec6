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

    Pictures are told apart by their pixels after crop and flip, so nothing stale can be found. Once the memory is used
    up, what is new is encoded each time.

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

    def moments(self, pixels: Pixels, encode: Callable[[Pixels], Moments]) -> Moments:
        """The posterior's moments of each picture; `encode` is called on those that are new."""
        keys = [("picture", hashlib.blake2b(x.cpu().numpy().tobytes(), digest_size=16).digest()) for x in pixels]
        mean, std = self._collect(keys, lambda rows: encode(pixels[rows]))
        assert mean is not None and std is not None
        return mean, std

    def text(self, captions: Sequence[str], encode: Callable[[list[str]], Conditioning]) -> Conditioning:
        """Text states of each caption; `encode` is called on those that are new."""

        def missing(rows: list[int]) -> tuple[Tensor, Tensor | None]:
            cond = encode([captions[row] for row in rows])
            return cond.hidden, cond.pooled

        hidden, pooled = self._collect([("caption", caption) for caption in captions], missing)
        assert hidden is not None
        return Conditioning(hidden, pooled)

    def _collect(
        self, keys: Sequence[Hashable], encode: Callable[[list[int]], tuple[Tensor | None, ...]]
    ) -> tuple[Tensor | None, ...]:
        first = {key: row for row, key in reversed(list(enumerate(keys))) if key not in self._kept}
        fresh: dict[Hashable, tuple[Tensor | None, ...]] = {}
        if rows := sorted(first.values()):
            encoded = encode(rows)
            for i, row in enumerate(rows):
                fresh[keys[row]] = tuple(None if part is None else part[i].detach() for part in encoded)
                self._keep(keys[row], fresh[keys[row]])
        items = [fresh[key] if key in fresh else self._kept[key] for key in keys]
        return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*items, strict=True))

    def _keep(self, key: Hashable, item: tuple[Tensor | None, ...]) -> None:
        size = sum(part.numel() * part.element_size() for part in item if part is not None)
        if size <= self.room:
            self.room -= size
            self._kept[key] = tuple(None if part is None else part.clone() for part in item)
