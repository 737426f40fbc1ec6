"""A folder that holds all the files at once that have met trainers in the field (F01–F05)."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

GOOD = (
    "UPPER.JPG",
    "animated.gif",
    "bom.png",
    "cmyk.jpg",
    "emoji.png",
    "grey16.png",
    "la.png",
    "latin1.png",
    "long.png",
    "one/same.png",
    "palette.png",
    "rgba.png",
    "turned.jpg",
    "two/same.png",
)
"""What can be trained on, in order."""
BAD = ("empty.png", "thread.png", "truncated.jpg")
CAPTIONS = {
    "bom.png": "with a mark before it",
    "emoji.png": "a cat 🐈 and a family 👩‍👩‍👧",
    "latin1.png": "café à la crème",
    "long.png": " ".join(f"word{i}" for i in range(120)),
}


def noise(seed: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def write_ugly(root: Path) -> Path:
    """Writes the folder; each image has a caption, `picture of NAME` where none is named above."""
    for folder in ("one", "two"):
        (root / folder).mkdir(parents=True)
    plain = {name: Image.fromarray(noise(i, 40, 48)) for i, name in enumerate(GOOD)}
    for name in ("bom.png", "emoji.png", "latin1.png", "long.png", "one/same.png", "two/same.png"):
        plain[name].save(root / name)
    plain["UPPER.JPG"].save(root / "UPPER.JPG", "JPEG", quality=95)
    plain["cmyk.jpg"].convert("CMYK").save(root / "cmyk.jpg", quality=95)
    halves = Image.new("RGB", (60, 20), "blue")
    halves.paste("red", (0, 0, 30, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    halves.save(root / "turned.jpg", exif=exif, quality=95)
    clear = plain["rgba.png"].copy()
    clear.putalpha(0)
    clear.save(root / "rgba.png")
    plain["la.png"].convert("LA").save(root / "la.png")
    ramp = np.linspace(0, 65535, 40 * 48).astype(np.uint16).reshape(40, 48)
    Image.fromarray(ramp).save(root / "grey16.png")
    plain["palette.png"].quantize(16).save(root / "palette.png", transparency=3)
    frames = [Image.fromarray(noise(90 + i, 40, 48)) for i in range(3)]
    frames[0].save(root / "animated.gif", save_all=True, append_images=frames[1:])
    Image.new("RGB", (2000, 1)).save(root / "thread.png")
    (root / "empty.png").write_bytes(b"")
    whole = io.BytesIO()
    Image.fromarray(noise(80, 64, 64)).save(whole, "JPEG")
    (root / "truncated.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    for name in (*GOOD, *BAD):
        text = CAPTIONS.get(name, f"picture of {name}")
        encoding = {"bom.png": "utf-8-sig", "latin1.png": "latin-1"}.get(name, "utf-8")
        (root / name).with_suffix(".txt").write_text(text, encoding=encoding)
    for name in ("Thumbs.db", ".DS_Store", "notes.md"):
        (root / name).write_bytes(b"foreign")
    return root
