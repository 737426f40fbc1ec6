"""The sample is even, the person's answers win, and the rules' error has the right interval."""

import json
from pathlib import Path

import pytest
from PIL import Image
from scipy.stats import binomtest
from small_data import decisions, picture, refused, report_of, run, write_folder

from lit_sd.data.lmdb import LmdbSource
from lit_sd.prepare.database import DECISIONS, Database
from lit_sd.prepare.spot_check import agreement, read_answers, sample, wilson


def judged(path: Path, refused: dict[str, int], kept: int) -> Database:
    """A database of so many examples that each rule refused."""
    database = Database(path / "facts.sqlite")
    database.connection.executescript(DECISIONS)
    rules = [rule for rule, count in refused.items() for _ in range(count)] + [None] * kept
    for key, rule in enumerate(rules):
        database.do("INSERT INTO images(key, id) VALUES (?, ?)", (key, f"{rule}-{key}"))
        if rule:
            database.do("INSERT INTO verdicts VALUES (?, ?, '{}')", (key, rule))
    return database


def rules_of(database: Database, keys: list[int]) -> dict[str, int]:
    names = [database.one("SELECT id FROM images WHERE key = ?", (key,)).split("-")[0] for key in keys]
    return {name: names.count(name) for name in sorted(set(names))}


def test_half_is_kept_and_the_rules_share_the_rest(tmp_path: Path) -> None:
    database = judged(tmp_path, {"blank": 50, "too_small": 30, "unreadable": 9}, 300)
    keys = sample(database, 40, seed=1)
    assert len(set(keys)) == 40
    assert rules_of(database, keys) == {"None": 20, "blank": 10, "too_small": 10}
    assert sample(database, 40, seed=1) == keys
    assert sample(database, 40, seed=2) != keys


def test_what_one_part_lacks_the_others_give(tmp_path: Path) -> None:
    database = judged(tmp_path, {"blank": 2, "leak": 30}, 5)
    assert rules_of(database, sample(database, 20, seed=0)) == {"None": 5, "blank": 2, "leak": 13}
    assert len(sample(database, 100, seed=0)) == 37


def test_without_refusals_all_are_kept_ones(tmp_path: Path) -> None:
    assert rules_of(*(lambda d: (d, sample(d, 7, 0)))(judged(tmp_path, {}, 10))) == {"None": 7}


@pytest.mark.parametrize(("hits", "total"), [(0, 10), (3, 10), (10, 10), (7, 250)])
def test_the_interval_is_wilsons(hits: int, total: int) -> None:
    expected = binomtest(hits, total).proportion_ci(method="wilson")
    assert wilson(hits, total) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_answers_win_over_the_rules_and_are_compared_with_them(tmp_path: Path) -> None:
    examples = {f"{i}.png": (picture(i), f"the picture {i}") for i in range(5)}
    examples |= {
        "black.png": (Image.new("RGB", (64, 64)), "black"),
        "white.png": (picture(7, 90, 20), "white"),
    }
    examples["bad.png"] = (b"", "bad one")
    data = write_folder(tmp_path / "in", examples)
    path = tmp_path / "answers.json"
    said = {"0.png": "keep", "1.png": "refuse", "black.png": "keep", "white.png": "refuse", "bad.png": "keep"}
    path.write_text(json.dumps({"answers": said}))
    out = tmp_path / "out"
    run(data, out, answers=path)
    assert set(LmdbSource(out).ids()) == {"0.png", "2.png", "3.png", "4.png", "black.png"}
    found = decisions(data, out, answers=path)
    assert (found["1.png"]["rule"], found["1.png"]["person"]) == ("person", "refuse")
    assert (found["black.png"]["kept"], found["black.png"]["person"]) == (True, "keep")
    assert "person" not in found["2.png"]
    report = report_of(out)
    assert report["rules"]["person"]["refused"] == 1
    rates = {name: (rate["asked"], rate["wrong"]) for name, rate in report["agreement"].items()}
    assert rates == {
        "kept": (2, 1),  # 1.png
        "unreadable": (1, 1),
        "too_small": (1, 0),
        "blank": (1, 1),
        "all": (5, 3),
    }
    low, high = wilson(3, 5)
    assert (report["agreement"]["all"]["low"], report["agreement"]["all"]["high"]) == (
        round(low, 4),
        round(high, 4),
    )


def test_answers_of_another_page_are_told(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"a.png": (picture(1), "one")})
    path = tmp_path / "answers.json"
    path.write_text('{"answers": {"b.png": "keep"}}')
    with pytest.raises(ValueError, match=r"--answers: not in the data: b\.png"):
        run(data, tmp_path / "out", answers=path)
    assert refused(data, tmp_path / "out") == {}


@pytest.mark.parametrize("text", ["no json", "[]", '{"answers": {"a": "yes"}}', '{"answers": {"a": []}}'])
def test_what_the_page_did_not_save_is_told(text: str, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected what the page saves"):
        read_answers(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_answers(tmp_path / "none.json")


def test_without_answers_there_is_no_agreement(tmp_path: Path) -> None:
    assert agreement(judged(tmp_path, {}, 3)) is None
