"""The embedded base's data. What is drawn comes from the installed packages."""

import json
from collections import Counter
from importlib.resources import files

import numpy as np
import pytest
from PIL import Image

from lit_sd.data import openmoji
from lit_sd.data.openmoji import OpenMoji, Photographs, PictureCache, choose_holdout, words


@pytest.fixture(scope="module")
def pairs():
    return openmoji.named_emoji()


def test_the_set_is_the_one_that_was_counted(pairs):
    assert len(pairs) == 3953
    assert pairs["1F431"] == "cat face"
    assert pairs["1F469-1F3FD-200D-1F692"] == "woman firefighter medium skin tone"


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
    assert openmoji.shared_pictures({"a": b"x", "b": b"y", "c": b"x"}) == {"a", "c"}


def test_splits_share_nothing_and_miss_nothing(tmp_path, pairs):
    train, held = OpenMoji("train", 8, tmp_path), OpenMoji("holdout", 8, tmp_path)
    assert len(train) == 3753
    assert len(held) == 200
    assert not set(train.ids()) & set(held.ids())
    assert sorted(train.captions() + held.captions()) == sorted(pairs.values())
    with pytest.raises(ValueError, match="expected train or holdout"):
        OpenMoji("val", 8, tmp_path)


def test_a_picture_is_drawn_on_white_with_its_own_colours():
    heart = np.asarray(openmoji.draw("2764", 64))
    assert heart[0, 0].tolist() == [255, 255, 255]
    red = (heart[..., 0].astype(int) - heart[..., 2]) > 100
    assert 0.1 < red.mean() < 0.6


def test_the_cache_draws_once_and_refuses_another_shape(tmp_path):
    drawn = []

    def render(key):
        drawn.append(key)
        return Image.new("RGB", (2, 2), (int(key), 0, 0))

    path = tmp_path / "cache" / "p.npy"
    assert PictureCache(path, ["1", "2"], render, 2).array[1, 0, 0].tolist() == [2, 0, 0]
    assert PictureCache(path, ["1", "2"], render, 2).array.shape == (2, 2, 2, 3)
    assert drawn == ["1", "2"]
    assert [p.name for p in path.parent.iterdir()] == ["p.npy"]
    with pytest.raises(ValueError, match="delete it"):
        _ = PictureCache(path, ["1", "2", "3"], render, 2).array


def test_photographs_are_seeded_crops_without_the_cat(tmp_path):
    source = Photographs(40, 16, tmp_path / "a", seed=1)
    assert len(source) == 40
    assert not [i for i in source.ids() if "chelsea" in i or "cat" in i]
    image, caption = source.load(1)
    assert image.size == (16, 16)
    assert caption == "a photo of a cup of coffee"
    again = Photographs(40, 16, tmp_path / "b", seed=1).load(1)[0]
    assert image.tobytes() == again.tobytes()
    assert image.tobytes() != Photographs(40, 16, tmp_path / "c", seed=2).load(1)[0].tobytes()


def test_sources_travel_to_workers_without_their_pictures(tmp_path):
    import pickle

    source = Photographs(20, 16, tmp_path)
    source.check()
    assert len(pickle.dumps(source)) < 1000
    assert pickle.loads(pickle.dumps(source)).load(3)[0].tobytes() == source.load(3)[0].tobytes()
