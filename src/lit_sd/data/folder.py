"""Image folders as a source of training examples, checked once before anything expensive starts."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, get_args

from PIL import Image, UnidentifiedImageError

from lit_sd.data.buckets import listed
from lit_sd.data.captions import SIDECARS, find_captions
from lit_sd.data.transforms import ImageFacts, Size, inspect_image, read_image

log = logging.getLogger(__name__)

BadFiles = Literal["error", "skip"]
MissingCaptions = Literal["error", "skip", "empty", "prompt"]
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
    | {".jp2", ".ppm", ".pgm", ".pbm", ".pnm", ".tga"}
)


class Listing(NamedTuple):
    """Files below a folder, as sorted posix paths relative to it."""

    images: list[str]
    others: list[str]


def list_folder(root: Path) -> Listing:
    """All files below `root`, by extension; hidden ones, and macOS's `__MACOSX`, are passed over."""
    images: list[str] = []
    others: list[str] = []
    seen = set()
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back up
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(n for n in subfolders if not n.startswith(".") and n != "__MACOSX")
        for name in names:
            if name.startswith("."):
                continue
            relative = Path(folder, name).relative_to(root).as_posix()
            (images if PurePosixPath(name).suffix.lower() in EXTENSIONS else others).append(relative)
    return Listing(sorted(images), sorted(others))


