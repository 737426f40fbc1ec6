"""Image folders as a source of training examples, checked once before anything expensive starts."""

import logging
import os
import posixpath
from collections import Counter
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import Float, Int

from lit_sd.data.caption_rules import Caption, CaptionRule
from lit_sd.data.captions import (
    BadCaptions,
    CaptionLines,
    Details,
    FolderTexts,
)
from lit_sd.data.decoding import ImageFacts
from lit_sd.data.folder_files import (
    EXTENSIONS,
    Listing,
    check_partners,
    find_partners,
    foreign,
    ids_of,
    inspect_files,
    judge_bad,
    judge_missing,
    list_folder,
    no_folder,
    other_kind,
    repeat_by_folder,
)
from lit_sd.data.source import Record, Source

log = logging.getLogger(__name__)

BadFiles = Literal["error", "skip"]
MissingCaptions = Literal["error", "skip", "empty", "prompt", "folder"]


class FolderSource(Source):
    """Images below a folder, with captions.

    Captions come from `prompt` where it is set, else from `metadata.jsonl` or `metadata.csv` and from text
    files beside the images. With `missing_captions="prompt"` it is the other way round: the prompt serves
    images that have no caption of their own. Rows of the tables may also give a weight, a mask, a control
    image and an id.
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
        caption_lines: CaptionLines = "join",
        bad_captions: BadCaptions = "error",
        weight: int | float = 1.0,
        repeats: int = 1,
        rule: CaptionRule | None = None,
        limit: int | None = None,
        bad_files: BadFiles = "error",
        max_bad_share: int | float = 0.5,
        missing_captions: MissingCaptions = "error",
        verify: bool = True,
        repeat_folders: bool = False,
        mask_root: str | os.PathLike | None = None,
        control_root: str | os.PathLike | None = None,
        alpha_mask: bool = False,
    ) -> None:
        """
        Args:
            root: the folder; subfolders are read too.
            name: what messages call this source.
            key: config key of `root`, for messages.
            prompt: one caption for all images.
            caption_ext: extension of the caption files; None tries `.txt`, then `.caption`. Setting it
                leaves the tables' captions aside.
            caption_column: key of the caption in the tables.
            caption_lines: how a text file is read, and `bad_captions`: see
                `lit_sd.data.captions.FolderTexts`.
            weight: what this source's mean loss counts.
            repeats: how often an epoch draws each image.
            rule: how a draw's caption comes of the stored ones.
            limit: use the first so many images only.
            bad_files: what to do about images that can't be read.
            max_bad_share: with `bad_files="skip"`, the share of bad files beyond which it is an error after
                all.
            missing_captions: what to do about single images without caption; `folder` takes the name of the
                folder that they are in, `cat` of `10_cat`. That none has one is an error but for `folder`.
            verify: decode each file once at set-up; False reads the headers only of JPEG and PNG files;
                other formats are decoded all the same.
            repeat_folders: draw the images of a subfolder named like `10_cat` ten times as often.
            mask_root: a folder of masks with the images' names, whatever their extensions.
            control_root: likewise of control images.
            alpha_mask: an image's transparency is its mask, where it has no other.

        Raises:
            ValueError: an option is out of its range, or `root` is unset.
            FileNotFoundError: `root` is no folder.
        """
        if root is None or not os.fspath(root).strip():
            raise ValueError(f"{key} is not set; set {key}=FOLDER to a folder of images")
        super().__init__(name, weight=weight, repeats=repeats, rule=rule, alpha_mask=alpha_mask)
        self.root = Path(root).expanduser().absolute()
        self.key, self.prompt, self.limit = key, prompt, limit
        self.caption_ext, self.caption_column = caption_ext, caption_column
        self.caption_lines, self.bad_captions = caption_lines, bad_captions
        self.bad_files, self.max_bad_share, self.missing_captions = bad_files, max_bad_share, missing_captions
        self.verify, self.repeat_folders = verify, repeat_folders
        roots = {"mask": mask_root, "control": control_root}
        self.partner_roots = {k: Path(r).expanduser().absolute() for k, r in roots.items() if r is not None}
        self._images: list[str] | None = None
        self._details: list[Details] = []
        self._ids: list[str] = []
        self._sizes = np.zeros((0, 2), np.int32)
        self._weights: np.ndarray | None = None
        self._check_options()
        self._check_roots()

    def _check_options(self) -> None:
        for option, choices in (
            ("bad_files", BadFiles),
            ("missing_captions", MissingCaptions),
            ("caption_lines", CaptionLines),
            ("bad_captions", BadCaptions),
        ):
            if (value := getattr(self, option)) not in get_args(choices):
                raise ValueError(f"data.{option}={value!r}; expected one of {', '.join(get_args(choices))}")
        if self.missing_captions == "prompt" and self.prompt is None:
            raise ValueError("data.missing_captions=prompt needs data.prompt, which is not set")

    def _check_roots(self) -> None:
        roots = {f"data.{kind}_root": root for kind, root in self.partner_roots.items()}
        for key, root in ({self.key: self.root} | roots).items():
            if not root.is_dir():
                raise FileNotFoundError(no_folder(key, root))

    def check(self) -> None:
        """Reads the folder once; later calls do nothing. `notes` then says what was found.

        Raises:
            ValueError: no images, bad files, missing captions, masks or control images, as the policies have
                it; every file is named.
        """
        if self._images is not None:
            return
        notes: list[str] = []
        listing = list_folder(self.root)
        texts = FolderTexts(
            self.root,
            listing.others,
            column=self.caption_column,
            extension=self.caption_ext,
            lines=self.caption_lines,
            bad=self.bad_captions,
        )
        details = self._told(listing, texts, notes)
        faults = [find_partners(kind, root, details) for kind, root in self.partner_roots.items()]
        facts, bad, animated = inspect_files(self.root, list(details), self.verify)
        faults.append(check_partners(self.root, details, facts, bad, self.verify))
        faults.append(judge_bad(bad, len(details), self.bad_files, self.max_bad_share, notes))
        faults.append(judge_missing(details, list(facts), self.missing_captions, self.prompt, notes))
        if any(faults):
            raise ValueError(f"{self.root}: " + "\n".join(fault for fault in faults if fault))
        images = [image for image in facts if image in details]
        if not images:
            raise ValueError(f"{self.root}: no image is left: {'; '.join(notes)}")
        self._keep({image: details[image] for image in images}, facts, notes)
        if moving := sum(image in animated for image in images):
            notes.append(f"{moving} images are animated or have several pages; the first one is used")
        others = [name for name in listing.others if name not in self.own_files]
        if strange := foreign(others, texts.extensions):
            notes.append(strange)
        self._images, self.notes = images, notes
        for note in notes:
            log.info("%s: %s", self.name, note)

    def _keep(self, details: dict[str, Details], facts: dict[str, ImageFacts], notes: list[str]) -> None:
        """Takes over what was found of the images that are trained on."""
        if told := repeat_by_folder(details, self.repeat_folders):
            notes.append(told)
        self._details = list(details.values())
        self._ids = ids_of(list(details), self._details)
        self._sizes = np.array([facts[image].size for image in details], np.int32)
        weights = np.array([told.weight for told in self._details])
        if not weights.any():
            raise ValueError(f"{self.root}: every image has weight 0, so that none would be drawn")
        self._weights = None if (weights == 1).all() else weights
        if alpha := sum(facts[image].alpha for image in details):
            where = ", which is their mask," if self.alpha_mask else ""
            notes.append(f"{alpha} images have transparency{where} and are laid on white")

    def _told(self, listing: Listing, texts: FolderTexts, notes: list[str]) -> dict[str, Details]:
        """What the folder says of each of its examples."""
        for_all = self.prompt if self.missing_captions != "prompt" else None
        rows = texts.rows(listing.images, needed=self.caption_ext is None and for_all is None)
        aside = {name for row in rows.values() for name in (row.mask, row.control)} - rows.keys()
        roots = [root for root in self.partner_roots.values() if self.root in root.parents]
        within = tuple(f"{root.relative_to(self.root).as_posix()}/" for root in roots)
        images = [name for name in listing.images if name not in aside and not name.startswith(within)]
        images = images[: self.limit]
        if not images:
            there = Counter(posixpath.splitext(name)[1].lower() or "none" for name in listing.others)
            raise ValueError(
                f"{self.key}={self.root} holds no images (looked for {' '.join(sorted(EXTENSIONS))}); "
                f"found {', '.join(f'{n} {ext}' for ext, n in there.most_common(8)) or 'nothing'}"
                f"{other_kind(listing.others)}"
            )
        details = {image: rows.get(image, Details()) for image in images}
        if for_all is not None:
            return {image: told._replace(captions=(Caption(for_all),)) for image, told in details.items()}
        beside = texts.sidecars([image for image, told in details.items() if not told.captions])
        for image, captions in beside.items():
            details[image] = details[image]._replace(captions=captions)
        texts.judge(notes)
        by_folder = self.missing_captions == "folder" and self.caption_ext is None
        if not by_folder and not any(told.captions for told in details.values()):
            raise ValueError(texts.none_found(images))
        return details

    def __len__(self) -> int:
        self.check()
        return len(self._sizes)

    def ids(self) -> list[str]:
        """Name of each image: its path below the folder, or the `id` of its row."""
        self.check()
        return self._ids

    def sizes(self, start: int = 0, stop: int | None = None) -> Int[np.ndarray, "n 2"]:
        """(height, width) of the images from `start` to before `stop`, upright."""
        self.check()
        return self._sizes[start:stop]

    def draw_weights(self, start: int = 0, stop: int | None = None) -> Float[np.ndarray, " n"] | None:
        """How often each turn draws each image; None is once."""
        self.check()
        return None if self._weights is None else self._weights[start:stop]

    def captions(self) -> list[str]:
        """All captions of all images; an empty one for an image that has none."""
        self.check()
        return [caption.text for told in self._details for caption in told.captions or (Caption(""),)]

    def captions_of(self, index: int) -> tuple[Caption, ...]:
        """An image's captions."""
        self.check()
        return self._details[index].captions

    def record(self, index: int) -> Record:
        """An example as it is stored.

        Raises:
            OSError: a file can't be read any more; the message names it.
        """
        image, mask, control = self._files(index)
        told = self._details[index]
        return Record(
            self._ids[index],
            image.read_bytes(),
            image.suffix.lower(),
            told.captions,
            mask=None if mask is None else mask.read_bytes(),
            control=None if control is None else control.read_bytes(),
            weight=told.weight,
            extra=told.extra,
        )

    def stamp(self, index: int) -> str | None:
        """Path, size and time of an example's files: while it stays, so do their bytes. None, where one is
        gone.
        """
        files = [path for path in self._files(index) if path is not None]
        try:
            return "\n".join(f"{path} {(s := path.stat()).st_size} {s.st_mtime_ns}" for path in files)
        except OSError:
            return None

    def _files(self, index: int) -> tuple[Path, Path | None, Path | None]:
        self.check()
        assert self._images is not None
        told = self._details[index]
        mask, control = (None if name is None else self.root / name for name in (told.mask, told.control))
        return self.root / self._images[index], mask, control
