"""What packed kinds share: a record as bytes and back, which of the stored examples count, and the policy for
those that are faulty.

A packed record is the length of its header (4 bytes, little-endian), the header as JSON, and the encoded
files one after the other, just as they came.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import numpy as np
from jaxtyping import Bool, Int
from PIL import UnidentifiedImageError

from lit_sd.data.buckets import listed
from lit_sd.data.caption_rules import Caption
from lit_sd.data.decoding import inspect_bytes
from lit_sd.data.folder import BadFiles
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size

MissingCaptions = Literal["error", "skip", "empty", "prompt"]
PARTS = ("image", "mask", "control")
_KNOWN = ("id", "captions", "width", "height", "weight", "digest", "suffix", "lengths", "extra")
_LENGTH = 4


def pack(record: Record, size: Size, digest: bytes | None = None) -> bytes:
    """A record as bytes.

    Args:
        record: the example.
        size: its upright (height, width).
        digest: the record's, where it is known already.

    Raises:
        ValueError: what is known of it besides is no plain values, or its weight is negative or no number.
    """
    if not (math.isfinite(record.weight) and record.weight >= 0):
        raise ValueError(f"{record.id}: expected a weight of 0 or more, got {record.weight}")
    parts = {part: data for part in PARTS if (data := getattr(record, part)) is not None}
    header: dict[str, Any] = {
        "id": record.id,
        "captions": [caption._asdict() for caption in record.captions],
        "width": size[1],
        "height": size[0],
        "weight": record.weight,
        "digest": (digest or record.digest).hex(),
        "suffix": record.suffix,
        "lengths": {part: len(data) for part, data in parts.items()},
    }
    header |= {key: value for key, value in record.extra.items() if key not in _KNOWN}
    if clashing := {key: value for key, value in record.extra.items() if key in _KNOWN}:
        header["extra"] = clashing
    try:
        text = json.dumps(header).encode("ascii")  # escapes: file names may hold what UTF-8 can't
    except (TypeError, ValueError) as error:
        raise ValueError(f"{record.id}: {error}; expected plain values that JSON can hold") from error
    return b"".join((len(text).to_bytes(_LENGTH, "little"), text, *parts.values()))


def read_header(data: bytes | memoryview) -> dict[str, Any]:
    """The header of a packed record; what follows isn't touched.

    Raises:
        ValueError: it is no packed record.
    """
    return json.loads(bytes(data[_LENGTH : _header_end(data)]))


def unpack(data: bytes | memoryview) -> Record:
    """The record that `pack` got.

    Raises:
        ValueError: it is no packed record, or a part of one.
    """
    header, start = read_header(data), _header_end(data)
    parts: dict[str, bytes] = {}
    for part, length in header["lengths"].items():
        parts[part] = bytes(data[start : start + length])
        start += length
    if start != len(data) or "image" not in parts:
        raise ValueError(f"expected a record of {start} bytes, got {len(data)}")
    return Record(
        id=header["id"],
        suffix=header["suffix"],
        captions=tuple(Caption(**caption) for caption in header["captions"]),
        weight=header["weight"],
        extra={k: v for k, v in header.items() if k not in _KNOWN} | header.get("extra", {}),
        **parts,
    )


def _header_end(data: bytes | memoryview) -> int:
    return _LENGTH + int.from_bytes(data[:_LENGTH], "little")


def measure(data: bytes, whole: bool) -> Size:
    """Upright (height, width) of an encoded image.

    Args:
        data: the encoded file.
        whole: make sure too that what follows the header can be decoded.

    Raises:
        OSError: it can't be read, or is too long to be trained on.
    """
    try:
        return inspect_bytes(data, whole).size
    except UnidentifiedImageError as error:
        raise OSError("its content is no image") from error
    except Exception as error:  # whatever Pillow raises
        raise OSError(str(error) or type(error).__name__) from error


class Names(Sequence[str]):
    """Names that are found only when they are asked for.

    Args:
        length: how many there are.
        name_of: finds one, by index from 0.
        all_names: goes through all of them, where that can be done faster.
    """

    def __init__(
        self,
        length: int,
        name_of: Callable[[int], str],
        all_names: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self._length, self._name_of, self._all_names = length, name_of, all_names

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._name_of(i) for i in range(*index.indices(self._length))]
        return self._name_of(range(self._length)[index])

    def __iter__(self):
        return iter(self._all_names()) if self._all_names else map(self._name_of, range(self._length))


class Kept:
    """Which of the stored examples count: all but a few. An example's index counts these; its position, all.

    Args:
        total: how many are stored.
        skipped: positions of those that don't count.
    """

    def __init__(self, total: int, skipped: Iterable[int] = ()) -> None:
        self.total = total
        self.skipped: Int[np.ndarray, " k"] = np.unique(np.fromiter(skipped, np.int64))
        self._before: Int[np.ndarray, " k"] = self.skipped - np.arange(len(self.skipped))

    def __len__(self) -> int:
        return self.total - len(self.skipped)

    def position(self, index: int) -> int:
        """Where an example is stored.

        Raises:
            IndexError: there is no such example.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        return index + int(np.searchsorted(self._before, index, side="right"))

    def index(self, positions: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """How many examples count before each position."""
        return positions - np.searchsorted(self.skipped, positions, side="left")

    def mask(self, first: int, last: int) -> Bool[np.ndarray, " n"]:
        """Which of the positions from `first` to before `last` count."""
        counts = np.ones(last - first, bool)
        low, high = np.searchsorted(self.skipped, (first, last))
        counts[self.skipped[low:high] - first] = False
        return counts

    def select(self, start: int, stop: int | None, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Rows of the examples from `start` to before `stop`, of what `read` gives by positions."""
        start, stop, _ = slice(start, stop).indices(len(self))
        if start >= stop:
            return read(0, 0)
        first, last = self.position(start), self.position(stop - 1) + 1
        rows = read(first, last)
        return rows if last - first == stop - start else rows[self.mask(first, last)]


@dataclass(frozen=True)
class Policy:
    """What to do about examples that can't be read, and those without caption.

    Attributes:
        prompt: one caption for all; with `missing_captions="prompt"`, for those that have none.
        missing_captions: what to do about single examples without caption. That none has one is always an
            error.
        bad_files: what to do about images that can't be read.
        max_bad_share: with `bad_files="skip"`, the share of bad ones beyond which it is an error after all.

    Raises:
        ValueError: an option is out of its range.
    """

    prompt: str | None = None
    missing_captions: MissingCaptions = "error"
    bad_files: BadFiles = "error"
    max_bad_share: int | float = 0.5

    def __post_init__(self) -> None:
        for option, value, choices in (
            ("bad_files", self.bad_files, get_args(BadFiles)),
            ("missing_captions", self.missing_captions, get_args(MissingCaptions)),
        ):
            if value not in choices:
                raise ValueError(f"data.{option}={value!r}; expected one of {', '.join(choices)}")
        if self.missing_captions == "prompt" and self.prompt is None:
            raise ValueError("data.missing_captions=prompt needs data.prompt, which is not set")

    @property
    def one_for_all(self) -> bool:
        """Whether the stored captions don't matter."""
        return self.prompt is not None and self.missing_captions != "prompt"

    @property
    def skips_blank(self) -> bool:
        """Whether examples without caption don't count."""
        return self.missing_captions == "skip" and not self.one_for_all

    def captions(self, stored: tuple[Caption, ...]) -> tuple[Caption, ...]:
        """The captions that an example is trained with."""
        own = tuple(caption for caption in stored if caption.text.strip())
        if self.prompt is not None and (self.one_for_all or not own):
            return (Caption(self.prompt),)
        return own

    def judge(self, where: str, total: int, bad: Sequence[str], missing: Sequence[str]) -> list[str]:
        """What there is to say of the examples that are skipped or have no caption.

        Args:
            where: what messages call the dataset.
            total: how many examples are stored.
            bad: those that can't be read, with the reason.
            missing: those that can be read and have no caption of their own.

        Raises:
            ValueError: they are more than the policy lets pass; the message names them.
        """
        verdicts = (self._judge_bad(total, bad), self._judge_missing(total - len(bad), missing))
        if faults := [text for wrong, text in verdicts if wrong]:
            raise ValueError(f"{where}: " + "\n".join(faults))
        return [text for _, text in verdicts if text]

    def _judge_bad(self, total: int, bad: Sequence[str]) -> tuple[bool, str]:
        if not bad:
            return False, ""
        text = f"{len(bad)} of {total} images can't be read: {listed(bad)}"
        if self.bad_files == "error":
            return True, f"{text}; remove them, or set data.bad_files=skip"
        if len(bad) > self.max_bad_share * total:
            more = f"that is more than data.max_bad_share={self.max_bad_share:g} allows to skip"
            return True, f"{text}; {more}"
        return False, f"{text}; they are skipped"

    def _judge_missing(self, total: int, missing: Sequence[str]) -> tuple[bool, str]:
        if self.one_for_all or not missing:
            return False, ""
        if len(missing) == total:
            how = "data.prompt='…'" if self.prompt is None else "data.missing_captions=error"
            return True, f"none of the {total} images has a caption; set {how} to use one prompt for all"
        text = f"{len(missing)} of {total} images have no caption: {listed(missing)}"
        if self.missing_captions == "error":
            return True, f"{text}; write them, or set data.missing_captions=skip|empty|prompt"
        return False, f"{text} (data.missing_captions={self.missing_captions})"
