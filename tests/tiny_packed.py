"""Tiny examples, and datasets packed from them."""

import io

import numpy as np
from PIL import Image

from lit_sd.data.caption_rules import Caption
from lit_sd.data.lmdb import LmdbWriter
from lit_sd.data.packed import lmdb_file, lmdb_writer
from lit_sd.data.source import Record

SHAPES = [(8, 6), (5, 9), (7, 7)]


def png(i: int, size: tuple[int, int] | None = None, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(i).integers(0, 255, (*(size or SHAPES[i % 3]), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def example(i: int) -> Record:
    return Record(f"{i % 2}/é{i}.png", png(i), ".png", (Caption(f"caption {i}"),))


def pack_all(out, records, **options) -> None:
    with LmdbWriter(out, **options) as writer:
        for i, record in enumerate(records):
            writer.write(record, SHAPES[i % 3])


def shorten_chunks(monkeypatch) -> None:
    """Columns in chunks of 4, so that a few examples fill several."""
    for module in (lmdb_file, lmdb_writer):
        monkeypatch.setattr(module, "CHUNK", 4)