class FolderSource:
    """Images below a folder, with captions.

    Captions come from `prompt` where it is set, else from `metadata.jsonl` and from text files beside the
    images. With `missing_captions="prompt"` it is the other way round: the prompt serves images that have no
    caption of their own.
    """

    own_files: tuple[str, ...] = ()
    """Files of this project in the folder, of which no user has to be told."""

    def __init__(
        self,
        root: str | os.PathLike | None,
        *,
        name: str = "images",
        key: str = "data.root",
        prompt: str | None = None,
        caption_ext: str | None = None,
        caption_column: str | None = None,
        weight: int | float = 1.0,
        repeats: int = 1,
        limit: int | None = None,
        bad_files: BadFiles = "error",
        max_bad_share: int | float = 0.5,
        missing_captions: MissingCaptions = "error",
        verify: bool = True,
    ) -> None:
        """
        Args:
            root: the folder; subfolders are read too.
            name: what messages call this source.
            key: config key of `root`, for messages.
            prompt: one caption for all images.
            caption_ext: extension of the caption files; None tries `.txt`, then `.caption`.
            caption_column: key of the caption in `metadata.jsonl`.
            weight: what this source's mean loss counts.
            repeats: how often an epoch draws each image.
            limit: use the first so many images only.
            bad_files: what to do about images that can't be read.
            max_bad_share: with `bad_files="skip"`, the share of bad files beyond which it is an error after
                all.
            missing_captions: what to do about single images without caption. That none has one is always an
                error.
            verify: decode each file once at set-up; False reads the headers only of JPEG and PNG files;
                other formats are decoded all the same.

        Raises:
            ValueError: an option is out of its range, or `root` is unset.
            FileNotFoundError: `root` is no folder.
        """
        if root is None or not os.fspath(root).strip():
            raise ValueError(f"{key} is not set; set {key}=FOLDER to a folder of images")
        self.root = Path(root).expanduser().absolute()
        self.name, self.key, self.prompt, self.limit = name, key, prompt, limit
        self.caption_ext, self.caption_column = caption_ext, caption_column
        self.weight, self.repeats = float(weight), repeats
        self.bad_files, self.max_bad_share, self.missing_captions = bad_files, max_bad_share, missing_captions
        self.verify = verify
        self.notes: list[str] = []
        self._images: list[str] | None = None
        self._captions: list[str] = []
        self._sizes: list[Size] = []
        self._check_options()

    def _check_options(self) -> None:
        for option, value, choices in (
            ("bad_files", self.bad_files, get_args(BadFiles)),
            ("missing_captions", self.missing_captions, get_args(MissingCaptions)),
        ):
            if value not in choices:
                raise ValueError(f"data.{option}={value!r}; expected one of {', '.join(choices)}")
        if self.missing_captions == "prompt" and self.prompt is None:
            raise ValueError("data.missing_captions=prompt needs data.prompt, which is not set")
        if self.repeats < 1 or not self.weight >= 0:
            raise ValueError(
                f"source {self.name}: expected repeats of 1 or more and a weight of 0 or more, "
                f"got repeats={self.repeats}, weight={self.weight}"
            )
        if not self.root.is_dir():
            raise FileNotFoundError(self._no_folder())

    def _no_folder(self) -> str:
        what = "is a file, not a folder" if self.root.exists() else "does not exist"
        return f"{self.key}={self.root} {what}; relative paths count from the folder you started in"

    def check(self) -> None:
        """Reads the folder once; later calls do nothing. `notes` then says what was found.

        Raises:
            ValueError: no images, bad files, or missing captions, as the policies have it; every file is
                named.
        """
        if self._images is not None:
            return
        notes: list[str] = []
        images, others = list_folder(self.root)
        images = images[: self.limit]
        if not images:
            there = Counter(PurePosixPath(name).suffix.lower() or "none" for name in others)
            raise ValueError(
                f"{self.key}={self.root} holds no images (looked for {' '.join(sorted(EXTENSIONS))}); "
                f"found {', '.join(f'{n} {ext}' for ext, n in there.most_common(8)) or 'nothing'}"
            )
        prompt = self.prompt
        if prompt is not None and self.missing_captions != "prompt":
            captions = dict.fromkeys(images, prompt)
        else:
            captions = find_captions(
                self.root, images, others, caption_ext=self.caption_ext, column=self.caption_column
            )
        facts, bad = inspect_files(self.root, images, self.verify)
        faults = [self._judge_bad(bad, len(images), notes), self._judge_missing(captions, list(facts), notes)]
        if any(faults):
            raise ValueError(f"{self.root}: " + "\n".join(fault for fault in faults if fault))
        self._images = [image for image in facts if image in captions]
        if not self._images:
            raise ValueError(f"{self.root}: no image is left: {'; '.join(notes)}")
        self._captions = [captions[image] for image in self._images]
        self._sizes = [facts[image].size for image in self._images]
        if alpha := sum(facts[image].alpha for image in self._images):
            notes.append(f"{alpha} images have transparency and are laid on white")
        unknown = [PurePosixPath(name) for name in others if name not in self.own_files]
        foreign = Counter(path.suffix.lower() or "none" for path in unknown)
        if strange := [f"{n} {ext}" for ext, n in foreign.most_common() if ext not in (*SIDECARS, ".jsonl")]:
            notes.append(f"files that are no images are passed over: {', '.join(strange[:8])}")
        self.notes = notes
        for note in notes:
            log.info("%s: %s", self.name, note)

    def _judge_missing(self, captions: dict[str, str], images: list[str], notes: list[str]) -> str | None:
        """Fills in captions, or returns what is wrong, as the policy has it."""
        missing = [image for image in images if image not in captions]
        if not missing:
            return None
        text = f"{len(missing)} of {len(images)} images have no caption: {listed(missing)}"
        if self.missing_captions == "error":
            return f"{text}; write them, or set data.missing_captions=skip|empty|prompt"
        if self.missing_captions != "skip":
            captions |= dict.fromkeys(
                missing, (self.prompt or "") if self.missing_captions == "prompt" else ""
            )
        notes.append(f"{text} (data.missing_captions={self.missing_captions})")
        return None

    def _judge_bad(self, bad: dict[str, str], total: int, notes: list[str]) -> str | None:
        """Returns what is wrong, or notes what is skipped, as the policy has it."""
        if not bad:
            return None
        text = f"{len(bad)} of {total} image files can't be read: " + listed(
            [f"{name} ({why})" for name, why in bad.items()]
        )
        if self.bad_files == "error":
            return f"{text}; remove them, or set data.bad_files=skip"
        if len(bad) > self.max_bad_share * total:
            return f"{text}; that is more than data.max_bad_share={self.max_bad_share:g} allows to skip"
        notes.append(f"{text}; they are skipped")
        return None

    def __len__(self) -> int:
        self.check()
        return len(self._sizes)

    def sizes(self) -> list[Size]:
        """(height, width) of each image, upright."""
        self.check()
        return self._sizes

    def ids(self) -> list[str]:
        """Name of each image: its path below the folder."""
        self.check()
        return self._images or []

    def captions(self) -> list[str]:
        """Caption of each image."""
        self.check()
        return self._captions

    def load(self, index: int) -> tuple[Image.Image, str]:
        """Image, upright and in RGB, and caption.

        Raises:
            OSError: the file can't be read any more; the message names it.
        """
        return read_image(self.root / self.ids()[index]), self._captions[index]


def inspect_files(
    root: Path, names: Sequence[str], decode: bool
) -> tuple[dict[str, ImageFacts], dict[str, str]]:
    """Facts of the files that are whole, and what is wrong with the others; reads in threads."""

    def inspect(name: str) -> ImageFacts | str:
        try:
            return inspect_image(root / name, decode)
        except UnidentifiedImageError:
            return "its content is no image"
        except Exception as error:
            return str(error).replace(str(root / name), name) or type(error).__name__

    with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as threads:
        results = list(threads.map(inspect, names))
    good = {name: result for name, result in zip(names, results, strict=True) if not isinstance(result, str)}
    return good, {
        name: result for name, result in zip(names, results, strict=True) if isinstance(result, str)
    }
