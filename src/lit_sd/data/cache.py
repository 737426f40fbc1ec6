"""Latents and text states that were computed once.

Shape legend: b batch, c latent channels, lh/lw latents, s tokens, d features, p pooled features.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from lit_sd.types import Conditioning, Pixels

Moments = tuple[Float[Tensor, "b c lh lw"], Float[Tensor, "b c lh lw"]]
"""Mean and standard deviation of a VAE's posterior."""
EncodeText = Callable[[list[str]], Conditioning]


class EncoderCache(Protocol):
    """What stands between a training step and its frozen encoders."""

    def moments(self, pixels: Pixels, encode: Callable[[Tensor], Moments]) -> Moments:
        """The posterior's moments of each picture; `encode` is called on what isn't kept."""

    def text(self, captions: Sequence[str], encode: EncodeText) -> Conditioning:
        """Text states of each caption, the same as `encode` gives for all of them; it is called on what isn't
        kept.
        """


class States(NamedTuple):
    """Text states of one caption: as many windows of tokens as it needs."""

    hidden: Float[Tensor, "s d"]
    pooled: Float[Tensor, " p"] | None

    def to(self, device: torch.device) -> "States":
        """On another device."""
        return States(self.hidden.to(device), None if self.pooled is None else self.pooled.to(device))


def row_of(cond: Conditioning, row: int) -> States:
    """One caption's states, copied out of a batch's."""
    pooled = None if cond.pooled is None else cond.pooled[row].detach().clone()
    return States(cond.hidden[row].detach().clone(), pooled)


def joined(rows: Sequence[States], empty: Callable[[], States]) -> Conditioning:
    """A batch of captions' states. Shorter ones are filled up with windows of no text, as they are where all
    are encoded together.

    Args:
        rows: of the captions.
        empty: gives the states of the empty caption, which are one window.
    """
    longest = max(len(row.hidden) for row in rows)
    hidden = [row.hidden for row in rows]
    if any(len(states) < longest for states in hidden):
        window = empty().hidden.to(hidden[0].device)
        hidden = [
            torch.cat([states, window.repeat((longest - len(states)) // len(window), 1)]) for states in hidden
        ]
    pooled = [row.pooled for row in rows if row.pooled is not None]
    return Conditioning(torch.stack(hidden), torch.stack(pooled) if pooled else None)


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
            raise ValueError(f"data.cache_mb={megabytes}: expected more than 0, the cache would hold nothing")
        self.room = int(megabytes * 2**20)
        self._kept: dict[Hashable, tuple[Tensor | None, ...]] = {}

    def moments(self, pixels: Pixels, encode: Callable[[Tensor], Moments]) -> Moments:
        """The posterior's moments of each picture; `encode` is called on each that is new, `1 3 h w`."""
        found: dict[Hashable, tuple[Tensor, ...]] = {}
        keys = fingerprints(pixels)

        def moments_of(row: int) -> tuple[Tensor, ...]:
            mean, std = encode(pixels[row : row + 1])
            return mean[0], std[0]

        for row, key in enumerate(keys):
            if key not in found:
                found[key] = self._look_up(key, partial(moments_of, row))
        means, stds = zip(*(found[key] for key in keys), strict=True)
        return torch.stack(means), torch.stack(stds)

    def text(self, captions: Sequence[str], encode: EncodeText) -> Conditioning:
        """Text states of each caption; `encode` is called on each that is new."""
        unique = dict.fromkeys(captions)
        rows = {caption: self._states(caption, encode) for caption in unique}
        return joined([rows[caption] for caption in captions], lambda: self._states("", encode))

    def _states(self, caption: str, encode: EncodeText) -> States:
        return States(*self._look_up(("caption", caption), lambda: row_of(encode([caption]), 0)))

    def _look_up(self, key: Hashable, compute: Callable[[], tuple[Tensor | None, ...]]) -> tuple:
        if key in self._kept:
            return self._kept[key]
        item = tuple(None if part is None else part.detach().clone() for part in compute())
        size = sum(part.numel() * part.element_size() for part in item if part is not None)
        if size <= self.room:
            self.room -= size
            self._kept[key] = item
        return item


def fingerprints(pixels: Pixels) -> list[Hashable]:
    """What tells pictures apart by their bits and shape, found where they lie: 16 bytes of each leave the
    device.

    Two sums of all values, each times a random odd number of 64 bits (multilinear hashing: Lemire and Kaser,
    arXiv:1202.4961).
    """
    factors = _factors(pixels[0].numel(), pixels.device)
    rows = [
        (factors * picture.contiguous().view(-1).view(torch.int32)).sum(1)
        for picture in pixels.to(torch.float32)
    ]
    return [("picture", tuple(pixels.shape[1:]), *row) for row in torch.stack(rows).tolist()]


_factors_of: dict[tuple[int, torch.device], Tensor] = {}


def _factors(count: int, device: torch.device) -> Tensor:
    if (count, device) not in _factors_of:
        generator = torch.Generator().manual_seed(count)
        numbers = torch.randint(-(2**63), 2**63 - 1, (2, count), generator=generator)
        _factors_of[count, device] = (numbers | 1).to(device)
    return _factors_of[count, device]
