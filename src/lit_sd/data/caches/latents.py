"""Moments of pictures from a cache on disk, instead of their pixels.

What is kept are mean and standard deviation of the VAE's posterior, of each picture, shape and flip, so that
latents are drawn anew each time. A picture's crop, though, is drawn once for each shape, by its content.

Shape legend: c latent channels, lh/lw latents.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lit_sd.data.batching import Draw
from lit_sd.data.caches.digests import Facts
from lit_sd.data.caches.parts import Parts
from lit_sd.data.caches.writer import KEY
from lit_sd.data.transforms import Size, Where, cover_size, draw_crop

KIND = "latents"
CacheDtype = Literal["float32", "float16"]
Corner = tuple[int, int]

VERSION = 1
"""Raise it when decoding, scaling or cropping changes: pixels depend on these beside the key."""
_MAGIC = b"LSDL"
_HEADER = struct.Struct("<4sBBHHHii12x")
_HASHED = np.dtype(
    [("digest", "V16"), ("target", "<i4", 2), ("corner", "<i4", 2), ("flip", "?"), ("alpha", "?")]
)
_DTYPES: tuple[CacheDtype, ...] = ("float32", "float16")


class Variant(NamedTuple):
    """One of the forms in which a picture is trained on.

    Attributes:
        digest: of its content.
        size: upright (height, width) of the picture.
        target: of the crop.
        flip: whether it is mirrored.
        alpha: whether its transparency counts as its mask.
    """

    digest: bytes
    size: Size
    target: Size
    flip: bool
    alpha: bool = False


FORMS = np.dtype([("digest", "V16"), ("size", "<i4", 2), ("target", "<i4", 2), ("flip", "?"), ("alpha", "?")])
"""Variants in an array."""


def forms_of(variants: Sequence[Variant]) -> np.ndarray:
    """Variants as an array `n` of `FORMS`."""
    return np.array([tuple(variant) for variant in variants], FORMS)


@dataclass(frozen=True)
class Recipe:
    """What a cache's latents depend on beside the pictures.

    Attributes:
        encoder: identity of the VAE.
        dtype: what they are kept in.
        crop: where pictures are cropped.
    """

    encoder: str
    dtype: CacheDtype = "float32"
    crop: Where = "random"

    @cached_property
    def _salt(self) -> bytes:
        text = repr((VERSION, self.encoder, self.dtype))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def corner(self, variant: Variant) -> Corner | None:
        """Top left of a variant's crop; None where that depends on its mask, see `drawn_corner`."""
        corners = self._corners(forms_of([variant]))
        return None if corners is None else (int(corners[0, 0]), int(corners[0, 1]))

    def _corners(self, forms: np.ndarray) -> Int[np.ndarray, "n 2"] | None:
        if self.crop == "mask":
            return None
        room = _cover_sizes(forms["size"], forms["target"]) - forms["target"]
        return room // 2 if self.crop == "center" else (_shares(forms) * (room + 1)).astype(np.int64)

    def drawn_corner(self, variant: Variant, box: tuple[int, int, int, int] | None) -> Corner:
        """Top left of a variant's crop, given the box of what the mask shows in the scaled picture."""
        if (known := self.corner(variant)) is not None:
            return known
        rng = np.random.default_rng([*variant.digest, *variant.target])
        cover, flip = cover_size(variant.size, variant.target), float(variant.flip)
        crop = draw_crop(cover, variant.target, rng, flip=flip, where="mask", box=box)
        return crop.top, crop.left

    def key(self, variant: Variant) -> bytes:
        """What a variant's moments are kept under: all that they depend on."""
        return self.keys(forms_of([variant])).tobytes()

    def keys(self, forms: np.ndarray) -> np.ndarray:
        """Those of many variants: an array `n` of `FORMS` gives one of `KEY`."""
        packed, corners = np.zeros(len(forms), _HASHED), self._corners(forms)
        for name in ("digest", "target", "flip", "alpha"):
            packed[name] = forms[name]
        packed["corner"] = -1 if corners is None else corners
        return np.frombuffer(_hashed(packed, self._salt), KEY)


def _hashed(rows: np.ndarray, salt: bytes = b"") -> bytes:
    """16 bytes of each row, one after the other."""
    data, step = rows.tobytes(), rows.itemsize
    return b"".join(
        [
            hashlib.blake2b(data[at : at + step], digest_size=16, key=salt).digest()
            for at in range(0, len(data), step)
        ]
    )


def _shares(forms: np.ndarray) -> Float[np.ndarray, "n 2"]:
    """How far down and across each crop lies, from 0 to below 1; the same for both flips."""
    packed = np.zeros(len(forms), _HASHED)
    packed["digest"], packed["target"] = forms["digest"], forms["target"]
    return (np.frombuffer(_hashed(packed), "<u8").reshape(-1, 2) >> 11) * 2.0**-53


def _cover_sizes(sizes: Int[np.ndarray, "n 2"], targets: Int[np.ndarray, "n 2"]) -> Int[np.ndarray, "n 2"]:
    """As `cover_size`, of many."""
    scales = (targets / sizes).max(1, keepdims=True)
    return np.maximum(targets, np.rint(sizes * scales).astype(np.int64))


