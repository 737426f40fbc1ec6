"""Masks and control images from folders of their own, and kohya's repeats: as training takes them."""

import os
from pathlib import Path

import pytest
from small_data import encoded, picture, report_of, run, write_folder

from lit_sd.data.folder import FolderSource
from lit_sd.data.lmdb import LmdbSource
from lit_sd.data.webdataset import ShardSource
from lit_sd.prepare.examples import Unreadable
from lit_sd.prepare.folder_input import FolderInput

SOURCES = {"folder": FolderSource, "lmdb": LmdbSource, "webdataset": ShardSource}
IDS = ["10_cat/a.jpg", "10_cat/b.png", "2_dog/0_old/d.png", "2_dog/c.png", "e.png"]
DRAWS = [10, 5, 0, 2, 1]
"""b weighs 0.5 in the table; d lies in a folder of 0, the innermost one counts."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Five images in kohya's folders; their masks within the folder, their control images beside it."""
    jpeg = encoded(picture(0), "JPEG")
    examples = {name: (picture(i) if i else jpeg, f"thing {i}") for i, name in enumerate(IDS)}
    root = write_folder(tmp_path / "in", examples)
    stems = [name.rpartition(".")[0] for name in IDS]
    write_folder(
        root / "masks", {f"{stem}.png": (picture(10 + i).convert("L"), None) for i, stem in enumerate(stems)}
    )
    write_folder(root / "own", {"mask.png": (picture(30).convert("L"), None)})
    row = '{"file_name": "10_cat/b.png", "text": "thing 1", "weight": 0.5, "mask": "own/mask.png"}\n'
    (root / "metadata.jsonl").write_text(row)
    edges = {f"{stem}.BMP": (encoded(picture(20 + i), "BMP"), None) for i, stem in enumerate(stems)}
    write_folder(tmp_path / "edges", edges)
    return root


def options(data: Path) -> dict:
    return {
        "mask_root": str(data / "masks"),
        "control_root": str(data.parent / "edges"),
        "repeat_folders": True,
    }


def opened(data: Path, **chosen) -> FolderInput:
    work = data.parent / "work"
    work.mkdir(exist_ok=True)
    return FolderInput(data, work, "data", **chosen)


def test_it_gives_what_training_gets(data: Path) -> None:
    source = FolderSource(data, **options(data))
    found = list(opened(data, **options(data)).read(0, 5))
    assert found == [source.record(i) for i in range(len(source))]
    assert [record.id for record in found] == IDS
    assert [record.weight for record in found] == DRAWS
    masks = [encoded(picture(seed).convert("L")) for seed in (10, 30, 12, 13, 14)]
    assert [record.mask for record in found] == masks
    assert [record.control for record in found] == [encoded(picture(20 + i), "BMP") for i in range(5)]


@pytest.mark.parametrize("form", SOURCES)
def test_what_was_packed_is_drawn_as_the_folder_is(form: str, data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out", form, read=options(data))
    before, packed = FolderSource(data, **options(data)), SOURCES[form](tmp_path / "out")
    assert sorted(packed.ids()) == IDS
    weights = packed.draw_weights()
    assert weights is not None
    assert dict(zip(packed.ids(), weights, strict=True)) == dict(zip(IDS, DRAWS, strict=True))
    place = {name: i for i, name in enumerate(packed.ids())}
    for i, name in enumerate(IDS):
        assert packed.record(place[name]) == before.record(i)
    traits = report_of(tmp_path / "out")["traits"]
    assert (traits["masks"], traits["controls"]) == (5, 5)


def test_without_the_options_a_folder_of_masks_is_images(data: Path) -> None:
    found = list(opened(data).read(0, 99))
    assert len(found) == 10
    assert {record.weight for record in found} == {1, 0.5}
    told = opened(data).notes
    assert told == [
        "the numbers of these folders repeat nothing: 0_old, 10_cat, 2_dog; with --repeat-folders their "
        "images would be drawn as often, on top of the weights in tables"
    ]
    assert opened(data, repeat_folders=True).notes == [
        "draws of the images by folder: 0_old x0, 10_cat x10, 2_dog x2"
    ]
    none = opened(data.parent / "edges" / "10_cat", repeat_folders=True).notes
    assert none == ["draws of the images by folder: none is named like 10_cat"]


def test_an_image_without_its_mask_is_unreadable_and_no_other(data: Path) -> None:
    masks = data / "masks"
    (masks / "2_dog/c.png").unlink()
    write_folder(masks, {"10_cat/a.bmp": (encoded(picture(5), "BMP"), None)})
    write_folder(masks, {"e.bmp": (encoded(picture(5), "BMP"), None)})  # e.png has the whole name, and counts
    found = list(opened(data, mask_root=str(masks)).read(0, 5))
    assert {one.id: one.error for one in found if isinstance(one, Unreadable)} == {
        "10_cat/a.jpg": f"--mask-root={masks} has several files (10_cat/a.bmp, 10_cat/a.png) for it",
        "2_dog/c.png": f"--mask-root={masks} has no file for it",
    }
    assert found[4].mask == encoded(picture(14).convert("L"))


def test_folders_that_fit_no_image_are_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    write_folder(tmp_path / "wrong", {"a.png": (picture(1), None)})
    with pytest.raises(ValueError, match=r"--mask-root=.*wrong has no file for any of the images: give each"):
        opened(data, mask_root=str(tmp_path / "wrong"))
    with pytest.raises(FileNotFoundError, match=r"--control-root=.*none does not exist"):
        opened(data, control_root=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="--mask-root is empty"):
        opened(data, mask_root=" ")


def test_the_fingerprint_changes_with_a_mask_that_does(data: Path) -> None:
    before = opened(data, **options(data)).fingerprint()
    assert opened(data, **options(data)).fingerprint() == before
    os.utime(data.parent / "edges/e.BMP", ns=(1, 1))
    assert opened(data, **options(data)).fingerprint() != before


@pytest.mark.parametrize("option", ["mask_root", "control_root"])
def test_nothing_is_written_among_the_masks(option: str, data: Path) -> None:
    root = Path(options(data)[option])
    with pytest.raises(ValueError, match="which is read; nothing is written there"):
        run(data, root / "out", read=options(data))
