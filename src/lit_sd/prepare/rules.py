"""The second stage: each rule judges what was scanned. Rules are queries, so that a threshold can change
without a second scan, and a million examples are judged without being held.
"""

import json
from dataclasses import asdict

from lit_sd.prepare.database import DECISIONS, Database
from lit_sd.prepare.duplicates import refuse_duplicates, refuse_leaks
from lit_sd.prepare.settings import CAPTION_RULES, PERSON, RULES, Settings

# Each selects key and detail; names with a colon are settings. What can't be read has no other facts.
IMAGE_RULES = {
    "unreadable": "SELECT key, json_object('error', error) AS detail FROM images WHERE error IS NOT NULL",
    "too_small": (
        "SELECT key, json_object('side', min(height, width)) AS detail FROM images "
        "WHERE error IS NULL AND min(height, width) < :min_side"
    ),
    "extreme_aspect": (
        "SELECT key, json_object('aspect', round(1.0 * max(height, width) / min(height, width), 2)) "
        "AS detail FROM images WHERE error IS NULL AND max(height, width) > :max_aspect * min(height, width)"
    ),
    "blank": (
        "SELECT key, json_object('deviation', round(deviation, 2), 'colours', colours) AS detail FROM images "
        "WHERE error IS NULL AND deviation < :min_deviation"
    ),
    "caption_missing": (
        "SELECT key, '{}' AS detail FROM images WHERE error IS NULL AND NOT EXISTS ("
        "SELECT 1 FROM captions WHERE captions.key = images.key AND version IN (:version, 2))"
    ),
}
# Each tells which captions are faulty, and the number that says so.
TEXT_RULES = {
    "caption_encoding": ("broken", "1"),
    "caption_short": ("bytes < :min_characters OR words < :min_words", "characters"),
    "caption_repetitive": (
        "(words >= 6 AND variety < :min_entropy) OR (characters >= 12 AND entropy < 2)",
        "round(variety, 3)",
    ),
    "caption_long": ("tokens > :max_tokens", "tokens"),
}


def decide(database: Database, settings: Settings, answers: dict[str, bool], val: bool) -> None:
    """Fills the tables of decisions anew, all or none.

    Args:
        database: what was scanned.
        settings: the rules and their thresholds.
        answers: what a person said, by id: keep or refuse.
        val: whether there is validation data.

    Raises:
        ValueError: something can't be read and the rule on that is off, or an answer is for no example.
    """
    numbers = asdict(settings) | {"version": int(settings.normalise)}
    numbers = {name: value for name, value in numbers.items() if not isinstance(value, tuple)}
    with database.transaction():
        for statement in DECISIONS.split(";"):  # executescript would commit
            database.do(statement)
        for rule, query in IMAGE_RULES.items():
            if settings.judges(rule):
                database.do(
                    f"INSERT INTO findings SELECT '{rule}', key, detail FROM ({query}) WHERE key >= 0",
                    numbers,
                )
        _judge_captions(database, settings, numbers)
        for rule in RULES:
            database.do(
                "INSERT OR IGNORE INTO verdicts SELECT key, rule, detail FROM findings WHERE rule = ?",
                (rule,),
            )
        _require_readable(database)
        if val and settings.judges("leak"):
            refuse_leaks(database, settings)
        refuse_duplicates(database, settings)
        apply_answers(database, answers)


def _judge_captions(database: Database, settings: Settings, numbers: dict) -> None:
    for rule in CAPTION_RULES:
        if settings.judges(rule):
            condition, value = TEXT_RULES[rule]
            database.do(
                f"INSERT OR IGNORE INTO faults SELECT key, k, '{rule}', {value} FROM captions "
                f"WHERE key >= 0 AND version IN (:version, 2) AND ({condition})",
                numbers,
            )
    # An example is refused for its captions where none is left; else only the faulty ones go.
    database.do(
        "INSERT OR IGNORE INTO findings SELECT rule, key, json_object('captions', n, 'value', value) FROM ("
        "  SELECT key, rule, value, min(k), count(*) AS n FROM faults GROUP BY key) AS bad "
        "WHERE n = (SELECT count(*) FROM captions WHERE captions.key = bad.key AND version IN (:version, 2))",
        numbers,
    )


def _require_readable(database: Database) -> None:
    """Without the rule `unreadable`, what can't be read is an error."""
    query = (
        "SELECT id, error FROM images WHERE key >= 0 AND error IS NOT NULL "
        "AND key NOT IN (SELECT key FROM verdicts)"
    )
    rows = database.all(f"{query} ORDER BY key LIMIT 20")
    if rows:
        count = database.one(f"SELECT count(*) FROM ({query})")
        named = "; ".join(f"{name} ({error})" for name, error in rows)
        raise ValueError(
            f"{count} examples can't be read, and the rule `unreadable` is off: {named}; mend them, or leave "
            "the rule on, which leaves them out"
        )


def apply_answers(database: Database, answers: dict[str, bool]) -> None:
    """What a person said counts more than the rules; what can't be read stays refused.

    Raises:
        ValueError: an answer is for no example.
    """
    if not answers:
        return
    database.do("DROP TABLE IF EXISTS temp.given")
    database.do("CREATE TEMP TABLE given(id TEXT PRIMARY KEY, keep INTEGER)")
    database.many("INSERT INTO given VALUES (?, ?)", answers.items())
    known = "SELECT id FROM images WHERE key >= 0"
    if unknown := database.all(f"SELECT id FROM given WHERE id NOT IN ({known}) LIMIT 5"):
        names = ", ".join(name for (name,) in unknown)
        raise ValueError(f"--answers: not in the data: {names}; was the page made of another?")
    database.do(
        "INSERT OR REPLACE INTO answers SELECT images.key, keep, verdicts.rule FROM given "
        "JOIN images USING (id) LEFT JOIN verdicts ON verdicts.key = images.key WHERE images.key >= 0"
    )
    database.do(
        "DELETE FROM verdicts WHERE key IN (SELECT key FROM answers JOIN images USING (key) "
        "WHERE keep AND error IS NULL)"
    )
    detail = json.dumps({"said": "refuse"})
    database.do(
        f"INSERT OR IGNORE INTO verdicts SELECT key, '{PERSON}', ? FROM answers WHERE NOT keep", (detail,)
    )
    database.do("DROP TABLE temp.given")
