"""What the text files of an image folder say of its images: files beside them, `metadata.jsonl` and
`metadata.csv`.
"""

import codecs
import csv
import io
import json
import math
import posixpath
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from lit_sd.data.buckets import listed
from lit_sd.data.caption_rules import Caption

CaptionLines = Literal["join", "each"]
BadCaptions = Literal["error", "latin-1"]
SIDECARS = (".txt", ".caption")
COLUMNS = ("text", "caption", "prompt")
TABLES = ("metadata.csv", "metadata.jsonl")
PARTNERS = ("mask", "control")

_BOMS = (  # UTF-32's begins with UTF-16's
    *((bom, "utf-32") for bom in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)),
    *((bom, "utf-16") for bom in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
)


class Details(NamedTuple):
    """What a folder says of one image.

    Attributes:
        captions: none, one or several.
        weight: how often a turn through the folder draws it.
        mask: path of its mask below the folder.
        control: path of its control image, likewise.
        id: its name, where that isn't its path.
        extra: what else its row holds.
    """

    captions: tuple[Caption, ...] = ()
    weight: float = 1.0
    mask: str | None = None
    control: str | None = None
    id: str | None = None
    extra: dict[str, Any] = {}  # noqa: RUF012  # never changed


class FolderTexts:
    """The text files of an image folder, read by one policy.

    Args:
        root: the folder.
        others: its files that are no images, as posix paths below `root`.
        column: key of the caption in tables; None takes the first of `COLUMNS` that a row has.
        extension: of the text files beside images, with or without the dot; None tries `SIDECARS`.
        lines: a text file is one caption, its lines joined by spaces; or each line is one.
        bad: what to do about files that aren't UTF-8, nor UTF-16 with its mark: an error, or read them as
            Latin-1 (Windows' own kind of it).
    """

    def __init__(
        self,
        root: Path,
        others: Sequence[str],
        *,
        column: str | None = None,
        extension: str | None = None,
        lines: CaptionLines = "join",
        bad: BadCaptions = "error",
    ) -> None:
        self.root, self.others, self.column, self.lines, self.bad = root, others, column, lines, bad
        self.extensions = SIDECARS if extension is None else ("." + extension.removeprefix(".").lower(),)
        self._strange: list[str] = []

    def rows(self, images: Sequence[str], *, needed: bool = True) -> dict[str, Details]:
        """What the tables say, by image. Several rows of one image add up their captions.

        Args:
            images: the folder's images, as posix paths below it.
            needed: each row has to hold a caption, or else a weight, mask or control image; if not,
                captions are passed over, and rows that name no image.

        Raises:
            ValueError: a table is faulty; the message names file and line.
        """
        known, found = set(images), dict[str, Details]()
        for table in (name for name in self.others if posixpath.basename(name) in TABLES):
            strangers, gone = [], []
            for where, row in self._rows_of(table, needed):
                image = _beside(table, row["file_name"])
                details = _details(where, row, self.column, needed)
                partners = {kind: getattr(details, kind) for kind in PARTNERS}
                partners = {kind: name and _beside(table, name) for kind, name in partners.items()}
                named = {name for name in partners.values() if name} - known
                gone += [name for name in sorted(named) if not (self.root / name).is_file()]
                if image not in known:
                    strangers.append(image)
                found[image] = _merged(found.get(image, Details()), details._replace(**partners))
            for names, what in ((strangers, "images"), (gone, "masks or control images")):
                if names:
                    raise ValueError(
                        f"{self.root / table} names {len(names)} {what} that are not in the folder: "
                        f"{listed(names)}; remove the lines or add the files"
                    )
        return found

    def sidecars(self, images: Sequence[str]) -> dict[str, tuple[Caption, ...]]:
        """Captions from files beside the images (`cat.txt` for `cat.jpg`), where there are any but blank."""
        split = [(posixpath.splitext(name), name) for name in reversed(self.others)]
        present = {stem + extension.lower(): name for (stem, extension), name in split}
        beside: dict[str, str] = {}
        for image in images:
            stem = posixpath.splitext(image)[0]
            for name in [stem + ext for ext in self.extensions if stem + ext in present][:1]:
                beside[image] = present[name]
        files = list(beside.values())
        parts = [files[start : start + 64] for start in range(0, len(files), 64)]
        with ThreadPoolExecutor(8) as threads:
            texts = threads.map(lambda part: [self._read(name) for name in part], parts)
        found = {}
        for image, text in zip(beside, chain.from_iterable(texts), strict=True):
            lines = text.splitlines() if self.lines == "each" else [text]
            found[image] = tuple(Caption(flat) for line in lines if (flat := " ".join(line.split())))
        return {image: captions for image, captions in found.items() if captions}

    def judge(self, notes: list[str]) -> None:
        """Notes what was read by the policy.

        Raises:
            ValueError: the policy does not allow it; the message names the files.
        """
        if not self._strange:
            return
        text = f"{self.root}: {len(self._strange)} files of captions are not UTF-8 text: "
        text += listed(sorted(self._strange))
        if self.bad == "error":
            raise ValueError(f"{text}; save them as UTF-8, or set data.bad_captions=latin-1")
        notes.append(f"{text}; they are read as Latin-1")

    def none_found(self, images: Sequence[str]) -> str:
        """What to say where no image has a caption."""
        stems = {posixpath.splitext(image)[0] for image in images}
        files = (posixpath.splitext(name) for name in self.others)
        beside = Counter(extension or "none" for stem, extension in files if stem in stems).most_common()
        there = ", ".join(f"{count} {ext}" for ext, count in beside) or "no other files"
        hint = f"Set data.caption_ext={beside[0][0].removeprefix('.')}, or " if beside else "Set "
        return (
            f"none of the {len(images)} images in {self.root} has a caption: looked for "
            f"{' and '.join(self.extensions)} files beside them and {' or '.join(TABLES)}; found beside "
            f"them: {there}. {hint}data.prompt='…' for one prompt for all"
        )

    def _read(self, name: str) -> str:
        data = (self.root / name).read_bytes()
        text = decode_text(data)
        if text is None:
            self._strange.append(name)
            text = data.decode("cp1252", "replace").replace("\0", "")
        return text

    def _rows_of(self, table: str, needed: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row, and how messages call it."""
        text, path = self._read(table), self.root / table
        if self._strange and self.bad == "error":
            return  # it will be refused; what is garbled gives misleading faults
        read = _csv_rows if table.endswith(".csv") else _json_rows
        for number, row in read(text, path):
            where = f"{path}, line {number}"
            if isinstance(row, dict) and isinstance(row.get("file_name"), str):
                yield where, row
            elif needed:
                raise ValueError(f'{where}: expected {{"file_name": …, "text": …}}, got {str(row)[:80]}')


def decode_text(data: bytes) -> str | None:
    """UTF-8 with or without its mark, UTF-16 or UTF-32 with it; None where it is none of these."""
    encoding = next((encoding for bom, encoding in _BOMS if data.startswith(bom)), "utf-8-sig")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):  # captions may hold what splitlines() splits at
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not a JSON object ({error.msg})") from error


def _csv_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    header = text.split("\n", 1)[0]
    delimiter = next(
        (d for d in ",;\t" if "file_name" in [name.strip('" \r') for name in header.split(d)]), ","
    )
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        names = [name.strip() for name in next(rows, [])]
        for row in rows:
            if len(row) > len(names):
                raise ValueError(
                    f"{path}, line {rows.line_num}: {len(row)} fields under {len(names)} names; put texts "
                    f"that hold {delimiter!r} in double quotes"
                )
            if row:
                yield rows.line_num, {name: field or None for name, field in zip(names, row, strict=False)}
    except csv.Error as error:
        raise ValueError(f"{path}, line {rows.line_num}: {error}") from error


def _beside(table: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(table), name.replace("\\", "/")))


def _details(where: str, row: dict[str, Any], column: str | None, needed: bool) -> Details:
    columns = (column,) if column else COLUMNS
    key = next((key for key in columns if key in row), None)
    if key is None and needed and not any(row.get(other) for other in ("weight", *PARTNERS)):
        raise ValueError(
            f"{where}: no caption; expected the key {', '.join(columns)}, got {', '.join(row)}; "
            "set data.caption_column"
        )
    for kind in PARTNERS:
        if row.get(kind) is not None and not isinstance(row[kind], str):
            raise ValueError(f"{where}: {kind} should be the path of an image, got {row[kind]!r}")
    known = {"file_name", "id", "weight", *PARTNERS, *COLUMNS, *columns}
    return Details(
        captions=_captions(where, key, row[key]) if key and needed else (),
        weight=_weight(where, row.get("weight")),
        mask=row.get("mask") or None,
        control=row.get("control") or None,
        id=row["id"] if isinstance(row.get("id"), str) else None,
        extra={name: value for name, value in row.items() if name not in known},
    )


def _captions(where: str, key: str, value: Any) -> tuple[Caption, ...]:
    if value is not None and not isinstance(value, str | list):
        raise ValueError(f"{where}: {key} should be a string, got {value!r}")
    captions = []
    for item in value if isinstance(value, list) else [value or ""]:
        text, weight = (item.get("text"), item.get("weight")) if isinstance(item, dict) else (item, None)
        if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ValueError(f'{where}: {key} should hold texts or {{"text": …, "weight": …}}, got {item!r}')
        if flat := " ".join(text.split()):
            captions.append(Caption(flat, _weight(where, weight)))
    if captions and not any(caption.weight for caption in captions):
        raise ValueError(f"{where}: all captions have weight 0")
    return tuple(captions)


def _weight(where: str, value: Any) -> float:
    try:
        weight = math.nan if isinstance(value, bool) else float(1 if value is None else value)
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ValueError(f"{where}: weight should be a number of 0 or more, got {value!r}")
    return weight


def _merged(first: Details, then: Details) -> Details:
    texts = {caption.text for caption in first.captions}
    return Details(
        first.captions + tuple(caption for caption in then.captions if caption.text not in texts),
        first.weight if then.weight == 1 else then.weight,
        then.mask or first.mask,
        then.control or first.control,
        then.id or first.id,
        first.extra | then.extra,
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
