"""From an image file to pixels: upright RGB, scaled to cover, one seeded flip and crop.

All sizes are (height, width), in the order of SDXL's `time_ids`; PIL's own `size` is (width, height).
"""

import io
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image, ImageCms
from torch import Tensor

Size = tuple[int, int]

MAX_RATIO = 32
"""Longer images are refused: scaled to cover a square they would not fit into memory."""

_TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each EXIF orientation (EXIF 2.32, table 4, tag 0x0112)."""


class ImageFacts(NamedTuple):
    """What set-up learns of an image: its upright (height, width), and whether it has transparency."""

    size: Size
    alpha: bool


class Crop(NamedTuple):
    """One draw: whether the scaled image is flipped, and then the corner of the crop, (top, left)."""

    flip: bool
    top: int
    left: int


def read_image(path: Path) -> Image.Image:
    """The image as people see it: upright, transparency on white, in RGB.

    Raises:
        OSError: the file can't be decoded; the message names it.
    """
    try:
        with Image.open(path) as image:
            return to_rgb(_upright(image))
    except Exception as error:
        raise OSError(f"{path}: can't be read as an image: {error}") from error


def inspect_image(path: Path, decode: bool = True) -> ImageFacts:
    """Size and transparency from the header; with `decode`, also makes sure that the rest of the file is
    whole.

    A JPEG is decoded at an eighth of its size and a PNG by its checksums, which find truncation at a fraction
    of the cost.

    Raises:
        Exception: whatever Pillow raises on a file that it can't read.
    """
    data = path.read_bytes()
    if not data:
        raise OSError("the file is empty")
    with Image.open(io.BytesIO(data)) as image:
        alpha = image.has_transparency_data
        # PNGs may carry EXIF after the pixels, where only a full decode finds it.
        late_exif = image.format == "PNG" and (b"eXIf" in data or b"Raw profile type exif" in data)
        if image.format == "JPEG":
            size = _sides(image.size, _orientation(image))
            if decode:
                image.draft(None, (max(1, image.width // 8), max(1, image.height // 8)))
                image.load()
        elif image.format == "PNG" and not late_exif:
            size = (image.height, image.width)
            if decode:
                image.verify()
        else:
            upright = _upright(image)
            size = (upright.height, upright.width)
        if max(size) > MAX_RATIO * min(size):
            raise ValueError(f"it is {size[0]} high and {size[1]} wide, more than {MAX_RATIO} to 1")
        if decode and image.mode in ("I", "F"):
            read_image(path)
        return ImageFacts(size, alpha)


def _orientation(image: Image.Image) -> int:
    # A photo with a broken EXIF block is still a photo.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return image.getexif().get(0x0112, 1)
    except Exception:
        return 1


def _sides(size: tuple[int, int], orientation: int) -> Size:
    width, height = size
    return (width, height) if orientation in (5, 6, 7, 8) else (height, width)


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # first: Pillow turns TIFFs while loading, and takes the tag away
    turn = _TURNED.get(_orientation(image))
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB of an image in any of Pillow's modes, transparency composited on white.

    16-bit grey is scaled by its full range. Modes I and F don't say theirs: the smallest of 1 (F only), 255
    (F only), 65535 and 2^31-1 that holds the largest value is taken.

    Raises:
        ValueError: a float image holds NaN or infinite values.
    """
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _wide_grey_to_rgb(image)
    if image.mode == "LAB":
        transform = ImageCms.buildTransform(
            ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB"
        )
        converted = ImageCms.applyTransform(image, transform)
        assert converted is not None  # None is for conversions in place
        return converted
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode in ("La", "1"):  # Pillow converts these in two steps only
        image = image.convert("LA" if image.mode == "La" else "L")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _wide_grey_to_rgb(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds NaN or infinite values")
    ranges = {"F": (1, 255, 65535, 2**31 - 1), "I": (65535, 2**31 - 1)}.get(image.mode, (65535,))
    top = next((full for full in ranges if values.max() <= full), values.max())
    grey = np.clip(np.rint(values * (255 / top)), 0, 255).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = 255
    return Image.fromarray(grey).convert("RGB")


def scale_to_cover(image: Image.Image, target: Size) -> Image.Image:
    """The image scaled, keeping its proportions, to the smallest size that covers `target`."""
    height, width = cover_size((image.height, image.width), target)
    return image.resize((width, height), Image.Resampling.LANCZOS)


def cover_size(size: Size, target: Size) -> Size:
    """(height, width) of an image of `size`, scaled to cover `target`."""
    scale = max(target[0] / size[0], target[1] / size[1])
    return max(target[0], round(size[0] * scale)), max(target[1], round(size[1] * scale))


def draw_crop(scaled: Size, target: Size, rng: np.random.Generator, *, flip: float, centre: bool) -> Crop:
    """Flip with probability `flip`, then a corner of the crop: a uniform one, or the centred one.

    The generator is used the same number of times whatever the choices, so that one setting doesn't move
    another's draws.
    """
    flipped, down, across = rng.random(3)
    spare_h, spare_w = scaled[0] - target[0], scaled[1] - target[1]
    if centre:
        return Crop(bool(flipped < flip), spare_h // 2, spare_w // 2)
    return Crop(bool(flipped < flip), int(down * (spare_h + 1)), int(across * (spare_w + 1)))


def cut(scaled: np.ndarray, target: Size, crop: Crop) -> Float[Tensor, "3 h w"]:
    """Pixels in [-1, 1] of a scaled image (h w 3, uint8): flipped first, then cropped.

    In that order the corner counts in the picture that the network sees, as SDXL's ids want it
    (arXiv:2307.01952, sec. 2.2).
    """
    if crop.flip:
        scaled = scaled[:, ::-1]
    height, width = target
    window = scaled[crop.top : crop.top + height, crop.left : crop.left + width]
    return torch.from_numpy(window.copy()).permute(2, 0, 1).contiguous().float() / 127.5 - 1
