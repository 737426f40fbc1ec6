"""Small tars of small pictures, packed with Python's own tarfile."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def picture(seed: int = 0, height: int = 16, width: int = 16) -> Image.Image:
    """Noise, the same for the same seed."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def encoded(image: Image.Image, format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def png(seed: int = 0, height: int = 16, width: int = 16) -> bytes:
    return encoded(picture(seed, height, width))


def jpeg(seed: int = 0, height: int = 16, width: int = 16) -> bytes:
    return encoded(picture(seed, height, width), "JPEG", quality=90)


def tar(
    path: Path, files: Mapping[str, bytes] | list[tuple[str, bytes]], format: int = tarfile.PAX_FORMAT
) -> Path:
    """A tar of these members, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as out:
        for name, data in files.items() if isinstance(files, Mapping) else files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            out.addfile(member, io.BytesIO(data))
    return path


def img2dataset_shard(path: Path, count: int, first: int = 0) -> Path:
    """A shard as img2dataset writes it: KEY.jpg, KEY.json, KEY.txt, of 16 x 24 pixels and more."""
    files: dict[str, bytes] = {}
    for i in range(first, first + count):
        key = f"{i:09d}"
        told = {"caption": f"picture {i}", "key": key, "status": "success", "width": 24, "height": 16 + i}
        files[f"{key}.jpg"] = jpeg(i, 16 + i, 24)
        files[f"{key}.json"] = json.dumps(told).encode()
        files[f"{key}.txt"] = f"picture {i}".encode()
    return tar(path, files)
