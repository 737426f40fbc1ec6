"""The demo's subject: five crops of the cat `chelsea` that scikit-image ships (CC0)."""

import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image

ROOT = "data/chelsea"
"""Where the crops go, seen from the folder that the command was started in."""
CROPS = {
    "head": (60, 0, 360, 300),
    "face": (120, 40, 360, 280),
    "ears": (110, 0, 390, 280),
    "left": (40, 0, 340, 300),
    "right": (125, 0, 425, 300),
}
"""(left, top, right, bottom) in the photograph's 451 × 300 pixels, all square."""


def write_if_default(root: str | os.PathLike | None, base: Path) -> None:
    """Write the crops where `root` is the default folder, seen from `base`, and does not exist yet."""
    if root is not None and Path(base, root) == base / ROOT and not Path(base, root).exists():
        write(base / ROOT)


def write(folder: Path) -> list[Path]:
    """Write the five crops as PNG files; all or none appear. Several processes may do this at once.

    Raises:
        ModuleNotFoundError: the extra `demo` is not installed.
    """
    photograph = chelsea()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, box in CROPS.items():
            photograph.crop(box).save(aside / f"{name}.png")
        aside.chmod(0o755)
        os.rename(aside, folder)
    except OSError:
        if not folder.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [folder / f"{name}.png" for name in CROPS]


def chelsea() -> Image.Image:
    """The photograph, 451 × 300. Raises ModuleNotFoundError without scikit-image."""
    try:
        from skimage import data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the demo's photos come with scikit-image: pip install 'lit-sd[demo]', or set data.root to a "
            "folder of your own"
        ) from error
    return Image.fromarray(data.chelsea())
