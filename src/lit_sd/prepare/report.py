"""The fourth stage: what is there and what became of it, as numbers.

`report.json` holds, for examples of the data (not of the validation data):

- `version`: of this list, 1.
- `data`: `kind`, `complete` (true, where a manifest says so; null, where there is none), `notes`.
- `settings`: as they were chosen, see `lit_sd.prepare.settings.Settings`.
- `counts`: `examples`, `kept`, `refused`, `validation`; `captions` (of all), `captions_dropped` (of kept
  examples), `captions_changed` and `captions_repaired` (by normalisation).
- `rules`: for each rule `on`, `says`, `refused` (examples that count with it) and `found` (those that it
  would refuse alone; null for duplicates, looked for in what is left). `person` is the spot check's.
- `formats`, `modes`: examples by file format and by Pillow's mode; `traits`: `alpha`, `animated`, `masks`,
  `controls`.
- `sides`, `aspects`, `tokens`: histograms; each bin has `from` and `to` (null is open; `to` is excluded),
  `kept` and `refused`. Sides are the smaller ones, aspects width over height, tokens CLIP's, of each caption.
- `captions`: `longest` in tokens, `over_limit` (captions over 77 tokens), `distinct`, `sharing` (kept
  captions that another kept one repeats) and `repeated`, the most frequent of these, with `text` and `count`.
- `tags`: `kind`, `distinct`, `once`, `top` and `tail`, each with `tag` and `count` (kept examples with it).
- `duplicates`: `refused`, and `by_distance`, bits between an example and the one that is kept: `distance`,
  `count`.
- `balance`: null, or `power`, `smallest`, `largest` and `mean` of the weights, and how many are `capped`.
- `agreement`: null, or what a person's answers say of the rules: see `lit_sd.prepare.spot_check.agreement`.
- `buckets`: null, or (of `lit-sd inspect`) `height`, `width` and `count` of readable examples.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lit_sd.prepare.balance import weight_of
from lit_sd.prepare.database import Database
from lit_sd.prepare.examples import Input
from lit_sd.prepare.settings import PERSON, RULES, TOKEN_LIMIT, Settings
from lit_sd.prepare.spot_check import agreement

SIDES = (128, 256, 384, 512, 768, 1024, 1536, 2048)
ASPECTS = (1 / 3, 1 / 2, 2 / 3, 4 / 5, 10 / 11, 11 / 10, 5 / 4, 3 / 2, 2, 3)
TOKENS = (8, 16, 24, 32, 48, 64, TOKEN_LIMIT + 1, 153, 228)
"""78 is the first length that is cut; 153 and 228 the first that two and three windows of 75 do not hold."""

ALONE = ("leak", "exact_duplicate", "near_duplicate")
SHOWN_TAGS = 40
REFUSED = "key IN (SELECT key FROM verdicts)"


def make_report(
    database: Database, data: Input, settings: Settings, *, buckets: list[dict[str, int]] | None = None
) -> dict[str, Any]:
    """All numbers of the report, as plain values.

    Args:
        database: what was decided.
        data: where it came from.
        settings: what it was decided by.
        buckets: what `lit_sd.prepare.shapes` counted.
    """
    version = int(settings.normalise)
    return {
        "version": 1,
        "data": {"kind": data.kind, "complete": data.complete, "notes": data.notes},
        "settings": asdict(settings),
        "counts": _counts(database, version),
        "rules": _rules(database, settings),
        "formats": _by(database, "format"),
        "modes": _by(database, "mode"),
        "traits": _traits(database),
        "sides": histogram(database, "min(height, width)", SIDES),
        "aspects": histogram(database, "1.0 * width / height", ASPECTS),
        "tokens": _tokens(database, version),
        "captions": _captions(database, version),
        "tags": _tags(database),
        "duplicates": _duplicates(database),
        "balance": _balance(database, settings),
        "agreement": agreement(database),
        "buckets": buckets,
    }


def _counts(database: Database, version: int) -> dict[str, int]:
    examples, held_out = database.all("SELECT sum(key >= 0), sum(key < 0) FROM images")[0]
    refused = database.one("SELECT count(*) FROM verdicts")
    raw = "SELECT count(*) FROM captions WHERE key >= 0 AND version"
    return {
        "examples": examples or 0,
        "kept": (examples or 0) - refused,
        "refused": refused,
        "validation": held_out or 0,
        "captions": database.one(f"{raw} IN (?, 2)", (version,)),
        "captions_dropped": database.one(
            "SELECT count(*) FROM faults WHERE key NOT IN (SELECT key FROM verdicts)"
        ),
        "captions_changed": database.one(f"{raw} = 0") if version else 0,
        "captions_repaired": database.one(
            f"{raw} = 0 AND broken AND EXISTS (SELECT 1 FROM captions AS clean WHERE NOT clean.broken "
            "AND clean.key = captions.key AND clean.k = captions.k AND clean.version = 1)"
        )
        if version
        else 0,
    }


def _rules(database: Database, settings: Settings) -> dict[str, dict[str, Any]]:
    refused = dict(database.all("SELECT rule, count(*) FROM verdicts GROUP BY rule"))
    found = dict(database.all("SELECT rule, count(*) FROM findings GROUP BY rule"))
    rules: dict[str, dict[str, Any]] = {}
    for rule, says in RULES.items():
        on = settings.judges(rule) and (rule != "leak" or database.get("val input") is not None)
        alone = None if rule in ALONE else found.get(rule, 0)
        rules[rule] = {"on": on, "says": says, "refused": refused.get(rule, 0), "found": alone}
    if said := database.one("SELECT count(*) FROM answers"):
        says = f"a person refused it in the spot check; {said} answers"
        rules[PERSON] = {"on": True, "says": says, "refused": refused.get(PERSON, 0), "found": None}
    return rules


def _by(database: Database, column: str) -> dict[str, int]:
    query = f"SELECT {column}, count(*) AS n FROM images WHERE key >= 0 AND {column} IS NOT NULL"
    return dict(database.all(f"{query} GROUP BY 1 ORDER BY n DESC, 1"))


def _traits(database: Database) -> dict[str, int]:
    row = database.all(
        "SELECT total(alpha), total(animated), total(masked), total(controlled) FROM images WHERE key >= 0"
    )[0]
    return dict(zip(("alpha", "animated", "masks", "controls"), map(int, row), strict=True))


def histogram(database: Database, value: str, edges: Sequence[float]) -> list[dict[str, Any]]:
    """Counts of kept and refused readable examples by a number of theirs."""
    rows = f"SELECT {value} AS value, {REFUSED} AS gone FROM images WHERE key >= 0 AND height IS NOT NULL"
    return _binned(database, rows, (), edges)


def _binned(database: Database, rows: str, parameters: Any, edges: Sequence[float]) -> list[dict[str, Any]]:
    cases = " ".join(f"WHEN value < {edge!r} THEN {i}" for i, edge in enumerate(edges))
    query = f"SELECT CASE {cases} ELSE {len(edges)} END, gone, count(*) FROM ({rows}) GROUP BY 1, 2"
    counts = {(bin_, bool(gone)): count for bin_, gone, count in database.all(query, parameters)}
    ends: list[float | None] = [None, *edges, None]
    return [
        {
            "from": ends[i],
            "to": ends[i + 1],
            "kept": counts.get((i, False), 0),
            "refused": counts.get((i, True), 0),
        }
        for i in range(len(edges) + 1)
    ]


def _tokens(database: Database, version: int) -> list[dict[str, Any]]:
    rows = f"SELECT tokens AS value, {REFUSED} AS gone FROM captions WHERE key >= 0 AND version IN (?, 2)"
    return _binned(database, rows, (version,), TOKENS)


def _captions(database: Database, version: int) -> dict[str, Any]:
    every = "FROM captions WHERE key >= 0 AND version IN (?, 2)"
    longest, over = database.all(f"SELECT max(tokens), total(tokens > {TOKEN_LIMIT}) {every}", (version,))[0]
    grouped = (
        f"SELECT text, count(*) AS n {every} AND NOT {REFUSED} "
        "AND (key, k) NOT IN (SELECT key, k FROM faults) GROUP BY text"
    )
    distinct, sharing = database.all(
        f"SELECT count(*), total(CASE WHEN n > 1 THEN n END) FROM ({grouped})", (version,)
    )[0]
    repeated = database.all(
        f"SELECT text, n FROM ({grouped}) WHERE n > 1 ORDER BY n DESC, text LIMIT 20", (version,)
    )
    return {
        "longest": longest or 0,
        "over_limit": int(over),
        "distinct": distinct,
        "sharing": int(sharing),
        "repeated": [{"text": text, "count": count} for text, count in repeated],
    }


def _tags(database: Database) -> dict[str, Any]:
    distinct, once = database.all("SELECT count(*), total(count = 1) FROM tags")[0]
    ends = {}
    for end, order in (("top", "count DESC"), ("tail", "count")):
        rows = database.all(f"SELECT tag, count FROM tags ORDER BY {order}, tag LIMIT {SHOWN_TAGS}")
        ends[end] = [{"tag": tag, "count": count} for tag, count in rows]
    return {"kind": database.get("tag kind"), "distinct": distinct, "once": int(once), **ends}


def _duplicates(database: Database) -> dict[str, Any]:
    query = (
        "SELECT json_extract(detail, '$.distance') AS bits, count(*) FROM verdicts WHERE rule IN (?, ?, ?)"
    )
    rows = database.all(f"{query} GROUP BY bits ORDER BY bits", ALONE)
    by_distance = [{"distance": bits, "count": count} for bits, count in rows]
    return {"refused": sum(row["count"] for row in by_distance), "by_distance": by_distance}


def _balance(database: Database, settings: Settings) -> dict[str, Any] | None:
    if not settings.balance or not database.one("SELECT count(*) FROM weights"):
        return None
    scale, cap = database.get("weight scale", 1.0), settings.balance_max
    low, high, mean, capped = database.all(
        "SELECT min(raw), max(raw), avg(min(?2, raw * ?1)), total(raw * ?1 >= ?2) FROM weights", (scale, cap)
    )[0]
    return {
        "power": settings.balance,
        "smallest": round(weight_of(low, scale, cap), 6),
        "largest": round(weight_of(high, scale, cap), 6),
        "mean": round(mean, 6),
        "capped": int(capped),
    }
