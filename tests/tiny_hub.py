"""Tiny Hugging Face datasets of nine examples, as files."""

import io
import os

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np
from datasets import Dataset, Features, Value
from PIL import Image

from lit_sd.data.hub import HubSource

IMAGE = datasets.Image()
ROWS = (3, 2, 4)
"""In each of three shards."""

CAPTIONS = [f"caption {i}" for i in range(9)]


def keep_caches_in(tmp_path, monkeypatch) -> None:
    """The library's caches are the test's own; no progress bars."""
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    datasets.disable_progress_bars()


def size(i: int) -> tuple[int, int]:
    return 8 + i, 20 - i


def png(i: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(i).integers(0, 255, (*size(i), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def cells(numbers, **columns) -> dict[str, list]:
    """Columns of the examples with these numbers; others by functions of the number."""
    made = {"image": lambda i: {"bytes": png(i), "path": f"{i}.png"}, "text": CAPTIONS.__getitem__} | columns
    return {name: [make(i) for i in numbers] for name, make in made.items()}


def parquet(folder, rows=ROWS, features=None, **columns):
    """Files of so many rows each."""
    folder.mkdir()
    first = 0
    for shard, count in enumerate(rows):
        data = cells(range(first, first + count), **columns)
        known = Features({"image": IMAGE, "text": Value("string")} | (features or {}))
        path = folder / f"train-{shard:05d}-of-{len(rows):05d}.parquet"
        Dataset.from_dict(data, features=known).to_parquet(str(path))
        first += count
    return folder


def saved(folder, features=None, **columns):
    known = Features({"image": IMAGE, "text": Value("string")} | (features or {}))
    Dataset.from_dict(cells(range(9), **columns), features=known).save_to_disk(folder)
    return folder


def opened(root, tmp_path, streaming: bool = False, **options) -> HubSource:
    return HubSource(root, streaming=streaming, cache_dir=tmp_path / "cache", **options)
