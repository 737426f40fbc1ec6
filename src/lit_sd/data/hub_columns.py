"""Rows of a Hugging Face dataset as records: which columns they come from."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any

from PIL import Image

from lit_sd.data.caption_rules import Caption
from lit_sd.data.packed.packing import measure
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size
from lit_sd.spelling import nearest

_SUFFIXES = {"JPEG": ".jpg", "MPO": ".jpg", "TIFF": ".tif", "JPEG2000": ".jp2", "PPM": ".ppm"}


def datasets_library() -> ModuleType:
    """Hugging Face's `datasets`.

    Raises:
        ModuleNotFoundError: it isn't installed; the message says how to.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name} is needed for datasets of the Hugging Face hub: pip install 'lit-sd[data]'"
        ) from error
    return datasets


@dataclass(frozen=True)
class Columns:
    """Names of the columns that an example comes from; all but the image's may be absent.

    Attributes:
        image: encoded images.
        caption: a text, or a list of texts, or a list of `{"text": …, "weight": …}`.
        mask: encoded images.
        control: encoded images.
        weight: how often a turn draws the example.
        id: what it is called; without, its number.
    """

    image: str
    caption: str | None = None
    mask: str | None = None
    control: str | None = None
    weight: str | None = None
    id: str | None = None

    @property
    def images(self) -> list[str]:
        """Columns of encoded images."""
        return [column for column in (self.image, self.mask, self.control) if column is not None]

    def used(self) -> dict[str, str]:
        """Those that are set, by what they are for."""
        return {role: column for role, column in asdict(self).items() if column is not None}

    def check(self, where: str, features: Mapping[str, Any]) -> None:
        """Makes sure that a dataset has the columns, and that they hold what they should.

        Raises:
            ValueError: it hasn't; the message lists what it has.
        """
        faults = []
        for role, column in self.used().items():
            if column not in features:
                near = nearest(column, features)
                faults.append(
                    f"data.{role}_column={column}: there is no such column; there is {', '.join(features)}"
                    + (f"; nearest: {near}" if near else "")
                )
            elif expected := _mismatch(role, features[column]):
                faults.append(
                    f"data.{role}_column={column}: expected {expected}, got {features[column]}; name another "
                    "column, or convert this one"
                )
        if faults:
            raise ValueError(f"{where}: " + "\n".join(faults))

    def of(self, dataset: Any) -> Any:
        """The dataset with these columns alone, and images left encoded."""
        datasets = datasets_library()
        features = dataset.features
        dataset = dataset.select_columns(list(dict.fromkeys(self.used().values())))
        for column in self.images:
            if isinstance(features[column], datasets.Image):
                dataset = dataset.cast_column(column, datasets.Image(decode=False))
        return dataset

    def record(self, row: Mapping[str, Any], name: str) -> Record:
        """The example of a row.

        Args:
            row: values by column.
            name: what the example is called, where no column says it.

        Raises:
            OSError: an image is missing or can't be fetched.
        """
        data, path = _encoded(row[self.image])
        weight = None if self.weight is None else row[self.weight]
        return Record(
            id=name if self.id is None else str(row[self.id]),
            image=data,
            suffix=PurePosixPath(path or "").suffix.lower() or _suffix(data),
            captions=() if self.caption is None else captions_of(row[self.caption]),
            mask=_encoded_or_none(row, self.mask),
            control=_encoded_or_none(row, self.control),
            weight=1.0 if weight is None else float(weight),
        )


def _mismatch(role: str, feature: Any) -> str | None:
    """What the column should hold, where it doesn't."""
    kind = str(getattr(feature, "dtype", ""))
    if role in ("image", "mask", "control"):
        encoded = isinstance(feature, datasets_library().Image) or kind.endswith("binary")
        as_struct = isinstance(feature, Mapping) and "bytes" in feature
        return None if encoded or as_struct else "encoded images (a feature of kind Image, or binary)"
    if role == "caption":
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
        texts = str(getattr(inner, "dtype", "")).endswith("string")
        pairs = isinstance(inner, Mapping) and "text" in inner and inner is not feature
        return None if texts or pairs else "texts, or lists of texts"
    if role == "weight":
        return None if kind.startswith(("int", "uint", "float")) else "numbers"
    return None if kind.endswith("string") or kind.startswith(("int", "uint")) else "texts or whole numbers"


def _encoded(value: Any) -> tuple[bytes, str | None]:
    """Bytes of an image as `datasets` gives it undecoded, and its file's name."""
    if isinstance(value, bytes):
        return value, None
    data, path = (value or {}).get("bytes"), (value or {}).get("path")
    if data is None and path is not None:
        from datasets.utils.file_utils import xopen

        try:
            with xopen(path, "rb") as file:
                data = file.read()
        except Exception as error:  # whatever its filesystem raises
            raise OSError(f"{path}: {error}") from error
    if data is None:
        raise OSError("the image is missing")
    return data, path


def _encoded_or_none(row: Mapping[str, Any], column: str | None) -> bytes | None:
    return None if column is None or row[column] is None else _encoded(row[column])[0]


def captions_of(value: Any) -> tuple[Caption, ...]:
    """The captions that a cell holds: one, several, or none."""
    parts = value if isinstance(value, list | tuple) else [value]
    found = (
        Caption(part["text"] or "", float(part.get("weight") or 1.0)) if isinstance(part, Mapping) else part
        for part in parts
    )
    return tuple(Caption(part) if isinstance(part, str) else part for part in found if part is not None)


def _suffix(data: bytes) -> str:
    try:
        with Image.open(io.BytesIO(data)) as image:
            kind = image.format or ""
    except Exception:
        return ""
    return _SUFFIXES.get(kind, f".{kind.lower()}")


def rows_of(batch: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a batch of columns."""
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(batch, values, strict=True))


def number(position: int) -> str:
    """What a row without a name is called."""
    return f"{position:09d}"


def judge(
    columns: Columns, row: Mapping[str, Any], name: str, verify: bool
) -> tuple[Record, Size, str | None]:
    """The example of a row, its size, and what is wrong with it; then its size is 0, and it may be empty.

    Args:
        columns: where it comes from.
        row: values by column.
        name: what it is called, where no column says it.
        verify: decode the image; else its header is enough.
    """
    record = Record(name, b"", "")
    try:
        record = columns.record(row, name)
        size = measure(record.image, verify)
    except OSError as error:
        return record, (0, 0), str(error)
    return record, size, None
