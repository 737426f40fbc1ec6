"""The report's numbers by hand; the pages hold all they need, and nothing that comes from data is markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from small_data import encoded, picture, report_of, run, write_folder

from lit_sd.prepare.pages import reason, span

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)> & \"quoted\" {{ 7 * 7 }}"
EVIL_NAME = "<img src=x onerror=alert(2)>.png"


class Seen(HTMLParser):
    """Elements, their attributes, and the text between them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The output's path, of a run with one of everything."""
    folder = tmp_path_factory.mktemp("pages")
    copy = picture(1, 96, 64)
    examples = {
        "a.png": (copy, EVIL),
        "copy.jpg": (encoded(copy, "JPEG"), "a copy of it"),
        "same.png": (copy, "the same"),
        EVIL_NAME: (picture(2), "the cat"),
        "wide.png": (picture(3, 250, 64), "the cat"),
        "small.png": (picture(4, 20, 30), "small one"),
        "clear.png": (Image.new("RGBA", (64, 64)), "clear one"),
        "odd.png": (picture(5), "oddly â€œquotedâ€\x9d  words"),
        "long.png": (picture(6), " ".join(f"word{i}" for i in range(50))),
    }
    data = write_folder(folder / "in", examples)
    run(data, folder / "out", dry_run=True, spot_check=6, min_side=32)
    return folder / "out"


def test_numbers_by_hand(made: Path) -> None:
    report = report_of(made)
    assert report["counts"] == {
        "examples": 9,
        "kept": 4,
        "refused": 5,
        "validation": 0,
        "captions": 9,
        "captions_dropped": 0,
        "captions_changed": 1,
        "captions_repaired": 1,
    }
    refused = {rule: told["refused"] for rule, told in report["rules"].items() if told["refused"]}
    assert refused == {
        "too_small": 1,
        "extreme_aspect": 1,
        "blank": 1,
        "exact_duplicate": 1,
        "near_duplicate": 1,
    }
    assert report["rules"]["blank"]["found"] == 1
    assert report["rules"]["near_duplicate"]["found"] is None
    assert not report["rules"]["leak"]["on"]
    assert not report["rules"]["caption_long"]["on"]
    assert report["formats"] == {"PNG": 8, "JPEG": 1}
    assert report["modes"] == {"RGB": 8, "RGBA": 1}
    assert report["traits"] == {"alpha": 1, "animated": 0, "masks": 0, "controls": 0}
    assert report["captions"]["over_limit"] == 1
    assert (report["captions"]["distinct"], report["captions"]["sharing"]) == (4, 0)
    assert report["duplicates"]["refused"] == 2


def test_histograms_by_hand(made: Path) -> None:
    report = report_of(made)
    assert report["sides"][0] == {"from": None, "to": 128, "kept": 4, "refused": 5}
    assert sum(b["kept"] + b["refused"] for b in report["sides"]) == 9
    aspects = {(b["from"], b["to"]): (b["kept"], b["refused"]) for b in report["aspects"]}
    assert aspects[10 / 11, 11 / 10] == (3, 1)
    assert aspects[3 / 2, 2] == (1, 2)  # 96 x 64, three times
    assert aspects[3, None] == (0, 1)
    assert aspects[1 / 2, 2 / 3] == (0, 0)
    assert aspects[2 / 3, 4 / 5] == (0, 1)  # 20 x 30
    assert sum(b["kept"] + b["refused"] for b in report["tokens"]) == 9
    over = [b for b in report["tokens"] if b["from"] is not None and b["from"] >= 78]
    assert sum(b["kept"] for b in over) == 1


def test_repeated_captions_are_counted(tmp_path: Path) -> None:
    captions = ["the cat", "the cat", "the cat", "a dog", "a dog", "one bird"]
    examples = {f"{i}.png": (picture(i), caption) for i, caption in enumerate(captions)}
    run(write_folder(tmp_path / "in", examples), tmp_path / "out", dry_run=True)
    found = report_of(tmp_path / "out")["captions"]
    assert (found["distinct"], found["sharing"]) == (3, 5)
    assert found["repeated"] == [{"text": "the cat", "count": 3}, {"text": "a dog", "count": 2}]


@pytest.mark.parametrize("name", ["report.html", "spot_check.html"])
def test_nothing_from_the_data_is_markup(name: str, made: Path) -> None:
    page = (made.with_name("out.prepare") / name).read_text()
    seen = Seen(page)
    assert (
        "alert"
        not in re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S)
        .replace("&lt;", "<")
        .split("<style>")[0]
    )
    for tag, attributes in seen.tags:
        assert "onerror" not in attributes
        assert attributes.get("src", "data:").startswith("data:image/jpeg;base64,") or "src" not in attributes
        assert tag != "script" or set(attributes) <= {"type", "id"}
    scripts = [attributes for tag, attributes in seen.tags if tag == "script"]
    assert len(scripts) == (3 if name == "spot_check.html" else 0)


def test_the_report_shows_captions_and_names_as_they_are(made: Path) -> None:
    seen = Seen((made.with_name("out.prepare") / "report.html").read_text())
    assert "<script>alert('x')</script>" in seen.text
    assert EVIL_NAME in seen.text
    assert "{{ 7 * 7 }}" in seen.text


def test_the_spot_check_carries_its_examples_as_data(made: Path) -> None:
    page = (made.with_name("out.prepare") / "spot_check.html").read_text()
    text = re.search(r'<script type="application/json" id="cards">(.*?)</script>', page, re.S)[1]
    assert "<" not in text
    cards = json.loads(text)
    assert len(cards) == 6
    assert {"key", "id", "size", "captions", "picture"} <= set(cards[0])
    assert not any("rule" in card or "detail" in card for card in cards)
    pairs = [card["other"]["id"] for card in cards if "other" in card]
    assert set(pairs) <= {"a.png", "same.png"}
    assert pairs


@pytest.mark.parametrize("name", ["report.html", "spot_check.html"])
def test_pages_need_no_network(name: str, made: Path) -> None:
    page = (made.with_name("out.prepare") / name).read_text()
    assert not re.search(r"https?://|@import|url\(", page)
    assert '<meta name="viewport"' in page
    assert "prefers-color-scheme: dark" in page


def test_the_same_data_makes_the_same_pages(made: Path, tmp_path: Path) -> None:
    run(made.with_name("in"), tmp_path / "out", dry_run=True, spot_check=6)
    for name in ("report.html", "report.json", "spot_check.html", "decisions.jsonl"):
        assert (tmp_path / "out.prepare" / name).read_text() == (
            made.with_name("out.prepare") / name
        ).read_text()


def test_bins_and_reasons_in_words() -> None:
    assert span({"from": None, "to": 128}) == "under 128"
    assert span({"from": 2048, "to": None}) == "2,048 and more"
    assert span({"from": 64, "to": 78}, "tokens") == "64 to 77"
    assert span({"from": 1 / 2, "to": 2 / 3}, "aspect") == "1:2 to 2:3"
    assert reason({"side": 20}) == "smaller side 20 px"
    assert reason({"kept": "a", "key": 3, "distance": 2, "same": "look"}) == "2 of 64 bits apart"
