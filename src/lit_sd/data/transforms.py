"""From an image file to pixels: upright RGB, scaled to cover, one seeded flip and crop.

All sizes are (height, width), in the order of SDXL's `time_ids`; PIL's own `size` is (width, height).
"""

import io
import warnings
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageCms

Size = tuple[int, int]

MAX_RATIO = 32
"""Longer images are refused: scaled to cover a square they would not fit into memory."""

TURNING_MARKS = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")
"""What a PNG that may be turned holds: its EXIF, or XMP's word for it."""

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


class Decoded(NamedTuple):
    """An image decoded: upright RGB on white, the upright (height, width) of the whole file, and its
    transparency where it has any (L, white is opaque).
    """

    image: Image.Image
    size: Size
    alpha: Image.Image | None


def decode(data: bytes, where: str, cover: Size | None = None) -> Decoded:
    """The image as people see it: upright, transparency on white, in RGB.

    Args:
        data: the encoded file.
        where: what messages call it.
        cover: the size that the image will be scaled down to cover. A JPEG of four times that, and more, is
            decoded at a half, a quarter or an eighth of its size, but at twice `cover` or more.

    Raises:
        OSError: it can't be decoded.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            turned = _orientation(image) in (5, 6, 7, 8) if image.format == "JPEG" else False
            whole = image.size
            if cover is not None and image.format == "JPEG":
                target = (cover[1], cover[0]) if turned else cover
                height, width = cover_size((image.height, image.width), target)
                image.draft(None, (2 * width, 2 * height))
            upright = _upright(image)
            size = _sides(whole, 6 if turned else 1) if image.format == "JPEG" else upright.size[::-1]
            alpha = None
            if upright.has_transparency_data:
                alpha = upright.convert("RGBA").getchannel("A")
            return Decoded(to_rgb(upright), size, alpha)
    except Exception as error:
        raise OSError(f"{where}: can't be read as an image: {error}") from error


def read_image(path: Path) -> Image.Image:
    """A file's image, as `decode` gives it.

    Raises:
        OSError: the file can't be read or decoded; the message names it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise OSError(f"{path}: can't be read as an image: {error}") from error
    return decode(data, str(path)).image


def inspect_image(path: Path, decode: bool = True) -> ImageFacts:
    """A file's facts, as `inspect_bytes` tells them. Raises OSError too where it can't be read."""
    return inspect_bytes(path.read_bytes(), decode)


def inspect_bytes(data: bytes, decode: bool = True) -> ImageFacts:
    """Size and transparency from an encoded image's header; with `decode`, also makes sure that the rest of
    it is whole.

    A JPEG is decoded at an eighth of its size and a PNG by its checksums, which find truncation at a fraction
    of the cost.

    Raises:
        Exception: whatever Pillow raises on a file that it can't read.
    """
    if not data:
        raise OSError("the file is empty")
    with Image.open(io.BytesIO(data)) as image:
        alpha = image.has_transparency_data
        # PNGs may carry EXIF after the pixels, where only a full decode finds it.
        late_exif = image.format == "PNG" and any(mark in data for mark in TURNING_MARKS)
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
            to_rgb(image)
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
        return image if image.mode == "RGB" else image.convert("RGB")
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


def mask_box(mask: Image.Image) -> tuple[int, int, int, int] | None:
    """(top, left, bottom, right) of what a mask shows, or None of an empty one."""
    box = mask.getbbox()
    return None if box is None else (box[1], box[0], box[3], box[2])


def cut(
    scaled: Image.Image, target: Size, crop: Crop, into: UInt8[np.ndarray, "h w c"] | None = None
) -> UInt8[np.ndarray, "h w c"]:
    """The pixels of a scaled image, flipped first, then cropped; `into` is where they are put.

    In that order the corner counts in the picture that the network sees, as SDXL's ids want it
    (arXiv:2307.01952, sec. 2.2).
    """
    height, width = target
    left = scaled.width - width - crop.left if crop.flip else crop.left
    window = scaled
    if scaled.size != (width, height):
        window = scaled.crop((left, crop.top, left + width, crop.top + height))
    if crop.flip:
        window = window.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.asarray(window).reshape(height, width, -1)
    if into is None:
        return pixels
    into[...] = pixels
    return into
