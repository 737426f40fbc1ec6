"""The pages: each one file that needs no network. What comes from the data is text to them, never markup."""

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from lit_sd.prepare.database import Database
from lit_sd.prepare.progress import progress
from lit_sd.prepare.samples import KEPT, REFUSED, Pictures, drawn, shown
from lit_sd.prepare.settings import Settings
from lit_sd.prepare.spot_check import COMPARED, cards

THUMBNAIL, LARGE = 96, 448
SHOWN_OF_A_RULE, SHOWN_KEPT, SHOWN_PAIRS = 12, 24, 24
COMPARABLE = f"SELECT key FROM verdicts WHERE rule IN {COMPARED}"
"""What is refused for the sake of another picture."""


def environment() -> Environment:
    """Templates of this package; what is put into them is escaped."""
    folder = files("lit_sd").joinpath("assets/prepare")
    made = Environment(
        loader=FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"thousands": lambda number: f"{number:,}", "span": span, "reason": reason}
    return made


def write_report(
    report: dict[str, Any],
    database: Database,
    pictures: Pictures,
    settings: Settings,
    folder: Path,
    title: str,
) -> None:
    """Writes `report.html` and `report.json` into a folder.

    Args:
        report: the numbers, see `lit_sd.prepare.report`.
        database: where the examples shown come from.
        pictures: theirs.
        settings: seed of what is shown, and which captions count.
        folder: where to.
        title: of the page.
    """
    _write(folder / "report.json", json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    refusing = [rule for rule, told in report["rules"].items() if told["refused"] and rule not in COMPARED]
    version = int(settings.normalise)
    total = SHOWN_KEPT + SHOWN_PAIRS + SHOWN_OF_A_RULE * len(refusing)
    with progress("pictures of the report", total) as advance:

        def of(query: str, count: int) -> list[dict[str, Any]]:
            found = []
            for key in drawn(database, query, count, settings.seed):
                card = shown(database, key, pictures.url, version)
                found.append(card | {"detail": json.loads(card["detail"] or "{}")})
                advance(1)
            return found

        refused = {rule: of(REFUSED.format(rule), SHOWN_OF_A_RULE) for rule in refusing}
        pairs = of(COMPARABLE, SHOWN_PAIRS)
        for pair in pairs:
            pair["other"] = shown(database, pair["detail"]["key"], pictures.url, version)
        kept = of(KEPT, SHOWN_KEPT)
    page = environment().get_template("report.html")
    html = page.render(title=title, report=report, refused=refused, pairs=pairs, kept=kept)
    _write(folder / "report.html", html)


def write_spot_check(
    database: Database, pictures: Pictures, settings: Settings, folder: Path, title: str
) -> Path:
    """Writes `spot_check.html`, where a person says of each example of a sample whether it is to be kept."""
    with progress("pictures of the spot check", settings.spot_check) as advance:
        found = cards(database, settings, pictures, advance)
    # Answers are remembered by the browser for this sample only.
    store = f"lit-sd {settings.key(*(card['id'] for card in found))}"
    page = environment().get_template("spot_check.html").render(title=title, cards=found, store=store)
    path = folder / "spot_check.html"
    _write(path, page)
    return path


def span(bin_: dict[str, Any], kind: str = "number") -> str:
    """What a bin of a histogram is called."""
    low, high = (None if edge is None else _edge(edge, kind) for edge in (bin_["from"], bin_["to"]))
    if low is None:
        return f"under {high}"
    if high is None:
        return f"{low} and more"
    if kind == "tokens":
        return f"{low} to {bin_['to'] - 1}"
    return f"{low} to {high}"


def _edge(edge: float, kind: str) -> str:
    if kind != "aspect":
        return f"{edge:,}"
    known = {1 / 3: "1:3", 1 / 2: "1:2", 2 / 3: "2:3", 4 / 5: "4:5", 10 / 11: "10:11"}
    known |= {11 / 10: "11:10", 5 / 4: "5:4", 3 / 2: "3:2", 2: "2:1", 3: "3:1"}
    return known.get(edge, f"{edge:.2f}")


def reason(detail: dict[str, Any]) -> str:
    """What a rule found, in words."""
    words = {
        "side": "smaller side {} px",
        "aspect": "{} to 1",
        "deviation": "deviates by {}",
        "value": "measured {}",
        "distance": "{} of 64 bits apart",
        "error": "{}",
    }
    return ", ".join(words[name].format(value) for name, value in detail.items() if name in words)


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
