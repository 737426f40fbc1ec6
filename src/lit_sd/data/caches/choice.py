"""Whether and where what frozen encoders give is kept: `data.cache` and the options that go with it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lit_sd.data.caches.latents import CacheDtype

CacheMode = Literal["off", "memory", "disk"]


@dataclass(frozen=True)
class CacheChoice:
    """What is kept.

    Attributes:
        mode: "off" encodes each picture and caption each time. "memory" keeps what they gave, by the pixels
            after crop and flip, up to `megabytes`. "disk" encodes all before training, once for all runs, and
            keeps it in `folder`; crops are then drawn once for each picture.
        megabytes: of each process, with "memory".
        folder: with "disk".
        dtype: on disk; float16 takes half the room, and rounds.
        batch: pictures encoded at once to fill the disk; with more than one, their rounding depends on each
            other.
        texts: with "disk", whether captions are kept too.

    Raises:
        ValueError: an option is out of its range.
    """

    mode: CacheMode | bool = "off"  # YAML 1.1 reads a bare off as False
    megabytes: int | float = 0
    folder: str | os.PathLike | None = None
    dtype: CacheDtype = "float32"
    batch: int = 1
    texts: bool = True

    def __post_init__(self) -> None:
        mode = "off" if self.mode is False else self.mode
        object.__setattr__(self, "mode", mode)
        for option, value, choices in (
            ("cache", mode, get_args(CacheMode)),
            ("cache_dtype", self.dtype, get_args(CacheDtype)),
        ):
            if value not in choices:
                raise ValueError(f"data.{option}={value}: expected one of {', '.join(choices)}")
        if mode == "memory" and not self.megabytes > 0:
            raise ValueError(f"data.cache_mb={self.megabytes}: expected more than 0 with data.cache=memory")
        if mode == "disk" and (self.folder is None or not os.fspath(self.folder).strip()):
            raise ValueError(
                "data.cache_dir is not set; data.cache=disk needs a folder, data.cache_dir=FOLDER"
            )
        if self.batch < 1:
            raise ValueError(f"data.cache_batch={self.batch}: expected 1 or more")

    @property
    def path(self) -> Path:
        """The folder of a cache on disk."""
        assert self.folder is not None
        return Path(self.folder).expanduser().absolute()
