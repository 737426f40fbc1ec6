"""Pictures encoded before a run trains: by all ranks together, and only those that a cache lacks."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d
from torch.utils.data import DataLoader, Dataset

from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latents import KIND, Corner, Recipe, Variant, pack_moments
from lit_sd.data.caches.progress import CacheProgress
from lit_sd.data.caches.writer import PartWriter
from lit_sd.data.transforms import Crop, cut, mask_box
from lit_sd.together import Together

Encode = Callable[[UInt8[Tensor, "b h w 3"]], tuple[Tensor, Tensor]]
"""Pictures as bytes to mean and standard deviation of the VAE's posterior, `b c lh lw`."""


class _Picture(NamedTuple):
    """One variant, ready to be encoded."""

    key: bytes
    name: str
    pixels: UInt8[Tensor, "h w 3"]
    mask: UInt8[Tensor, "h w 1"] | None
    corner: Corner


class _Pictures(Dataset):
    """Pictures to encode: those that are one picture in one shape together, so that it is decoded once."""

    def __init__(self, cache: LatentCache, requests: Sequence[Request], table: np.ndarray) -> None:
        self.requests, self.table = requests, table
        self.facts = [cache.facts(request.source) for request in requests]
        self.recipes = [cache.recipe_of(request) for request in requests]
        same = [table["request"], table["row"], table["shape"][:, 0], table["shape"][:, 1]]
        changes = np.any([np.diff(column) != 0 for column in same], axis=0)
        self.bounds = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(table)]])

    def __len__(self) -> int:
        return len(self.bounds) - 1 if len(self.table) else 0

    def __getitem__(self, index: int) -> list[_Picture]:
        table = self.table[self.bounds[index] : self.bounds[index + 1]]
        number, row = int(table["request"][0]), int(table["row"][0])
        source, recipe, (digest, size) = (
            self.requests[number].source,
            self.recipes[number],
            self.facts[number][row],
        )
        target = (int(table["shape"][0, 0]), int(table["shape"][0, 1]))
        scaled = source.load(row, target)
        name = f"{source.name}: {source.ids()[row]}"
        if scaled.size != size:
            raise OSError(f"{name} was {size} a moment ago and is {scaled.size} now: files must not change")
        if scaled.control is not None:
            raise ValueError(
                f"{name} has a control image, which has to be cropped with the picture each time; set "
                "data.cache=memory or off"
            )
        box = None if scaled.mask is None else mask_box(scaled.mask)
        pictures = []
        for at, flip in enumerate(table["flip"].tolist()):
            variant = Variant(digest, size, target, flip, source.alpha_mask)
            crop = Crop(flip, *recipe.drawn_corner(variant, box))
            pixels, mask = (
                None if part is None else torch.from_numpy(cut(part, target, crop).copy())
                for part in (scaled.image, scaled.mask)
            )
            assert pixels is not None
            key = table["key"][at : at + 1].tobytes()
            pictures.append(_Picture(key, name, pixels, mask, crop[1:]))
        return pictures


def fill_latents(
    cache: LatentCache,
    requests: Sequence[Request],
    encode: Encode,
    together: Together,
    *,
    batch: int = 1,
    num_workers: int = 0,
) -> None:
    """Encodes what is missing; all ranks call it, each takes a share and writes a part of its own.

    Args:
        cache: what is filled.
        requests: what a run may ask for.
        encode: the VAE.
        together: the ranks.
        batch: pictures that are encoded at once; with one, a picture's rounding doesn't depend on others.
        num_workers: processes that decode pictures.

    Raises:
        OSError: a picture can't be read, or there is no room.
        ValueError: a picture's latents are not finite, or it has a control image.
        RuntimeError: it failed on another rank, or ranks don't see the same folder.
    """
    what = "filling the cache of latents"
    cache.parts.agree(together)
    cache.gather((request.source for request in requests), together)
    table = cache.missing(requests)
    together.run(what, lambda: None)  # nobody writes before all have looked
    pictures = _Pictures(cache, requests, table)
    mine = together.share(len(pictures))

    def work() -> int:
        loader = DataLoader(
            pictures,
            batch_size=None,
            sampler=mine,
            num_workers=min(num_workers, len(mine)),
            collate_fn=_as_they_are,
            generator=torch.Generator(),  # else it would take from the global one
        )
        count = int(pictures.bounds[mine.stop] - pictures.bounds[mine.start])
        with (
            PartWriter(cache.folder / KIND, KIND) as writer,
            CacheProgress(f"encoding pictures{together.shared}", count, shown=together.rank == 0) as bar,
        ):
            for done in _encoded(loader, encode, batch, cache.recipe, writer):
                bar.advance(done)
        return count

    cache.encoded = sum(together.run(what, work if len(mine) else lambda: 0))
    cache.parts.agree(together, table["key"])


def _as_they_are(pictures: list[_Picture]) -> list[_Picture]:
    return pictures


def _encoded(
    loader: Iterable[list[_Picture]], encode: Encode, batch: int, recipe: Recipe, writer: PartWriter
) -> Iterator[int]:
    """Encodes and writes pictures of a shape, `batch` at a time, and says how many each time."""
    waiting: dict[tuple[int, ...], list[_Picture]] = defaultdict(list)
    for picture in chain.from_iterable(loader):
        some = waiting[picture.pixels.shape]
        some.append(picture)
        if len(some) == batch:
            _write(some, encode, recipe, writer)
            yield len(some)
            some.clear()
    for some in waiting.values():
        if some:
            _write(some, encode, recipe, writer)
            yield len(some)


def _write(some: Sequence[_Picture], encode: Encode, recipe: Recipe, writer: PartWriter) -> None:
    means, stds = encode(torch.stack([picture.pixels for picture in some]))
    for picture, mean, std in zip(some, means.cpu(), stds.cpu(), strict=True):
        mask = None
        if picture.mask is not None:
            # As the objective averages it, so that a cached mask counts for the same.
            mask = adaptive_avg_pool2d(picture.mask.permute(2, 0, 1).float() / 255, mean.shape[-2:])
        try:
            value = pack_moments(mean, std, picture.corner, mask, recipe.dtype)
        except ValueError as error:
            raise ValueError(f"{picture.name}: {error}") from error
        writer.write(picture.key, value)
