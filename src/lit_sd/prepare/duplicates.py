"""Which examples repeat others, or the validation data. The largest are kept first, and what repeats none of
these.
"""

import tempfile
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from lit_sd.prepare.database import Database
from lit_sd.prepare.near import Clusters, Likeness, find_clusters, find_leaks, gather, keepers
from lit_sd.prepare.settings import Settings

LEFT = "SELECT * FROM images WHERE key >= 0 AND error IS NULL AND key NOT IN (SELECT key FROM verdicts)"
"""Examples that no rule has refused so far: none is refused for the sake of one that goes itself."""

LARGEST = "height * width DESC, length DESC, id, key"
HASHES = "key, phash, colour, parts"
LOOKS = "key, phash, colour, 0 AS parts"
"""The same, of the image alone."""


def likeness(settings: Settings) -> Likeness:
    """When two images count as near duplicates."""
    return Likeness(settings.near, settings.near_colour)


def refuse_duplicates(database: Database, settings: Settings) -> None:
    """Refuses all but the largest of those with the same pixels; then each that looks like a larger one that
    is kept.
    """
    if settings.judges("exact_duplicate"):
        _refuse(
            database,
            "exact_duplicate",
            f"SELECT key, first_value(key) OVER (PARTITION BY pixels, parts ORDER BY {LARGEST}) AS keeper "
            f"FROM ({LEFT})",
        )
    if settings.judges("near_duplicate"):
        _find_clusters(database, settings)
        database.do("DROP TABLE IF EXISTS temp.refused")
        database.do("CREATE TEMP TABLE refused(key INTEGER PRIMARY KEY, keeper INTEGER)")
        database.many("INSERT INTO refused VALUES (?, ?)", _refused_of_clusters(database, settings))
        _refuse(database, "near_duplicate", "SELECT key, keeper FROM refused")
        database.do("DROP TABLE temp.refused")
        database.do("DROP TABLE temp.clusters")


def _refuse(database: Database, rule: str, keepers: str) -> None:
    database.do(
        "INSERT INTO verdicts SELECT gone.key, ?, json_object('kept', kept.id, 'key', kept.key, 'distance', "
        "bits_apart(mine.phash, kept.phash), 'same', CASE WHEN mine.digest = kept.digest THEN 'file' "
        "WHEN mine.pixels = kept.pixels THEN 'pixels' ELSE 'look' END) "
        f"FROM ({keepers}) AS gone JOIN images AS mine ON mine.key = gone.key "
        "JOIN images AS kept ON kept.key = gone.keeper WHERE gone.key != gone.keeper",
        (rule,),
    )


def _find_clusters(database: Database, settings: Settings) -> None:
    database.do("DROP TABLE IF EXISTS temp.clusters")
    database.do("CREATE TEMP TABLE clusters(key INTEGER PRIMARY KEY, root INTEGER)")
    count = database.one("SELECT coalesce(max(key), -1) + 1 FROM images")
    with tempfile.TemporaryDirectory(dir=database.path.parent) as folder:
        clusters = Clusters(Path(folder) / "forest", count)
        find_clusters(database, f"SELECT {HASHES} FROM ({LEFT})", likeness(settings), clusters)
        database.many("INSERT OR IGNORE INTO clusters VALUES (?, ?)", clusters.members())
        del clusters


def _refused_of_clusters(database: Database, settings: Settings) -> Iterator[tuple[int, int]]:
    """(example, the kept one that it looks like) of all that go; one cluster is in memory at a time."""
    rows = database.rows(
        "SELECT root, parts, key, phash, colour FROM clusters JOIN images USING (key) "
        f"ORDER BY root, {LARGEST}"
    )
    for _, group in groupby(rows, key=itemgetter(0)):
        bucket = gather(group)
        kept = keepers(bucket, likeness(settings))
        gone = np.flatnonzero(kept != np.arange(len(kept)))
        yield from zip(bucket.keys[gone].tolist(), bucket.keys[kept[gone]].tolist(), strict=True)


def refuse_leaks(database: Database, settings: Settings) -> None:
    """Refuses what is in the validation data, with the same pixels or, unless near duplicates are off, with
    the same looks; whatever mask or control image either has.
    """
    held_out = "SELECT * FROM images WHERE key < 0 AND error IS NULL"
    database.do("DROP TABLE IF EXISTS temp.leaks")
    database.do("CREATE TEMP TABLE leaks(key INTEGER PRIMARY KEY, other INTEGER, distance INTEGER)")
    database.do(
        f"INSERT INTO leaks SELECT mine.key, max(val.key), 0 FROM ({LEFT}) AS mine "
        f"JOIN ({held_out}) AS val USING (pixels) GROUP BY mine.key"
    )
    if settings.judges("near_duplicate"):
        both = (
            f"SELECT {LOOKS} FROM ({LEFT}) WHERE key NOT IN (SELECT key FROM leaks) "
            f"UNION ALL SELECT {LOOKS} FROM ({held_out})"
        )
        nearer = "INSERT INTO near_leaks VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET " + (
            "other = excluded.other, distance = excluded.distance "
            "WHERE (excluded.distance, -excluded.other) < (distance, -other)"
        )
        database.do("DROP TABLE IF EXISTS temp.near_leaks")
        database.do("CREATE TEMP TABLE near_leaks(key INTEGER PRIMARY KEY, other INTEGER, distance INTEGER)")
        find_leaks(database, both, likeness(settings), lambda *row: database.many(nearer, [row]))
        database.do("INSERT INTO leaks SELECT * FROM near_leaks")
        database.do("DROP TABLE temp.near_leaks")
    database.do(
        "INSERT INTO verdicts SELECT leaks.key, 'leak', json_object('kept', val.id, 'key', val.key, "
        "'distance', leaks.distance, 'same', CASE WHEN mine.digest = val.digest THEN 'file' "
        "WHEN mine.pixels = val.pixels THEN 'pixels' ELSE 'look' END) FROM leaks "
        "JOIN images AS mine ON mine.key = leaks.key JOIN images AS val ON val.key = leaks.other"
    )
    database.do("DROP TABLE temp.leaks")