def pack_moments(
    mean: Float[Tensor, "c lh lw"],
    std: Float[Tensor, "c lh lw"],
    corner: Corner,
    mask: Float[Tensor, "1 lh lw"] | None,
    dtype: CacheDtype,
) -> bytes:
    """A variant's moments, mask and corner as bytes.

    Raises:
        ValueError: they are not finite, or too large for the dtype.
    """
    parts = [part.to("cpu", getattr(torch, dtype)) for part in (mean, std, mask) if part is not None]
    if not all(bool(part.isfinite().all()) for part in parts):
        fault = (
            "they overflow float16; set data.cache_dtype=float32"
            if mean.isfinite().all()
            else ("the VAE overflowed: it must run in float32 or bfloat16")
        )
        raise ValueError(f"its latents are not finite ({fault})")
    header = _HEADER.pack(_MAGIC, _DTYPES.index(dtype), mask is not None, *mean.shape, *corner)
    return b"".join([header, *(part.numpy().tobytes() for part in parts)])


class Entry(NamedTuple):
    """What is known of an entry beside its values."""

    dtype: CacheDtype
    masked: bool
    shape: tuple[int, int, int]
    corner: Corner

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the moments, and of the mask."""
        channels, height, width = self.shape
        each = height * width * (2 if self.dtype == "float16" else 4)
        return 2 * channels * each, each * self.masked


def read_entry(value: bytes | memoryview) -> Entry:
    """The header of what `pack_moments` gave. Raises ValueError where it is something else."""
    magic, dtype, masked, *shape, top, left = _HEADER.unpack_from(value)
    if magic != _MAGIC or dtype >= len(_DTYPES):
        raise ValueError("it holds something else than latents")
    entry = Entry(_DTYPES[dtype], bool(masked), tuple(shape), (top, left))
    if len(value) != _HEADER.size + sum(entry.nbytes):
        raise ValueError(f"expected {_HEADER.size + sum(entry.nbytes)} bytes, got {len(value)}")
    return entry


class Kept(NamedTuple):
    """An entry, in the dtype that it is kept in."""

    mean: Float[Tensor, "c lh lw"]
    std: Float[Tensor, "c lh lw"]
    mask: Float[Tensor, "1 lh lw"] | None
    corner: Corner


def unpack_moments(value: bytes | memoryview) -> Kept:
    """What `pack_moments` got. Raises ValueError where it is something else."""
    found = _found(value, (0, 0))
    moments, mask = (
        None if part is None else torch.from_numpy(part.copy()).view(getattr(torch, read_entry(value).dtype))
        for part in (found.moments, found.mask)
    )
    assert moments is not None
    return Kept(moments[0].contiguous(), moments[1].contiguous(), mask, found.corner)


class Found(NamedTuple):
    """A variant from the cache. Whole numbers hold the bits of its floats, since a trainer of half precision
    rounds whatever floats a batch has; `floats_of` gives them back. The arrays lie in the cache's file: they
    are good as long as its reader is.
    """

    moments: Int[np.ndarray, "2 c lh lw"]
    mask: Int[np.ndarray, "1 lh lw"] | None
    size: Size
    corner: Corner


def floats_of(kept: Int[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """The float32 values of `Found`'s whole numbers."""
    return kept.view(torch.float16 if kept.dtype == torch.int16 else torch.float32).float()


def one_everywhere(mask: np.ndarray) -> np.ndarray:
    """A mask of the same kind that counts everything in full: one of bytes, or one of `Found`."""
    if mask.dtype == np.uint8:
        return np.full_like(mask, 255)
    return np.ones(mask.shape, f"f{mask.itemsize}").view(mask.dtype)


class LatentReader:
    """Reads the variants that a batch needs. It may be forked and pickled at any time.

    Args:
        parts: of the cache.
        recipe: what the latents depend on.
        facts: of each source, by the names that draws have for them.
        alpha: names of the sources whose transparency is a mask.
    """

    def __init__(
        self, parts: Parts, recipe: Recipe, facts: Mapping[str, Facts], alpha: frozenset[str] = frozenset()
    ) -> None:
        self.parts, self.recipe, self.facts, self.alpha = parts, recipe, dict(facts), alpha

    def variant(self, draw: Draw, flip: bool) -> Variant:
        """What a draw asks for."""
        digest, size = self.facts[draw.source][draw.image]
        return Variant(digest, size, (draw.height, draw.width), flip, draw.source in self.alpha)

    def read(self, draws: Sequence[Draw], flips: Sequence[bool]) -> list[Found]:
        """What is kept for each draw.

        Raises:
            OSError: something is missing or damaged.
        """
        variants = [self.variant(draw, flip) for draw, flip in zip(draws, flips, strict=True)]
        keys = self.recipe.keys(forms_of(variants)).tobytes()
        values = self.parts.values([keys[at : at + KEY.itemsize] for at in range(0, len(keys), KEY.itemsize)])
        found = []
        for draw, variant, value in zip(draws, variants, values, strict=True):
            try:
                if value is None:
                    raise ValueError("it is not there any more")
                found.append(_found(value, variant.size))
            except ValueError as error:
                raise OSError(
                    f"{draw.source}: image {draw.image} in the cache {self.parts.folder}: {error}; start the "
                    "run again, which computes what is missing"
                ) from error
        return found


def _found(value: bytes | memoryview, size: Size) -> Found:
    entry = read_entry(value)
    kept = np.frombuffer(value, "<i2" if entry.dtype == "float16" else "<i4", offset=_HEADER.size)
    channels, height, width = entry.shape
    moments = kept[: 2 * channels * height * width].reshape(2, *entry.shape)
    mask = kept[moments.size :].reshape(1, height, width) if entry.masked else None
    return Found(moments, mask, size, entry.corner)
