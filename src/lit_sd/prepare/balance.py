"""Tags: how often each is there, weights that draw the rare ones more often, and captions that stress them.

An example's weight is the mean over its tags of (typical frequency / frequency) ** power, scaled so that the
mean of all is 1 and none is above a cap.

Source: Mahajan et al. 2018, arXiv:1805.00932, sec. 2.2 (inverse square-root resampling: power 0.5).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from lit_sd.prepare.database import Database
from lit_sd.prepare.settings import Settings

BATCH = 4096
LONGEST_TAG = 80
LEVELS = 3
"""A tag is repeated this often at most."""

STOPWORDS = frozenset(
    re.findall(
        r"\w+",
        "a an and are as at be by for from has have her his in into is it its near of off one onto or over "
        "some that the their there these this those to two up very was were which while who with",
    )
)
KEPT_CAPTIONS = (
    "SELECT captions.key, captions.k, text FROM captions WHERE captions.key >= 0 AND version IN (?, 2) "
    "AND captions.key NOT IN (SELECT key FROM verdicts) "
    "AND (captions.key, captions.k) NOT IN (SELECT key, k FROM faults) ORDER BY captions.key, captions.k"
)


def tags_of(texts: Iterable[str], kind: str) -> list[str]:
    """The tags in captions of one example, each once, in their order.

    Args:
        texts: the captions.
        kind: "comma" takes what stands between commas, "words" each word that says something.
    """
    found: dict[str, None] = {}
    for text in texts:
        text = text.lower()
        for part in text.split(",") if kind == "comma" else re.findall(r"[^\W_](?:[\w'’-]*\w)?", text):
            tag = " ".join(part.split())[:LONGEST_TAG]
            if tag and (kind == "comma" or (tag not in STOPWORDS and not tag.isdigit())):
                found[tag] = None
    return list(found)


def tag_kind(texts: Iterable[str]) -> str:
    """ "comma" where most captions are lists of short tags, else "words"."""
    lists = total = 0
    for text in texts:
        parts = [part for part in text.split(",") if part.strip()]
        total += 1
        lists += len(parts) >= 2 and len(text.split()) <= 3 * len(parts)
    return "comma" if 2 * lists > total else "words"


def kept_captions(database: Database, settings: Settings) -> Iterator[tuple[int, list[str]]]:
    """(key, captions) of each kept example that has any."""
    rows = database.rows(KEPT_CAPTIONS, (int(settings.normalise),))
    for key, group in groupby(rows, key=itemgetter(0)):
        yield key, [text for _, _, text in group]


def count_tags(database: Database, settings: Settings) -> None:
    """Fills the table of tags: in how many kept examples each stands."""
    kind: str = settings.tags
    if kind == "auto":
        sample = database.rows(f"{KEPT_CAPTIONS} LIMIT 10000", (int(settings.normalise),))
        kind = tag_kind(text for _, _, text in sample)
    counts: Counter[str] = Counter()
    with database.transaction():
        database.do("DELETE FROM tags")
        for _, texts in kept_captions(database, settings):
            counts.update(tags_of(texts, kind))
            if len(counts) > 16 * BATCH:  # the rest of memory's share is on disk
                _add(database, counts)
        _add(database, counts)
        database.put("tag kind", kind)


def _add(database: Database, counts: Counter[str]) -> None:
    database.many(
        "INSERT INTO tags VALUES (?, ?) ON CONFLICT (tag) DO UPDATE SET count = count + excluded.count",
        counts.items(),
    )
    counts.clear()


class Frequencies:
    """How often a tag is there, looked up; those asked for lately are remembered.

    Attributes:
        kind: how captions fall into tags.
        typical: the frequency of the tag in the middle, see `typical_count`.
    """

    def __init__(self, database: Database) -> None:
        self.kind: str = database.get("tag kind", "words")
        self.typical = typical_count(database)
        query = "SELECT count FROM tags WHERE tag = ?"

        @lru_cache(maxsize=1 << 16)
        def count(tag: str) -> int:
            row = database.connection.execute(query, (tag,)).fetchone()
            return 1 if row is None else row[0]

        self.count = count

    def weight(self, tags: Sequence[str], power: float) -> float:
        """What an example with these tags weighs, before all are scaled; 1 without any."""
        if not tags:
            return 1.0
        return sum((self.typical / self.count(tag)) ** power for tag in tags) / len(tags)

    def rarest(self, tags: Sequence[str]) -> str:
        """The rarest tag, once more for each halving of its frequency below the typical one, `LEVELS` times
        at most; of equals the first.
        """
        if not tags:
            return ""
        tag = min(tags, key=self.count)
        level = sum(self.count(tag) * 2**step <= self.typical for step in range(1, LEVELS))
        return ", ".join([tag] * (1 + level))


def typical_count(database: Database) -> float:
    """The frequency that half of all tags in captions have at most, each counted as often as it stands."""
    row = database.connection.execute(
        "SELECT count FROM (SELECT count, sum(count) OVER (ORDER BY count, tag) AS upto FROM tags) "
        "WHERE 2 * upto >= (SELECT sum(count) FROM tags) ORDER BY upto LIMIT 1"
    ).fetchone()
    return 1.0 if row is None else float(row[0])


def weigh(database: Database, settings: Settings) -> float:
    """Fills the table of weights; the scale by which `weight_of` makes their mean 1."""
    frequencies = Frequencies(database)
    rows = (
        (key, frequencies.weight(tags_of(texts, frequencies.kind), settings.balance))
        for key, texts in kept_captions(database, settings)
    )
    with database.transaction():
        database.do("DELETE FROM weights")
        database.many("INSERT INTO weights VALUES (?, ?)", rows)
        database.do(  # what has no captions counts as the middle does
            "INSERT OR IGNORE INTO weights SELECT key, 1 FROM images "
            "WHERE key >= 0 AND key NOT IN (SELECT key FROM verdicts)"
        )
        scale = scale_to_mean(database, settings.balance_max)
        database.put("weight scale", scale)
    return scale


def scale_to_mean(database: Database, cap: float) -> float:
    """The factor with which the mean of min(cap, factor * weight) is 1."""
    if not database.one("SELECT count(*) FROM weights"):
        return 1.0
    scale = 1 / database.one("SELECT avg(raw) FROM weights")
    for _ in range(100):
        mean = database.one("SELECT avg(min(?, raw * ?)) FROM weights", (cap, scale))
        if abs(mean - 1) < 1e-9:
            break
        scale /= mean
    return scale


def weight_of(raw: float, scale: float, cap: float) -> float:
    """An example's weight."""
    return min(cap, raw * scale)


def emphasised(template: str, caption: str, frequencies: Frequencies) -> str:
    """A caption with its rarest tag stressed as the template says; as it is, where it has no tag."""
    rare = frequencies.rarest(tags_of([caption], frequencies.kind))
    return template.format(caption=caption, rare=rare) if rare else caption
