"""Five crops of the cat, written once, whole or not at all."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_sd.data import chelsea


def test_five_different_square_crops_of_the_photograph_are_written(tmp_path: Path) -> None:
    paths = chelsea.write(tmp_path / "data" / "chelsea")
    assert len(paths) == 5
    assert sorted((tmp_path / "data" / "chelsea").iterdir()) == sorted(paths)
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["chelsea"], "something was left beside it"
    whole = np.asarray(chelsea.chelsea())
    assert whole.shape == (300, 451, 3)
    contents = set()
    for path, (left, top, right, bottom) in zip(paths, chelsea.CROPS.values(), strict=True):
        picture = np.asarray(Image.open(path))
        assert picture.shape[0] == picture.shape[1] >= 224
        assert (picture == whole[top:bottom, left:right]).all()
        contents.add(picture.tobytes())
    assert len(contents) == 5


def test_only_the_default_folder_is_written_and_only_where_it_is_missing(tmp_path: Path) -> None:
    for root in (None, "photos", tmp_path / "photos"):
        chelsea.write_if_default(root, tmp_path)
    assert not list(tmp_path.iterdir())
    chelsea.write_if_default("data/chelsea", tmp_path)
    default = tmp_path / "data" / "chelsea"
    assert len(list(default.iterdir())) == 5
    for path in default.iterdir():
        path.unlink()
    chelsea.write_if_default(default, tmp_path)
    assert not list(default.iterdir()), "a folder that is there belongs to the user"


def test_another_process_may_be_first(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "chelsea"
    real = chelsea.chelsea

    def slow():
        folder.mkdir()
        (folder / "theirs.png").touch()
        return real()

    monkeypatch.setattr(chelsea, "chelsea", slow)
    chelsea.write(folder)
    assert [p.name for p in folder.iterdir()] == ["theirs.png"]
    assert [p.name for p in tmp_path.iterdir()] == ["chelsea"]


def test_without_scikit_image_it_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-sd\[demo\]'"):
        chelsea.write(tmp_path / "chelsea")
    assert not list(tmp_path.iterdir())
