"""The pairs of OpenMoji's pictures and names that no training stage sees: the rule, and what it gave."""

import hashlib
import json
import random
import re
from collections import Counter
from importlib.resources import files

COUNT = 200


def words(caption: str) -> list[str]:
    """The words of a caption, lower case; a hyphen joins, so "medium-dark" is one word."""
    return re.findall(r"[\w'-]+", caption.lower())


def choose_holdout(
    pairs: dict[str, str], duplicates: set[str], count: int = COUNT, seed: int = 0
) -> list[str]:
    """The stems to hold out: a seeded order, taken while each word of the caption stays in three training
    captions.

    Only captions of two words and more are taken (composition is what is measured), and none whose picture
    another emoji shares.

    Raises:
        ValueError: fewer than `count` pairs can be held out.
    """
    left = Counter(word for caption in pairs.values() for word in set(words(caption)))
    order = sorted(pairs)
    random.Random(seed).shuffle(order)
    chosen: list[str] = []
    for stem in order:
        distinct = set(words(pairs[stem]))
        if len(distinct) < 2 or stem in duplicates or any(left[word] <= 3 for word in distinct):
            continue
        chosen.append(stem)
        left.subtract(distinct)
        if len(chosen) == count:
            return sorted(chosen)
    raise ValueError(
        f"only {len(chosen)} of {len(pairs)} pairs can be held out, wanted {count}; lower the count"
    )


def shared_pictures(pictures: dict[str, bytes]) -> set[str]:
    """The stems whose picture is, byte for byte, another's too."""
    by_digest: dict[str, list[str]] = {}
    for stem, content in pictures.items():
        by_digest.setdefault(hashlib.sha256(content).hexdigest(), []).append(stem)
    return {stem for stems in by_digest.values() if len(stems) > 1 for stem in stems}


def read_holdout() -> dict[str, str]:
    """`{file stem: caption}` of the shipped hold-out."""
    rows = json.loads(files("lit_sd").joinpath("assets", "openmoji", "holdout.json").read_text())
    return {row["file"].removesuffix(".svg"): row["caption"] for row in rows}
