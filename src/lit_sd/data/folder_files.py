"""Files of an image folder: which there are, whether they are whole, and what goes with what."""

import math
import os
import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, UnidentifiedImageError

from lit_sd.data.buckets import listed
from lit_sd.data.caption_rules import Caption
from lit_sd.data.captions import (
    PARTNERS,
    SIDECARS,
    TABLES,
    Details,
)
from lit_sd.data.decoding import ImageFacts, inspect_image

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"}
    | {".jp2", ".ppm", ".pgm", ".pbm", ".pnm", ".tga"}
)
MANY_FRAMES = frozenset({".gif", ".webp", ".png", ".apng", ".avif", ".tif", ".tiff"})
SAME_RATIO = math.log(1.01)
_REPEATED = re.compile(r"(\d+)_(.+)")


class Listing(NamedTuple):
    """Files below a folder, as sorted posix paths relative to it."""

    images: list[str]
    others: list[str]


def list_folder(root: Path) -> Listing:
    """All files below `root`, by extension; hidden ones, and macOS's `__MACOSX`, are passed over."""
    images: list[str] = []
    others: list[str] = []
    seen = set()
    base = len(os.path.join(root, ""))
    for folder, subfolders, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back up
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(n for n in subfolders if not n.startswith(".") and n != "__MACOSX")
        prefix = folder[base:].replace(os.sep, "/")
        for name in names:
            if not name.startswith("."):
                kind = images if os.path.splitext(name)[1].lower() in EXTENSIONS else others
                kind.append(posixpath.join(prefix, name))
    return Listing(sorted(images), sorted(others))


def other_kind(names: Sequence[str]) -> str:
    """What to say of a folder without images that another kind of source reads, by its files."""
    kinds = {"data.mdb": "lmdb", ".tar": "webdataset", ".arrow": "hub", ".parquet": "hub"}
    found = next((kind for end, kind in kinds.items() if any(name.endswith(end) for name in names)), None)
    return "" if found is None else f"; data={found} reads such folders"


def no_folder(key: str, root: Path) -> str:
    """What to say where a folder is expected."""
    what = "is a file, not a folder" if root.exists() else "does not exist"
    return f"{key}={root} {what}; relative paths count from the folder you started in"


def inspect_files(
    root: Path, names: Sequence[str], decode: bool
) -> tuple[dict[str, ImageFacts], dict[str, str], set[str]]:
    """Facts of the files that are whole, what is wrong with the others, and those of several frames; reads in
    threads.
    """

    def inspect(name: str) -> tuple[ImageFacts, bool] | str:
        path = root / name
        try:
            facts = inspect_image(path, decode)
            if path.suffix.lower() not in MANY_FRAMES:
                return facts, False
            with Image.open(path) as image:
                return facts, getattr(image, "n_frames", 1) > 1
        except UnidentifiedImageError:
            return "its content is no image"
        except Exception as error:
            return str(error).replace(str(path), name) or type(error).__name__

    parts = [names[start : start + 64] for start in range(0, len(names), 64)]  # a task each costs as much
    with ThreadPoolExecutor(min(32, 2 * (os.cpu_count() or 1))) as threads:
        found = threads.map(lambda part: [(name, inspect(name)) for name in part], parts)
        results = dict(result for part in found for result in part)
    whole = {name: result for name, result in results.items() if not isinstance(result, str)}
    bad = {name: result for name, result in results.items() if isinstance(result, str)}
    return {n: facts for n, (facts, _) in whole.items()}, bad, {n for n, (_, many) in whole.items() if many}


def find_partners(kind: str, root: Path, details: dict[str, Details]) -> str | None:
    """Fills in the masks, or control images, that lie in a folder of their own under the images' names.

    Args:
        kind: of `PARTNERS`.
        root: that folder.
        details: of each image; those that have one already keep it.

    Returns:
        What is wrong: the images that have none there, or several.
    """
    by_stem: dict[str, list[str]] = {}
    for name in list_folder(root).images:
        by_stem.setdefault(posixpath.splitext(name)[0], []).append(name)
    missing = []
    for image in [image for image, told in details.items() if getattr(told, kind) is None]:
        found = by_stem.get(posixpath.splitext(image)[0], [])
        found = [image] if image in found else found
        if len(found) == 1:
            partner: dict[str, Any] = {kind: str(root / found[0])}
            details[image] = details[image]._replace(**partner)
        else:
            missing.append(f"{image} (several: {listed(found)})" if found else image)
    if not missing:
        return None
    return (
        f"data.{kind}_root={root} lacks a file for {len(missing)} of {len(details)} images: "
        f"{listed(missing)}; give each one by the image's name, with any image extension"
    )


