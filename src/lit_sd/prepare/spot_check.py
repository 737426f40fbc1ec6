"""A random sample for a person to judge, and what the person's answers say of the rules."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lit_sd.prepare.database import Database
from lit_sd.prepare.samples import KEPT, REFUSED, Pictures, drawn, shown
from lit_sd.prepare.settings import PERSON, RULES, Settings

COMPARED = ("leak", "exact_duplicate", "near_duplicate")
"""Rules that nobody can check without the other picture."""


def sample(database: Database, count: int, seed: int) -> list[int]:
    """Keys of the sample in a random order: half of it kept, the other half from all rules alike; what one
    part lacks the others give.
    """
    parts = [KEPT]
    rules = [rule for (rule,) in database.all("SELECT DISTINCT rule FROM verdicts") if rule in RULES]
    refused = [REFUSED.format(rule) for rule in RULES if rule in rules and rule != "unreadable"]
    shares = [count - count // 2 if refused else count]
    for i in range(len(refused)):
        left = count // 2 * (i + 1) // len(refused) - count // 2 * i // len(refused)
        shares.append(left)
    parts += refused
    pools = [drawn(database, part, count, seed) for part in parts]
    chosen = [key for pool, share in zip(pools, shares, strict=True) for key in pool[:share]]
    spare = [key for pool, share in zip(pools, shares, strict=True) for key in pool[share:]]
    chosen += spare[: count - len(chosen)]
    # Mixed, so that the order does not say what the rules said.
    return drawn(database, f"SELECT key FROM images WHERE key IN ({','.join(map(str, chosen))})", count, seed)


def cards(
    database: Database, settings: Settings, pictures: Pictures, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """What the page shows of each example; where the rule is about another picture, that one too."""
    found = []
    for key in sample(database, settings.spot_check, settings.seed):
        card = shown(database, key, pictures.url, int(settings.normalise))
        detail = json.loads(card.pop("detail") or "{}")
        rule = card.pop("rule")
        if rule in COMPARED:
            other = shown(database, detail["key"], pictures.url, int(settings.normalise))
            card["other"] = {"id": other["id"], "size": other["size"], "picture": other["picture"]}
            card["question"] = "the validation data has" if rule == "leak" else "this one is kept:"
        found.append(card)
        advance(1)
    return found


def read_answers(path: Path) -> dict[str, bool]:
    """What a person said, by id of the example: keep or refuse.

    Raises:
        ValueError: the file is none that the page saves.
        FileNotFoundError: it is not there.
    """
    try:
        answers = json.loads(path.read_text(encoding="utf-8"))["answers"]
        if not isinstance(answers, dict) or not set(answers.values()) <= {"keep", "refuse"}:
            raise TypeError("each answer should be keep or refuse")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--answers {path} does not exist") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--answers {path}: expected what the page saves, "
            f'{{"answers": {{ID: "keep" or "refuse"}}}} ({error!r})'
        ) from error
    return {name: answer == "keep" for name, answer in answers.items()}


def agreement(database: Database) -> dict[str, Any] | None:
    """How often a person and the rules agree; None without answers.

    Returns:
        `kept` (what the rules keep), each rule that was asked about, and `all`: `asked`, `wrong` (the person
        said otherwise), `error` (wrong / asked), and `low` and `high`, Wilson's 95 % interval of the error's
        rate. `all` is of the sample, in which refused examples are more frequent than in the data.
    """
    rows = database.all(
        "SELECT coalesce(rule, 'kept'), count(*), total(keep = (rule IS NOT NULL)) FROM answers GROUP BY 1"
    )
    if not rows:
        return None
    counts = {name: (asked, int(wrong)) for name, asked, wrong in rows}
    order = [name for name in ("kept", *RULES, PERSON) if name in counts]
    counts["all"] = (sum(asked for asked, _ in counts.values()), sum(wrong for _, wrong in counts.values()))
    return {name: _rate(*counts[name]) for name in (*order, "all")}


def _rate(asked: int, wrong: int) -> dict[str, Any]:
    low, high = wilson(wrong, asked)
    return {
        "asked": asked,
        "wrong": wrong,
        "error": round(wrong / asked, 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }


def wilson(hits: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a rate of which `hits` of `total` were seen.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    """
    if not total:
        return 0.0, 1.0
    rate, square = hits / total, z * z
    centre = rate + square / (2 * total)
    spread = z * math.sqrt(rate * (1 - rate) / total + square / (4 * total * total))
    return (
        max(0.0, (centre - spread) / (1 + square / total)),
        min(1.0, (centre + spread) / (1 + square / total)),
    )
