"""The hold-out: its rule, and that what ships is what the rule gives."""

import json
from collections import Counter
from importlib.resources import files

import pytest

from lit_sd.data.holdout import choose_holdout, read_holdout, shared_pictures, words
from lit_sd.data.openmoji import draw, named_emoji

SIZE = 128


@pytest.fixture(scope="module")
def pairs():
    return named_emoji()


def test_words_keep_hyphens():
    assert words("Couple, with heart: medium-dark skin tone") == [
        "couple",
        "with",
        "heart",
        "medium-dark",
        "skin",
        "tone",
    ]


def test_the_shipped_holdout_keeps_its_promise(pairs):
    rows = json.loads(files("lit_sd").joinpath("assets/openmoji/holdout.json").read_text())
    assert len(rows) == 200
    held = {row["file"].removesuffix(".svg"): row["caption"] for row in rows}
    assert all(pairs[stem] == caption for stem, caption in held.items())
    left = Counter(
        word for stem, caption in pairs.items() if stem not in held for word in set(words(caption))
    )
    assert min(left[word] for caption in held.values() for word in words(caption)) >= 3


def test_holdout_rule_on_a_set_small_enough_to_check():
    tones = ["light", "dark", "medium", "pale"]
    small = {f"{who}{tone}": f"{who} {tone}" for who in ("man", "woman", "child", "elf") for tone in tones}
    small["rare"] = "unicorn light"
    chosen = choose_holdout(small, duplicates={"mandark"}, count=3, seed=0)
    assert chosen == choose_holdout(small, duplicates={"mandark"}, count=3, seed=0)
    assert not {"rare", "mandark"} & set(chosen)
    # Sixteen pairs on a 4 x 4 board, each row and column may lose one: four can be held out at the most.
    with pytest.raises(ValueError, match=r"of 17 pairs can be held out, wanted 5"):
        choose_holdout(small, set(), count=5)


def test_shared_pictures():
    assert shared_pictures({"a": b"x", "b": b"y", "c": b"x"}) == {"a", "c"}


def test_the_shipped_holdout_is_what_the_rule_gives(pairs):
    pictures = {stem: draw(stem, SIZE).tobytes() for stem in pairs}
    assert choose_holdout(pairs, shared_pictures(pictures)) == sorted(read_holdout())
