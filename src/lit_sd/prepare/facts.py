"""What is known of an example once it has been read: facts that no rule's threshold changes."""

import hashlib
import io
import math
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from lit_sd.data.decoding import decode
from lit_sd.data.folder_files import SAME_RATIO
from lit_sd.data.source import Record, content_digest
from lit_sd.data.transforms import Size
from lit_sd.prepare.caption_text import caption_facts, ftfy, normalise, tokenizer, valid
from lit_sd.prepare.database import printable
from lit_sd.prepare.examples import Unreadable

SMALL = 64
"""Side of the thumbnail that blankness, colours and the perceptual hash are taken from."""

CAPTION_ROW = "INSERT INTO captions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass
class ImageRow:
    """A row of the table `images`, without its key."""

    id: str
    error: str | None = None
    length: int = 0
    digest: bytes | None = None
    pixels: bytes | None = None
    parts: int = 0
    format: str | None = None
    mode: str | None = None
    alpha: int = 0
    animated: int = 0
    height: int | None = None
    width: int | None = None
    deviation: float | None = None
    colours: int | None = None
    phash: int | None = None
    colour: bytes | None = None
    masked: int = 0
    controlled: int = 0
    weight: float = 1.0


COLUMNS = tuple(field.name for field in fields(ImageRow))
IMAGE_ROW = f"INSERT INTO images VALUES ({', '.join('?' * (1 + len(COLUMNS)))})"


def rows_of(key: int, found: Record | Unreadable) -> tuple[tuple, list[tuple]]:
    """The row of an example, and those of its captions."""
    if isinstance(found, Unreadable):
        return _flat(key, ImageRow(printable(found.id), printable(found.error))), []
    row = image_row(found)
    return _flat(key, row), caption_rows(key, found)


def _flat(key: int, row: ImageRow) -> tuple:
    return (key, *(getattr(row, name) for name in COLUMNS))


def image_row(record: Record) -> ImageRow:
    """What is known of an example's image; `error` says why, where it can't be decoded."""
    row = ImageRow(
        printable(record.id),
        length=len(record.image),
        digest=record.digest,
        parts=_parts(record),
        masked=record.mask is not None,
        controlled=record.control is not None,
        weight=record.weight,
    )
    try:
        if not record.image:
            raise OSError("the file is empty")
        with Image.open(io.BytesIO(record.image)) as image:
            row.format, row.mode = image.format, image.mode
            row.animated = int(getattr(image, "is_animated", False))
        decoded = decode(record.image, "the image")
        row.alpha = int(decoded.alpha is not None)
        row.height, row.width = decoded.size
        for name, data in (("mask", record.mask), ("control image", record.control)):
            if data is not None:
                require_alike(decoded.size, decode(data, f"the {name}").size, name)
        _look(decoded.image, row)
    except ImportError:
        raise
    except UnidentifiedImageError:
        row.error = "its content is no image"
    except Exception as error:  # Pillow raises what it likes on broken files
        row.error = printable(str(error) or type(error).__name__)
    return row


def require_alike(size: Size, other: Size, name: str) -> None:
    """Raises ValueError where a mask or control image has other proportions than its image, as training
    does.
    """
    if abs(math.log(size[0] * other[1] / (size[1] * other[0]))) > SAME_RATIO:
        raise ValueError(
            f"the {name} is {other[1]} x {other[0]}, the image {size[1]} x {size[0]}: other proportions; "
            "cut them alike"
        )


def _parts(record: Record) -> int:
    """Tells mask and control apart, for images that are the same; 0 is none of both."""
    if record.mask is None and record.control is None:
        return 0
    return int.from_bytes(content_digest(b"", record.mask, record.control)[:7])


def _look(image: Image.Image, row: ImageRow) -> None:
    """Fills in what the pixels say."""
    pixels = hashlib.blake2b(f"{image.size}".encode(), digest_size=16)
    pixels.update(image.tobytes())
    row.pixels = pixels.digest()
    small = image.resize((SMALL, SMALL), Image.Resampling.BOX)
    row.deviation = deviation(small)
    codes = (np.asarray(small) >> 3).reshape(-1, 3) @ np.array([1, 32, 1024])
    row.colours = int(np.count_nonzero(np.bincount(codes)))
    row.phash = perceptual_hash(small)
    row.colour = small.resize((2, 2), Image.Resampling.BOX).tobytes()


def deviation(image: Image.Image) -> float:
    """Standard deviation of the channel that deviates most; its outermost 1 % on both sides count as the rest
    does, so that a speck makes no picture of an empty page.
    """
    counts = np.array(image.histogram(), np.float64).reshape(3, 256)
    shares = counts.cumsum(1) / counts.sum(1, keepdims=True)
    low, high = (shares > 0.01).argmax(1), (shares >= 0.99).argmax(1)
    levels = np.arange(256).clip(low[:, None], high[:, None])
    weights = counts / counts.sum(1, keepdims=True)
    means = (weights * levels).sum(1, keepdims=True)
    return float(np.sqrt((weights * (levels - means) ** 2).sum(1)).max())


def perceptual_hash(image: Image.Image) -> int:
    """64 bits that change little where the picture does (imagehash's pHash), as a signed number.

    Raises:
        ModuleNotFoundError: imagehash is not installed.
    """
    bits = np.packbits(imagehash().phash(image).hash.reshape(-1))
    return int(bits.view(">i8")[0])


@cache
def imagehash() -> Any:
    """The library of perceptual hashes, imported where it is first needed."""
    try:
        import imagehash as module
        import scipy.fftpack  # noqa: F401 -- imagehash would import it at its first hash
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "duplicates are found by imagehash, which is not installed; pip install 'lit-sd[data]'"
        ) from error
    return module


def load_libraries() -> None:
    """Imports all that reading needs and this file does not.

    Raises:
        ModuleNotFoundError: one is not installed.
    """
    imagehash()
    ftfy()
    tokenizer()


def caption_rows(key: int, record: Record) -> list[tuple]:
    """Each caption as it came and as it is normalised; blank ones are none."""
    rows: list[tuple[Any, ...]] = []
    for k, caption in enumerate(record.captions):
        raw = valid(caption.text).strip()
        clean = normalise(caption.text)
        for version, text in ((2, raw),) if raw == clean else ((0, raw), (1, clean)):
            if text:
                rows.append((key, k, version, text, *caption_facts(text)))
    return rows
