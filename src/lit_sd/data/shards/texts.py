"""What stands in an example's text files: captions, and the JSON that this project packs with an image."""

import io
import json
import math
from collections.abc import Mapping
from typing import Any

from PIL import Image

from lit_sd.data.caption_rules import Caption
from lit_sd.data.folder import EXTENSIONS
from lit_sd.data.source import Record
from lit_sd.data.transforms import Size

OURS = ("id", "captions", "width", "height", "weight", "digest")
"""Keys of the JSON that this project packs; what else it holds is the record's `extra`."""
CAPTION_KEYS = ("caption", "text", "captions")


def parse_json(data: bytes) -> dict[str, Any]:
    """What the `.json` of an example holds.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        content = json.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"its .json can't be read ({error})") from error
    if not isinstance(content, dict):
        raise ValueError("its .json is no JSON object")
    return content


def is_ours(content: Mapping[str, Any] | None) -> bool:
    """Whether this project wrote the JSON."""
    return content is not None and all(key in content for key in OURS)


def captions_of(
    text: bytes | None, content: Mapping[str, Any] | None, caption_key: str | None
) -> tuple[Caption, ...]:
    """Captions of an example, but for blank ones; those of its text file come first.

    Raises:
        ValueError: what should be a caption is none.
    """
    stored: Any = None
    if content is not None and is_ours(content) and caption_key is None:
        stored = content["captions"]
    elif text is not None:
        try:
            stored = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"its caption is not UTF-8 text ({error.reason})") from error
        if not stored.strip():
            stored = None
    if stored is None and content is not None:
        keys = CAPTION_KEYS if caption_key is None else (caption_key,)
        stored = next((content[key] for key in keys if content.get(key)), None)
    return _listed(stored, joined=not is_ours(content))


def _listed(stored: Any, joined: bool) -> tuple[Caption, ...]:
    rows = [] if stored is None else stored if isinstance(stored, list) else [stored]
    found = []
    for row in rows:
        try:
            caption = (
                Caption(row["text"], float(row.get("weight", 1))) if isinstance(row, dict) else Caption(row)
            )
            if not isinstance(caption.text, str) or not caption.weight >= 0:
                raise TypeError
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected a caption, got {json.dumps(row)[:80]}") from error
        if caption.text.strip():
            found.append(caption._replace(text=" ".join(caption.text.split())) if joined else caption)
    return tuple(found)


def weight_of(content: Mapping[str, Any] | None) -> float:
    """How often a turn draws an example: 1, unless this project packed it with another weight.

    Raises:
        ValueError: it is no weight.
    """
    weight = content["weight"] if content is not None and is_ours(content) else 1.0
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        raise ValueError(f"its weight is {weight!r}; expected a number, 0 or more")
    return float(weight)


def extra_of(content: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the JSON holds beside what a `Record` has fields for."""
    if content is None or not is_ours(content):
        return dict(content or {})
    clashing = content.get("extra")
    own = (*OURS, "extra")
    return {k: v for k, v in content.items() if k not in own} | (
        clashing if isinstance(clashing, dict) else {}
    )


def packed_json(record: Record, size: Size) -> bytes:
    """The `.json` of a record, of which, with its files, `Record` can be made again.

    Raises:
        ValueError: its weight is no number from 0, or what is known of it besides is no plain values.
    """
    if not (math.isfinite(record.weight) and record.weight >= 0):
        raise ValueError(f"{record.id}: expected a weight of 0 or more, got {record.weight}")
    content: dict[str, Any] = {
        "id": record.id,
        "captions": [caption._asdict() for caption in record.captions],
        "width": size[1],
        "height": size[0],
        "weight": record.weight,
        "digest": record.digest.hex(),
    }
    own = (*OURS, "extra")
    content |= {key: value for key, value in record.extra.items() if key not in own}
    if clashing := {key: value for key, value in record.extra.items() if key in own}:
        content["extra"] = clashing
    try:
        return json.dumps(content).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{record.id}: {error}; expected plain values that JSON can hold") from error


def image_suffix(data: bytes, named: str = "") -> str:
    """The suffix, without its dot, of an image's file: `named` where it is an image's, else by content."""
    if named.lower() in EXTENSIONS:
        return named.lower()[1:]
    with Image.open(io.BytesIO(data)) as image:
        found = {"JPEG": "jpg", "MPO": "jpg", "JPEG2000": "jp2"}.get(
            image.format or "", (image.format or "").lower()
        )
    return found if f".{found}" in EXTENSIONS else "png"
