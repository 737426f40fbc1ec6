"""What may have been meant by a word that is none of those there are."""

import difflib
from collections.abc import Iterable


def hint(word: str, options: Iterable[str], head: str = "", all_else: bool = True) -> str:
    """`; nearest: …` for a misspelt word, else what there is."""
    names = sorted(set(options))
    if near := nearest(word, names):
        return f"; nearest: {head}{near}"
    return f"; there is {', '.join(names)}" if names and all_else and len(names) <= 60 else ""


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most like the word, if any is like it; of equals, the one that begins like it."""
    names = {name.lower(): name for name in sorted(options, reverse=True)}  # of equals, capitals first
    word = word.lower()
    found = difflib.get_close_matches(word, names, n=5, cutoff=0.6)
    best = max(
        found,
        key=lambda name: (similarity(word, name), common_start(word, name)),
        default=None,
    )
    return None if best is None else names[best]


def similarity(one: str, other: str) -> float:
    """From 0 to 1, as difflib measures it."""
    return difflib.SequenceMatcher(None, one, other).ratio()


def common_start(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def spread_by_shell(words: Iterable[tuple[str, str]]) -> list[str]:
    """What to say of keys to which a shell gave several shards, for braces that were not quoted: Hydra would
    take the last.

    Args:
        words: key and whole text of each override.
    """
    texts: dict[str, dict[str, None]] = {}
    for key, text in words:
        if text.endswith(".tar"):
            texts.setdefault(key, {})[text] = None
    return [
        f"{key} is given {len(found)} shards, of which the last would count ({', '.join(list(found)[:3])}…); "
        f"a shell makes several words of braces: quote them twice, '{key}=\"…\"'"
        for key, found in texts.items()
        if len(found) > 1
    ]
