"""What every kind of source gives: images with captions, by index.

A kind implements `check`, `__len__`, `ids`, `sizes` and `record`; what follows from these is written once.
All sizes are (height, width), of the upright image.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from lit_sd.data.caption_rules import Caption, CaptionRule
from lit_sd.data.decoding import decode, decode_scaled
from lit_sd.data.transforms import Size, pixels_of, scale_to


@dataclass(frozen=True)
class Record:
    """An example as it is stored: encoded bytes, just as they came.

    Attributes:
        id: names the example; the same in a folder and in what was packed from it.
        image: the encoded image file.
        suffix: of the image's file, with its dot and in lower case, like ".jpg".
        captions: one or several; none is an image without caption.
        mask: an encoded grey image of the same proportions: white counts in the loss, black does not.
        control: an encoded image of the same proportions, for ControlNets.
        weight: how often a turn through its source draws it; 0.5 is every second turn.
        extra: what else is known of it, as plain values.
    """

    id: str
    image: bytes
    suffix: str
    captions: tuple[Caption, ...] = ()
    mask: bytes | None = None
    control: bytes | None = None
    weight: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """16 bytes that tell its pixels apart: image, mask and control."""
        return content_digest(self.image, self.mask, self.control)


def content_digest(image: bytes, mask: bytes | None = None, control: bytes | None = None) -> bytes:
    """16 bytes that tell encoded images apart."""
    digest = hashlib.blake2b(image, digest_size=16)
    for part in (mask, control):
        digest.update(b"-" if part is None else b"+" + hashlib.blake2b(part, digest_size=16).digest())
    return digest.digest()


SHOWN_CAPTIONS, MEASURED = 10_000, 1_000_000
"""Captions that are looked at for reports, and images that are measured."""


class Picture(NamedTuple):
    """An example decoded, upright, and scaled to cover a size; its own `size` is the whole image's."""

    image: UInt8[np.ndarray, "h w 3"]
    size: Size
    captions: tuple[Caption, ...]
    mask: UInt8[np.ndarray, "h w 1"] | None = None
    control: UInt8[np.ndarray, "h w 3"] | None = None

    @property
    def nbytes(self) -> int:
        """Of all pixels."""
        return sum(part.nbytes for part in (self.image, self.mask, self.control) if part is not None)


class Source(ABC):
    """A set of images with captions.

    Attributes:
        name: what messages and `Draw`s call it.
        weight: what its mean loss counts.
        repeats: how often an epoch draws each image.
        rule: how a draw's caption comes of the stored ones.
        alpha_mask: an image's transparency is its mask, where it has no other.
        notes: lines for the report, once it is checked.
    """

    def __init__(
        self,
        name: str,
        *,
        weight: int | float = 1.0,
        repeats: int = 1,
        rule: CaptionRule | None = None,
        alpha_mask: bool = False,
    ) -> None:
        if repeats < 1 or not weight >= 0:
            raise ValueError(
                f"source {name}: expected repeats of 1 or more and a weight of 0 or more, "
                f"got repeats={repeats}, weight={weight}"
            )
        self.name, self.weight, self.repeats = name, float(weight), repeats
        self.rule, self.alpha_mask = rule or CaptionRule(), alpha_mask
        self.notes: list[str] = []

    @abstractmethod
    def check(self) -> None:
        """Reads once what set-up has to know; later calls do nothing.

        Raises:
            ValueError: what is there is empty or faulty; the message names it all.
            FileNotFoundError: nothing is there.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ids(self) -> Sequence[str]:
        """Name of each example; it may be found only when it is asked for."""

    @abstractmethod
    def sizes(self, start: int = 0, stop: int | None = None) -> Int[np.ndarray, "n 2"]:
        """Upright (height, width) of the examples from `start` to before `stop`."""

    @abstractmethod
    def record(self, index: int) -> Record:
        """An example as it is stored.

        Raises:
            OSError: it can't be read any more; the message names it.
        """

    def load(
        self, index: int, cover: Size | None = None, into: UInt8[np.ndarray, "th tw 3"] | None = None
    ) -> Picture:
        """An example decoded, and scaled to cover a size; None leaves it as large as it is.

        Args:
            index: of the example.
            cover: the size.
            into: where the image may be put, if it has that shape; the picture's `image` is this array then.

        Raises:
            OSError: it can't be read or decoded; the message names it.
        """
        record = self.record(index)
        where = f"{self.name}: {record.id}"
        image, size, alpha = decode_scaled(record.image, where, cover, into)
        mask = alpha if self.alpha_mask else None
        if record.mask is not None:
            mask = decode(record.mask, f"{where} (mask)").image.convert("L")
        control = None if record.control is None else decode(record.control, f"{where} (control)").image
        mask_pixels, control_pixels = (
            None if part is None else pixels_of(scale_to(part, image.shape[:2])) for part in (mask, control)
        )
        return Picture(image, size, record.captions, mask_pixels, control_pixels)

    def blocks(self) -> Int[np.ndarray, " b"]:
        """Where the parts begin that are read together, and the end: one part, where access is random; a
        shard each, where it is not. An epoch shuffles within parts, and the parts.
        """
        return np.array([0, len(self)])

    def draw_weights(self, start: int = 0, stop: int | None = None) -> Float[np.ndarray, " n"] | None:
        """How often each turn through the source draws each example: 2 is twice, 0.5 every second turn; None
        is once.
        """
        return None

    def counts_file(self, key: str) -> Path | None:
        """Where to keep what was counted of its parts under a key; None where counting again costs little."""
        return None

    def captions(self) -> Iterable[str]:
        """Captions of all examples, or of the first some thousands of very many, for reports."""
        return ()

    def report(self) -> list[str]:
        """Lines on what was found in it, once it is checked."""
        lines = self.notes
        if self.rule.wildcards:
            unknown = self.rule.unknown_names(islice(self.captions(), SHOWN_CAPTIONS))
            lines = [*lines, f"data.rule.wildcards lacks {unknown}"] if unknown else lines
        return [f"{self.name}: {line}" for line in lines]

    def identity(self) -> str:
        """Tells whether it holds the same examples in the same order as when training began."""
        digest = hashlib.sha256()
        for name in self.ids():
            digest.update(name.encode() + b"\0")
        return digest.hexdigest()[:16]

    def digest(self, index: int) -> bytes:
        """16 bytes that tell this example's pixels apart, for caches; a kind that knows them spares the
        reading.
        """
        return self.record(index).digest

    def stamp(self, index: int) -> str | None:
        """What changes when an example's files do, and is told without reading them ("path size mtime_ns" of
        each); None where its digest costs no more.
        """
        return None

    def captions_of(self, index: int) -> tuple[Caption, ...]:
        """An example's captions, where its pixels aren't needed."""
        return self.record(index).captions


def scaled_up(source: Source, side: int) -> list[str]:
    """A line on the images that are smaller than a square of this side, if there are any."""
    measured = min(len(source), MEASURED)
    small = int((source.sizes(0, measured).min(1) < side).sum())
    of = f" of the first {measured:,}" if measured < len(source) else ""
    return [f"{small} images{of} are smaller than data.resolution={side} and are scaled up"] if small else []
