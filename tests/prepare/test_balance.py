"""Tags, weights and emphasis, by hand on five examples."""

import sqlite3
from pathlib import Path

import pytest
from small_data import picture, report_of, run, write_folder

from lit_sd.data.lmdb import LmdbSource
from lit_sd.prepare.balance import Frequencies, emphasised, scale_to_mean, tag_kind, tags_of
from lit_sd.prepare.database import Database

CAPTIONS = ["cat, red", "cat, red", "cat, blue", "cat, dog", "bird"]
# cat 4, red 2, blue 1, dog 1, bird 1: of the nine, the fifth from below is a 2.


@pytest.fixture
def five(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "in", {f"{i}.png": (picture(i), text) for i, text in enumerate(CAPTIONS)})


def facts_of(out: Path) -> sqlite3.Connection:
    return sqlite3.connect(out.with_name(f"{out.name}.prepare") / "facts.sqlite")


def test_weights_by_hand(five: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(five, out, balance=1.0, balance_max=10.0)
    raw = [(0.5 + 1) / 2, (0.5 + 1) / 2, (0.5 + 2) / 2, (0.5 + 2) / 2, 2.0]  # mean of 2 / frequency; sum 6
    expected = [weight * 5 / 6 for weight in raw]
    source = LmdbSource(out)
    assert [source.record(i).weight for i in range(5)] == pytest.approx(expected)
    assert source.draw_weights().tolist() == pytest.approx(expected)
    balance = report_of(out)["balance"]
    assert balance["mean"] == pytest.approx(1)
    assert (balance["smallest"], balance["largest"]) == pytest.approx((0.625, 10 / 6), abs=1e-6)
    assert balance["capped"] == 0


def test_half_the_power_is_the_root(five: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(five, out, balance=0.5)
    source = LmdbSource(out)
    ratio = source.record(4).weight / source.record(0).weight
    assert ratio == pytest.approx(2**0.5 / ((0.5**0.5 + 1) / 2))


def test_a_cap_holds_and_the_mean_stays_one(tmp_path: Path) -> None:
    database = Database(tmp_path / "facts.sqlite")
    database.do("CREATE TABLE weights(key INTEGER PRIMARY KEY, raw REAL)")
    database.many("INSERT INTO weights VALUES (?, ?)", enumerate([1, 1, 1, 9]))
    scale = scale_to_mean(database, 2.0)
    assert scale == pytest.approx(2 / 3)  # (2/3 + 2/3 + 2/3 + 2) / 4 = 1


def test_weights_multiply_those_that_were_there(five: Path, tmp_path: Path) -> None:
    rows = [f'{{"file_name": "{i}.png", "text": "{text}", "weight": 3}}\n' for i, text in enumerate(CAPTIONS)]
    (five / "metadata.jsonl").write_text("".join(rows))
    run(five, tmp_path / "out", balance=1.0)
    assert LmdbSource(tmp_path / "out").record(0).weight == pytest.approx(3 * 0.625)


def test_without_balance_weights_stay(five: Path, tmp_path: Path) -> None:
    run(five, tmp_path / "out")
    assert LmdbSource(tmp_path / "out").record(4).weight == 1
    assert report_of(tmp_path / "out")["balance"] is None


def test_frequencies_are_in_the_report(five: Path, tmp_path: Path) -> None:
    run(five, tmp_path / "out", dry_run=True)
    tags = report_of(tmp_path / "out")["tags"]
    assert (tags["kind"], tags["distinct"], tags["once"]) == ("comma", 5, 3)
    assert [(row["tag"], row["count"]) for row in tags["top"]][:2] == [("cat", 4), ("red", 2)]
    assert [row["tag"] for row in tags["tail"]][:3] == ["bird", "blue", "dog"]


def test_rare_tags_are_stressed_and_repeated(five: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(five, out, emphasis="{caption}, {rare}")
    records = [LmdbSource(out).record(i) for i in range(5)]
    assert [record.captions[0].text for record in records] == [
        "cat, red, red",  # red is as frequent as usual
        "cat, red, red",
        "cat, blue, blue, blue",  # half as frequent: once more
        "cat, dog, dog, dog",
        "bird, bird, bird",
    ]
    assert records[2].extra["plain_captions"] == ["cat, blue"]


def test_a_caption_without_tags_stays_as_it_is(tmp_path: Path) -> None:
    database = Database(tmp_path / "facts.sqlite")
    database.do("CREATE TABLE tags(tag TEXT PRIMARY KEY, count INTEGER)")
    assert emphasised("{caption} ({rare})", "the of", Frequencies(database)) == "the of"


def test_tags_of_both_kinds() -> None:
    assert tags_of(["Red Hair,  solo, ", "solo, cat"], "comma") == ["red hair", "solo", "cat"]
    text = "A photo of the cat's well-known mat, 2 cats"
    assert tags_of([text], "words") == ["photo", "cat's", "well-known", "mat", "cats"]


def test_the_kind_is_what_most_captions_are() -> None:
    assert tag_kind(["1girl, solo, red hair", "cat, dog", "a sentence about a cat"]) == "comma"
    assert tag_kind(["a cat sits on a mat, quietly, and looks at me all day", "a dog"]) == "words"
    assert tag_kind([]) == "words"
