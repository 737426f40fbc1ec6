"""Pictures are drawn once, and what lies on disk is taken for nothing else."""

import numpy as np
import pytest
from PIL import Image

from lit_sd.data.picture_cache import PictureCache, versions


def cache(folder, drawn, **changed):
    def render(key):
        drawn.append(key)
        return Image.new("RGB", (2, 2), (int(key), 0, 0))

    options = {"keys": ["1", "2"], "size": 2, "drawn_by": {"painter": "1.0"}, "notice": "by somebody"}
    return PictureCache(folder, "p", render=render, **{**options, **changed})


def test_pictures_are_drawn_once_with_a_note_beside_them(tmp_path):
    drawn: list[str] = []
    folder = tmp_path / "cache"
    assert cache(folder, drawn).array[1, 0, 0].tolist() == [2, 0, 0]
    assert cache(folder, drawn).array.shape == (2, 2, 2, 3)
    assert drawn == ["1", "2"]
    note, file = sorted(folder.iterdir())
    assert note.read_text() == "by somebody"
    assert file.name.startswith("p-")
    assert file.suffix == ".npy"


@pytest.mark.parametrize("changed", [{"keys": ["2", "1"]}, {"drawn_by": {"painter": "1.1"}}])
def test_other_pictures_of_the_same_shape_lie_in_another_file(tmp_path, changed):
    drawn: list[str] = []
    first = cache(tmp_path, drawn).array.copy()
    other = cache(tmp_path, drawn, **changed).array
    assert len(drawn) == 4
    assert len(list(tmp_path.glob("p-*.npy"))) == 2
    assert np.array_equal(cache(tmp_path, drawn).array, first)
    assert other[0, 0, 0, 0] == int(changed.get("keys", ["1"])[0])


def test_a_damaged_file_is_refused(tmp_path):
    pictures = cache(tmp_path, [])
    np.save(pictures.path, np.zeros((3, 2, 2, 3), np.uint8))
    with pytest.raises(ValueError, match="delete it"):
        _ = pictures.array


def test_versions_name_the_extra_of_what_is_missing():
    assert versions("numpy") == {"numpy": np.__version__}
    with pytest.raises(ModuleNotFoundError, match=r"no-such-thing is needed.*lit-sd\[openmoji\]"):
        versions("no-such-thing")
