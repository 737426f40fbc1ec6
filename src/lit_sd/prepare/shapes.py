"""Which aspect-ratio bucket each example would be trained in."""

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np

from lit_sd.data.buckets import Buckets
from lit_sd.prepare.database import Database

BATCH = 4096


def count_shapes(database: Database, resolution: int, step: int, max_ratio: float, path: Path) -> list[dict]:
    """Readable examples by bucket, the fullest first; and a line of JSON for each into a file.

    Args:
        database: what was scanned.
        resolution: as `data.resolution`.
        step: as `data.bucket_step`.
        max_ratio: as `data.bucket_max_ratio`.
        path: of the file with `index`, `id` and `bucket` (height, width) of each.

    Raises:
        ValueError: a choice is out of its range.
    """
    buckets = Buckets((resolution,), step, max_ratio)
    counts: Counter[tuple[int, int]] = Counter()
    cursor = database.rows(
        "SELECT key, id, height, width FROM images WHERE key >= 0 AND height IS NOT NULL ORDER BY key"
    )
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        while rows := [row for row, _ in zip(cursor, range(BATCH), strict=False)]:
            shapes = buckets.assign(np.array([row[2:] for row in rows], np.int32)).tolist()
            for (key, name, *_), shape in zip(rows, shapes, strict=True):
                counts[shape[0], shape[1]] += 1
                line = {"index": key, "id": name, "bucket": shape}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    os.replace(new, path)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [{"height": height, "width": width, "count": count} for (height, width), count in ordered]
