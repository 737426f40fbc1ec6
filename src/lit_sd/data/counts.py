"""How many images of each shape the parts of a source hold: all that an epoch's plan has to know of them.

Counting reads every image's size. Of very many shards that takes minutes, so what was counted is kept.
"""

import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from jaxtyping import Float, Int, Real

from lit_sd.aside import write_aside
from lit_sd.data.transforms import Size

Part = tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"] | None]
"""Of each image of a part: its shape as `code_of` writes it, -1 where it is not drawn, and its weight; None
instead of weights is 1 for all.
"""


def code_of(shape: Size) -> int:
    """A shape as one number."""
    return shape[0] << 32 | shape[1]


@dataclass(frozen=True)
class Counts:
    """What a turn through a source draws.

    Attributes:
        sums: by shape, the weights of each part's images: whole numbers where nothing has a weight.
        held: images of each shape.
        content: tells apart which images have which shape and weight.
    """

    sums: dict[Size, Real[np.ndarray, " parts"]]
    held: dict[Size, int]
    content: str


def count(parts: int, part: Callable[[int], Part]) -> Counts:
    """Counts the images of each part.

    Args:
        parts: how many there are.
        part: gives one of them.
    """
    content = hashlib.sha256()
    sums: dict[int, np.ndarray] = {}
    held: dict[int, int] = {}
    for number in range(parts):
        codes, weights = part(number)
        content.update(codes.tobytes() + (b"" if weights is None else weights.tobytes()))
        for code in np.unique(codes[codes >= 0]).tolist():
            here = codes == code
            images = int(here.sum())
            kind = np.int64 if weights is None else np.float64
            sums.setdefault(code, np.zeros(parts, kind))[number] = (
                images if weights is None else weights[here].sum()
            )
            held[code] = held.get(code, 0) + images
    shapes = {code: (code >> 32, code & 0xFFFFFFFF) for code in held}
    return Counts(
        {shapes[code]: found for code, found in sums.items()},
        {shapes[code]: images for code, images in held.items()},
        content.hexdigest(),
    )


def kept(path: Path | None, parts: int, make: Callable[[], Counts]) -> Counts:
    """What was counted before, else what `make` counts, which is kept; of several processes one counts.

    Args:
        path: of the file to keep it in; None keeps nothing.
        parts: how many there are.
        make: counts.
    """
    if path is None:
        return make()
    if (found := _load(path, parts)) is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if (found := _load(path, parts)) is None:
                found = make()
                _save(path, found)
    return found


def _save(path: Path, counts: Counts) -> None:
    shapes = list(counts.sums)
    told = {"held": [counts.held[shape] for shape in shapes], "content": counts.content}
    table = np.stack([counts.sums[shape] for shape in shapes]) if shapes else np.zeros((0, 0), np.int64)
    arrays: dict[str, Any] = {
        "shapes": np.array(shapes, np.int64).reshape(-1, 2),
        "sums": table,
        "told": np.frombuffer(json.dumps(told).encode(), np.uint8),
    }
    write_aside(path, lambda file: np.savez_compressed(file, **arrays))


def _load(path: Path, parts: int) -> Counts | None:
    """None where there is none, or one that can't be read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            told, table = json.loads(arrays["told"].tobytes()), arrays["sums"]
            shapes = [(height, width) for height, width in arrays["shapes"].tolist()]
            if shapes and table.shape != (len(shapes), parts):
                return None
            held = dict(zip(shapes, told["held"], strict=True))
            return Counts(dict(zip(shapes, table, strict=True)), held, told["content"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
