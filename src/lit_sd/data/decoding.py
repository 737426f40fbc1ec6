"""From an image file to pixels: upright, RGB, transparency on white.

All sizes are (height, width), in the order of SDXL's `time_ids`; PIL's own `size` is (width, height).
"""

import io
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import simplejpeg
from jaxtyping import UInt8
from PIL import Image, ImageCms

from lit_sd.data.transforms import Size, cover_size, pixels_of, scale_to

MAX_RATIO = 32
"""Longer images are refused: scaled to cover a square they would not fit into memory."""

TURNING_MARKS = (b"eXIf", b"Raw profile type exif", b"tiff:Orientation")
"""What a PNG that may be turned holds: its EXIF, or XMP's word for it."""

JPEG_TURNING_MARKS = (b"Exif\0", b"tiff:Orientation")
"""The same of a JPEG."""

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
            return _decode(image, cover)
    except Exception as error:
        raise OSError(f"{where}: can't be read as an image: {error}") from error


def decode_scaled(
    data: bytes, where: str, cover: Size | None, into: UInt8[np.ndarray, "th tw 3"] | None = None
) -> tuple[UInt8[np.ndarray, "h w 3"], Size, Image.Image | None]:
    """Pixels scaled to cover a size, beside the size and the transparency that `decode` gives; None scales
    nothing. A JPEG that needs no scaling goes through libjpeg-turbo alone: the same pixels, sooner, and if
    `into` has their shape, they are put there.

    Raises:
        OSError: it can't be decoded.
    """
    if (pixels := _plain_jpeg(data, cover, into)) is not None:
        return pixels, (pixels.shape[0], pixels.shape[1]), None
    decoded = decode(data, where, cover)
    target = decoded.size if cover is None else cover_size(decoded.size, cover)
    return pixels_of(scale_to(decoded.image, target)), decoded.size, decoded.alpha


def _decode(image: Image.Image, cover: Size | None) -> Decoded:
    turned = _orientation(image) in (5, 6, 7, 8) if image.format == "JPEG" else False
    whole = image.size
    if cover is not None and image.format == "JPEG":
        target = (cover[1], cover[0]) if turned else cover
        height, width = cover_size((image.height, image.width), target)
        image.draft(None, (2 * width, 2 * height))
    upright = _upright(image)
    size = _sides(whole, 6 if turned else 1) if image.format == "JPEG" else upright.size[::-1]
    alpha = upright.convert("RGBA").getchannel("A") if upright.has_transparency_data else None
    return Decoded(to_rgb(upright), size, alpha)


def _plain_jpeg(
    data: bytes, cover: Size | None, into: UInt8[np.ndarray, "th tw 3"] | None
) -> UInt8[np.ndarray, "h w 3"] | None:
    """Pixels of a colour JPEG that is upright and needs no scaling; None of others, and where Pillow should
    say what is wrong.
    """
    if not data.startswith(b"\xff\xd8") or any(mark in data for mark in JPEG_TURNING_MARKS):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        stays = cover is None or cover_size((height, width), cover) == (height, width)
        if not stays or colours not in ("YCbCr", "RGB"):
            return None
        if into is None or into.shape[:2] != (height, width):
            return simplejpeg.decode_jpeg(data)
        simplejpeg.decode_jpeg(data, buffer=into)
    except ValueError:
        return None
    return into


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
