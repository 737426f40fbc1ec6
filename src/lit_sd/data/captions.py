"""Captions of an image folder: text files beside the images, `metadata.jsonl`, or one prompt for all."""

import json
import posixpath
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath

from lit_sd.data.buckets import listed

SIDECARS = (".txt", ".caption")
COLUMNS = ("text", "caption", "prompt")
METADATA = "metadata.jsonl"


def find_captions(
    root: Path,
    images: Sequence[str],
    others: Sequence[str],
    *,
    caption_ext: str | None = None,
    column: str | None = None,
) -> dict[str, str]:
    """The captions that a folder holds, by image; images without one, or with a blank one, are left out.

    Rows of `metadata.jsonl` come first, text files beside the images (`cat.txt` for `cat.jpg`) fill in.
    Setting `caption_ext` leaves the metadata aside.

    Args:
        root: the folder.
        images: its images, as posix paths below `root`.
        others: its other files, likewise.
        caption_ext: extension of the text files, with or without the dot; None tries `SIDECARS`.
        column: key of the caption in `metadata.jsonl`; None takes the first of `COLUMNS` that a row has.

    Raises:
        ValueError: no image has a caption, a caption isn't UTF-8 text, or the metadata is faulty.
    """
    known = set(images)
    found: dict[str, str] = {}
    tables = [name for name in others if PurePosixPath(name).name == METADATA and caption_ext is None]
    for table in tables:
        found |= _from_metadata(root, table, known, column)
    extensions = SIDECARS if caption_ext is None else ("." + caption_ext.removeprefix("."),)
    present = set(others)
    for image in images:
        beside = (str(PurePosixPath(image).with_suffix(ext)) for ext in extensions)
        for name in beside:
            if image not in found and name in present:
                found[image] = read_caption(root / name)
    found = {image: caption for image, caption in found.items() if caption}
    if not found:
        raise ValueError(_none_found(root, images, others, extensions))
    return found


def read_caption(path: Path) -> str:
    """The text of a caption file, its lines joined by spaces.

    Raises:
        ValueError: the file isn't UTF-8.
    """
    try:
        return " ".join(path.read_text(encoding="utf-8-sig").split())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: the caption is not UTF-8 text ({error.reason}); save it as UTF-8"
        ) from error


def _from_metadata(root: Path, table: str, images: set[str], column: str | None) -> dict[str, str]:
    folder, found, strangers = posixpath.dirname(table), {}, []
    for number, line in enumerate((root / table).read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{root / table}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not a JSON object ({error.msg})") from error
        if not isinstance(row, dict) or not isinstance(row.get("file_name"), str):
            raise ValueError(f'{where}: expected {{"file_name": …, "text": …}}, got {line[:80]}')
        image = posixpath.normpath(posixpath.join(folder, row["file_name"].replace("\\", "/")))
        key = next((k for k in ([column] if column else COLUMNS) if k in row), None)
        if key is None:
            expected = column or ", ".join(COLUMNS)
            raise ValueError(
                f"{where}: no caption; expected the key {expected}, got {', '.join(row)}; "
                "set data.caption_column"
            )
        if row[key] is not None and not isinstance(row[key], str):
            raise ValueError(f"{where}: {key} should be a string, got {row[key]!r}")
        if image not in images:
            strangers.append(image)
        found[image] = " ".join((row[key] or "").split())
    if strangers:
        raise ValueError(
            f"{root / table} names {len(strangers)} images that are not in the folder: {listed(strangers)}; "
            "remove the lines or add the files"
        )
    return found


def _none_found(root: Path, images: Sequence[str], others: Sequence[str], extensions: Sequence[str]) -> str:
    stems = {str(PurePosixPath(image).with_suffix("")) for image in images}
    beside = Counter(
        PurePosixPath(name).suffix or "none"
        for name in others
        if str(PurePosixPath(name).with_suffix("")) in stems
    )
    there = ", ".join(f"{count} {ext}" for ext, count in beside.most_common()) or "no other files"
    hint = f"Set data.caption_ext={beside.most_common(1)[0][0].removeprefix('.')}, or " if beside else "Set "
    return (
        f"none of the {len(images)} images in {root} has a caption: looked for "
        f"{' and '.join(extensions)} files beside them and {METADATA}; found beside them: {there}. "
        f"{hint}data.prompt='…' for one prompt for all"
    )


def length_report(captions: Sequence[str], count_tokens: Callable[[str], int], limit: int = 77) -> str | None:
    """One line on the captions that the text encoder will cut, or None where it cuts none.

    Args:
        captions: all captions.
        count_tokens: tokens of a caption, with its start and end; the model's, since data knows no tokenizer.
        limit: tokens that the text encoder reads.
    """
    lengths = {caption: count_tokens(caption) for caption in dict.fromkeys(captions)}
    cut = [caption for caption in captions if lengths[caption] > limit]
    if not cut:
        return None
    longest = max(cut, key=lengths.__getitem__)
    return (
        f"{len(cut)} of {len(captions)} captions ({len(cut) / len(captions):.0%}) are longer than {limit} "
        f"tokens and are cut; the longest has {lengths[longest]}: {longest[:60]!r}…"
    )
