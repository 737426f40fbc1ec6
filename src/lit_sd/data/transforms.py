"""From a decoded image to what trains: scaled to cover, then one seeded flip and crop.

All sizes are (height, width), in the order of SDXL's `time_ids`; PIL's own `size` is (width, height).
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image

Size = tuple[int, int]


class Crop(NamedTuple):
    """One draw: whether the scaled image is flipped, and then the corner of the crop, (top, left)."""

    flip: bool
    top: int
    left: int


def pixels_of(image: Image.Image) -> UInt8[np.ndarray, "h w c"]:
    """The pixels of an image in a mode of 8 bits."""
    return np.asarray(image).reshape(image.height, image.width, -1)


def scale_to(image: Image.Image, size: Size) -> Image.Image:
    """The image scaled to a size, or itself where it has that already."""
    if (image.height, image.width) == size:
        return image
    return image.resize((size[1], size[0]), Image.Resampling.LANCZOS)


def cover_size(size: Size, target: Size) -> Size:
    """(height, width) of an image of `size`, scaled to cover `target`."""
    scale = max(target[0] / size[0], target[1] / size[1])
    return max(target[0], round(size[0] * scale)), max(target[1], round(size[1] * scale))


Where = Literal["random", "center", "mask"]
"""Where images are cropped: anywhere, in the middle, or so that what their mask shows is inside."""


def draw_crop(
    scaled: Size,
    target: Size,
    rng: np.random.Generator,
    *,
    flip: float,
    where: Where = "random",
    box: tuple[int, int, int, int] | None = None,
) -> Crop:
    """Flip with probability `flip`, then the corner of the crop.

    The generator is used the same number of times whatever the choices, so that one setting doesn't move
    another's draws.

    Args:
        scaled: size of the scaled image.
        target: of the crop.
        rng: where the draw comes from.
        flip: its probability.
        where: a uniform corner, the centred one, or with "mask" a uniform one of those whose crop holds the
            box, or else lies within it.
        box: (top, left, bottom, right) of what the mask shows, in the scaled image, unflipped; None is all.
    """
    flipped, down, across = rng.random(3)
    mirrored = bool(flipped < flip)
    if where == "center":
        return Crop(mirrored, (scaled[0] - target[0]) // 2, (scaled[1] - target[1]) // 2)
    top, left, bottom, right = (0, 0, *scaled) if box is None or where != "mask" else box
    if mirrored:
        left, right = scaled[1] - right, scaled[1] - left
    corner = [
        _corner(share, side, crop, low, high)
        for share, side, crop, low, high in (
            (down, scaled[0], target[0], top, bottom),
            (across, scaled[1], target[1], left, right),
        )
    ]
    return Crop(mirrored, *corner)


def _corner(share: float, side: int, crop: int, low: int, high: int) -> int:
    """Where a crop begins along one side, so that it holds what lies from `low` to `high`, or lies within."""
    first, last = sorted((high - crop, low))
    first, last = max(0, min(first, side - crop)), max(0, min(last, side - crop))
    return first + int(share * (last - first + 1))


def mask_box(mask: UInt8[np.ndarray, "h w 1"]) -> tuple[int, int, int, int] | None:
    """(top, left, bottom, right) of what a mask shows, or None of an empty one."""
    box = Image.fromarray(mask[..., 0]).getbbox()
    return None if box is None else (box[1], box[0], box[3], box[2])


def cut(
    scaled: UInt8[np.ndarray, "h w c"],
    target: Size,
    crop: Crop,
    into: UInt8[np.ndarray, "th tw c"] | None = None,
) -> UInt8[np.ndarray, "th tw c"]:
    """The pixels of a scaled image, flipped first, then cropped; `into` is where they are put.

    In that order the corner counts in the picture that the network sees, as SDXL's ids want it
    (arXiv:2307.01952, sec. 2.2).
    """
    height, width = target
    left = scaled.shape[1] - width - crop.left if crop.flip else crop.left
    window = scaled[crop.top : crop.top + height, left : left + width]
    if crop.flip:  # by PyTorch: a mirrored copy takes numpy ten times as long
        window = torch.from_numpy(window if window.flags.writeable else window.copy()).flip(1).numpy()
    if into is None:
        return np.ascontiguousarray(window)
    if crop.flip or scaled is not into:
        into[...] = window
    return into
