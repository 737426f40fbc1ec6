"""Examples that a page shows: which, at random but always the same, and their pictures in pages' form."""

import base64
import hashlib
import io
from collections.abc import Callable
from typing import Any

from PIL import Image

from lit_sd.data.decoding import decode
from lit_sd.prepare.database import Database
from lit_sd.prepare.examples import Input, Unreadable

REFUSED = "SELECT key FROM verdicts WHERE rule = '{}'"
KEPT = "SELECT key FROM images WHERE key >= 0 AND key NOT IN (SELECT key FROM verdicts)"


def drawn(database: Database, query: str, count: int, seed: int) -> list[int]:
    """So many keys of those that `query` gives, at random by `seed`, in a random order."""

    def place(key: int) -> bytes:
        return hashlib.blake2b(f"{seed} {key}".encode(), digest_size=8).digest()

    database.connection.create_function("place", 1, place, deterministic=True)
    return [key for (key,) in database.all(f"{query} ORDER BY place(key), key LIMIT ?", (count,))]


class Pictures:
    """Pictures of examples as URLs that hold them.

    Args:
        data: what has the keys 0 and up.
        val: what has the keys below.
        side: pixels of the longer side.
    """

    def __init__(self, data: Input, val: Input | None, side: int) -> None:
        self.data, self.val, self.side = data, val, side

    def url(self, key: int) -> str | None:
        """The picture as a `data:` URL; None where there is none to be shown."""
        source, index = (self.data, key) if key >= 0 else (self.val, -1 - key)
        if source is None:
            return None
        found = next(iter(source.read(index, index + 1)))
        if isinstance(found, Unreadable):
            return None
        try:
            image = decode(found.image, found.id, (self.side, self.side)).image
        except OSError:
            return None
        image.thumbnail((self.side, self.side), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=82)
        return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def shown(
    database: Database, key: int, pictures: Callable[[int], str | None], version: int
) -> dict[str, Any]:
    """What a page says of an example."""
    name, height, width, error = database.all(
        "SELECT id, height, width, error FROM images WHERE key = ?", (key,)
    )[0]
    texts = database.all(
        "SELECT text FROM captions WHERE key = ? AND version IN (?, 2) ORDER BY k", (key, version)
    )
    verdict = database.all("SELECT rule, detail FROM verdicts WHERE key = ?", (key,))
    return {
        "key": key,
        "id": name,
        "size": None if height is None else f"{width} × {height}",
        "error": error,
        "captions": [text for (text,) in texts],
        "rule": verdict[0][0] if verdict else None,
        "detail": verdict[0][1] if verdict else None,
        "picture": pictures(key),
    }