def check_partners(
    root: Path,
    details: Mapping[str, Details],
    facts: dict[str, ImageFacts],
    bad: dict[str, str],
    decode: bool,
) -> str | None:
    """Reads the masks and control images. An image whose own can't be read moves from `facts` to `bad`.

    Returns:
        What is wrong: those that differ from their image in proportions.
    """
    pairs = [(i, kind, name) for i in facts for kind in PARTNERS if (name := getattr(details[i], kind))]
    others, broken, _ = inspect_files(root, sorted({name for *_, name in pairs}), decode)
    unequal = []
    for image, kind, name in pairs:
        if name in broken:
            bad[image] = f"its {kind} {name}: {broken[name]}"
            facts.pop(image, None)
        elif image in facts:
            (height, width), (other_height, other_width) = facts[image].size, others[name].size
            if abs(math.log(height * other_width / (width * other_height))) > SAME_RATIO:
                unequal.append(f"{image} {height}x{width}, its {kind} {other_height}x{other_width}")
    if not unequal:
        return None
    return (
        f"{len(unequal)} masks or control images have other proportions than their images, as height x "
        f"width: {listed(unequal)}; cut them alike"
    )


def judge_missing(
    details: dict[str, Details], images: Sequence[str], policy: str, prompt: str | None, notes: list[str]
) -> str | None:
    """Fills in captions or takes images out of `details`, or returns what is wrong, as
    `data.missing_captions` has it.
    """
    missing = [image for image in images if not details[image].captions]
    if not missing:
        return None
    text = f"{len(missing)} of {len(images)} images have no caption: {listed(missing)}"
    if policy == "error":
        return f"{text}; write them, or set data.missing_captions=skip|empty|prompt|folder"
    if policy == "folder" and (top := [image for image in missing if "/" not in image]):
        return f"{text}; data.missing_captions=folder, but {listed(top)} lie in no subfolder"
    for image in missing:
        if policy == "skip":
            del details[image]
        elif policy != "empty":
            caption = prompt or "" if policy == "prompt" else folder_caption(image)
            details[image] = details[image]._replace(captions=(Caption(caption),))
    notes.append(f"{text} (data.missing_captions={policy})")
    return None


def judge_bad(
    bad: Mapping[str, str], total: int, policy: str, max_share: int | float, notes: list[str]
) -> str | None:
    """Returns what is wrong, or notes what is skipped, as `data.bad_files` has it."""
    if not bad:
        return None
    text = f"{len(bad)} of {total} image files can't be read: " + listed(
        [f"{name} ({why})" for name, why in bad.items()]
    )
    if policy == "error":
        return f"{text}; remove them, or set data.bad_files=skip"
    if len(bad) > max_share * total:
        return f"{text}; that is more than data.max_bad_share={max_share:g} allows to skip"
    notes.append(f"{text}; they are skipped")
    return None


def repeated_folder(image: str) -> tuple[str, str] | None:
    """Number and text of the innermost folder named like `10_cat`."""
    for name in reversed(image.split("/")[:-1]):
        if match := _REPEATED.fullmatch(name):
            return match[1], match[2]
    return None


def folder_caption(image: str) -> str:
    """The text of the innermost folder named like `10_cat`, else the name of the image's folder."""
    named = repeated_folder(image)
    return image.split("/")[-2] if named is None else named[1]


def ids_of(images: Sequence[str], details: Sequence[Details]) -> list[str]:
    """The rows' ids where no other image has the same, else paths."""
    wanted = Counter(told.id for told in details)
    paths = set(images)
    ids = [
        told.id if told.id and wanted[told.id] == 1 and (told.id == image or told.id not in paths) else image
        for image, told in zip(images, details, strict=True)
    ]
    # names of files need not be UTF-8
    return [name.encode("utf-8", "backslashreplace").decode() for name in ids]


def repeat_by_folder(details: dict[str, Details], repeat: bool) -> str | None:
    """Multiplies weights by the numbers in folders' names; returns what to tell of them.

    Args:
        details: of each image.
        repeat: do it; if not, it is only told that it could be done.
    """
    named = {image: folder for image in details if (folder := repeated_folder(image))}
    turns = {f"{times}_{text}": int(times) for times, text in named.values()}
    if repeat:
        for image, (times, _) in named.items():
            details[image] = details[image]._replace(weight=details[image].weight * int(times))
        shown = [f"{name} x{times}" for name, times in turns.items()] or ["none is named like 10_cat"]
        return f"draws of the images by folder: {listed(shown)}"
    weighted = any(details[image].weight != 1 for image in named)  # as `lit-sd prepare` left them
    if weighted or all(times == 1 for times in turns.values()):
        return None
    return (
        f"the numbers of these folders repeat nothing: {listed(list(turns))}; with "
        "data.repeat_folders=true their images would be drawn as often"
    )


def foreign(names: Sequence[str], extensions: Sequence[str]) -> str | None:
    """What to tell of files that nothing here reads, by extension; `extensions` are those of captions."""
    read = {*SIDECARS, *extensions, ".jsonl"}
    kinds = (posixpath.splitext(name)[1].lower() for name in names if posixpath.basename(name) not in TABLES)
    strange = Counter(kind or "none" for kind in kinds if kind not in read).most_common(8)
    told = ", ".join(f"{n} {kind}" for kind, n in strange)
    return f"files that are no images are passed over: {told}" if told else None
