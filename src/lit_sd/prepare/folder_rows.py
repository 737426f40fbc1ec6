"""Rows of a folder's `metadata.jsonl` and `metadata.csv`, one after the other, however many there are.

Training refuses a faulty table; here its faults are told and passed over, since cleaning is what this is for.
"""

import csv
import json
import math
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_sd.data.captions import COLUMNS, PARTNERS
from lit_sd.prepare.caption_text import read_text

Row = dict[str, Any]
"""`captions` ([text, weight] each), `weight`, `mask`, `control`, `id`, `extra`."""


class Faults:
    """Counts what is wrong, and keeps the first lines on it."""

    def __init__(self, shown: int = 5) -> None:
        self.count, self.shown = 0, shown
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        self.count += 1
        if len(self.lines) < self.shown:
            self.lines.append(line)

    def notes(self) -> list[str]:
        """For the report."""
        more = self.count - len(self.lines)
        return self.lines + ([f"and {more} more faults like these"] if more else [])


def table_rows(root: Path, table: str, column: str | None, faults: Faults) -> Iterator[tuple[str, Row]]:
    """(image, what is said of it) of each row that can be read.

    Args:
        root: the folder.
        table: path of the table below it; files it names count from where it lies.
        column: key of the captions; None takes the first usual one.
        faults: where the others are told.
    """
    path, beside = root / table, posixpath.dirname(table)
    try:
        for where, raw in _csv_rows(path) if table.endswith(".csv") else _json_rows(path):
            if not isinstance(raw, dict) or not isinstance(raw.get("file_name"), str):
                faults.add(f"{table}, line {where}: it has no file_name, and is passed over")
                continue
            row = _row(raw, column, lambda fault, where=where: faults.add(f"{table}, line {where}: {fault}"))
            for kind in PARTNERS:
                row[kind] = row[kind] and _below(beside, row[kind])
            yield _below(beside, raw["file_name"]), row
    except (csv.Error, OSError, ValueError) as error:
        faults.add(f"{table}: it can't be read further: {error}")


def _below(folder: str, name: str) -> str:
    return posixpath.normpath(posixpath.join(folder, name.replace("\\", "/")))


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    wide = path.open("rb").read(2) in (b"\xff\xfe", b"\xfe\xff")
    lines: Any = path.open(encoding="utf-16") if wide else path.open("rb")
    with lines:
        for number, line in enumerate(lines, 1):
            text = line if wide else read_text(line)
            if not text.strip():
                continue
            try:
                yield number, json.loads(text)
            except json.JSONDecodeError:
                yield number, None


def _csv_rows(path: Path) -> Iterator[tuple[int, Any]]:
    wide = path.open("rb").read(2) in (b"\xff\xfe", b"\xfe\xff")
    encoding = "utf-16" if wide else "utf-8-sig"
    with path.open(encoding=encoding, errors="surrogateescape", newline="") as file:
        header = file.readline()
        names = {d: [name.strip('" \r\n') for name in header.split(d)] for d in ",;\t"}
        delimiter = next((d for d in names if "file_name" in names[d]), ",")
        reader = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        for row in reader:
            if row:
                fields = zip(names[delimiter], (field or None for field in row), strict=False)
                yield 1 + reader.line_num, dict(fields)


def _row(raw: dict[str, Any], column: str | None, fault: Any) -> Row:
    columns = (column,) if column else COLUMNS
    key = next((key for key in columns if key in raw), None)
    partners = {}
    for kind in PARTNERS:
        partners[kind] = raw.get(kind) or None
        if partners[kind] is not None and not isinstance(partners[kind], str):
            fault(f"{kind} is no path, and is passed over")
            partners[kind] = None
    known = {"file_name", "id", "weight", *PARTNERS, *COLUMNS, *columns}
    return {
        "captions": _captions(raw.get(key) if key else None, fault),
        "weight": _weight(raw.get("weight"), fault),
        **partners,
        "id": raw["id"] if isinstance(raw.get("id"), str) else None,
        "extra": {name: value for name, value in raw.items() if name not in known},
    }


def _captions(value: Any, fault: Any) -> list[list[Any]]:
    captions = []
    for item in value if isinstance(value, list) else [value]:
        text, weight = (item.get("text"), item.get("weight")) if isinstance(item, dict) else (item, None)
        if isinstance(text, str):
            captions.append([" ".join(text.split()), _weight(weight, fault)])
        elif item is not None:
            fault(f"{str(item)[:60]!r} is no caption, and is passed over")
    return captions


def _weight(value: Any, fault: Any) -> float:
    try:
        weight = math.nan if isinstance(value, bool) else float(1 if value is None else value)
    except (TypeError, ValueError):
        weight = math.nan
    if 0 <= weight < math.inf:
        return weight
    fault(f"the weight {value!r} is none, and 1 is taken")
    return 1.0


def merged(first: Row, then: Row) -> Row:
    """Two rows of one image as one."""
    texts = {text for text, _ in first["captions"]}
    return {
        "captions": first["captions"] + [pair for pair in then["captions"] if pair[0] not in texts],
        "weight": first["weight"] if then["weight"] == 1 else then["weight"],
        **{kind: then[kind] or first[kind] for kind in (*PARTNERS, "id")},
        "extra": first["extra"] | then["extra"],
    }
