"""Folders of drawn pictures for the tests of `lit_sd.prepare`, and a run over one."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from lit_sd.prepare.program import Request, prepare
from lit_sd.prepare.settings import Settings

Example = tuple[Image.Image | bytes, str | bytes | None]


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    """A picture like no other: smooth colours with some shapes on them."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 255, (5, 5, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y, side = rng.random(3) * (0.8, 0.8, 0.3) * min(width, height)
        colour = tuple(int(c) for c in rng.integers(0, 255, 3))
        draw.rectangle((x, y, x + side, y + side), fill=colour)
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_folder(root: Path, examples: dict[str, Example]) -> Path:
    """Images by name, each with its caption beside it; bytes are written as they are."""
    for name, (image, caption) in examples.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image if isinstance(image, bytes) else encoded(image))
        if caption is not None:
            text = caption if isinstance(caption, bytes) else caption.encode()
            path.with_suffix(".txt").write_bytes(text)
    return root


def run(data: Path, out: Path, form: str = "lmdb", **options: Any) -> list[str]:
    """`lit-sd prepare` in this process; what it says."""
    said: list[str] = []
    more = {name: options.pop(name) for name in ("answers", "dry_run", "overwrite") if name in options}
    read = {name: options.pop(name) for name in ("val", "kind", "read", "workers") if name in options}
    settings = Settings(**{"min_side": 32} | options)
    request = Request(str(data), out.with_name(f"{out.name}.prepare"), **{"workers": 1} | read)
    prepare(request, out, form, settings, say=said.append, **more)
    return said


def decisions(data: Path, out: Path, **options: Any) -> dict[str, dict[str, Any]]:
    """What becomes of each example, by id."""
    run(data, out, dry_run=True, **options)
    lines = (out.with_name(f"{out.name}.prepare") / "decisions.jsonl").read_text().splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def refused(data: Path, out: Path, **options: Any) -> dict[str, str]:
    """The rule that refuses, by id of the refused example."""
    rows = decisions(data, out, **options)
    return {name: row["rule"] for name, row in rows.items() if not row["kept"]}


def report_of(out: Path) -> dict[str, Any]:
    return json.loads((out.with_name(f"{out.name}.prepare") / "report.json").read_text())
