"""What is found in folders, and what is said of those that can't be trained on (F03, F06)."""

import io
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from lit_sd.data.class_images import PriorSource
from lit_sd.data.folder import FolderSource, list_folder


def noise(seed: int = 0, size: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), np.uint8))


@pytest.fixture
def messy(tmp_path):
    """Four good pictures, three foreign files, half a JPEG and an empty PNG."""
    for i in range(4):
        noise(i).save(tmp_path / f"good{i}.png")
    for name in ("notes.txt", "Thumbs.db", ".DS_Store"):
        (tmp_path / name).write_bytes(b"foreign")
    jpeg = io.BytesIO()
    noise(9, 64).save(jpeg, "JPEG")
    (tmp_path / "half.jpg").write_bytes(jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    (tmp_path / "empty.png").write_bytes(b"")
    return tmp_path


def test_every_bad_file_is_named(messy):
    with pytest.raises(ValueError, match="2 of 6 image files can't be read") as error:
        FolderSource(messy, prompt="x").check()
    assert "empty.png (the file is empty)" in str(error.value)
    assert "half.jpg (image file is truncated" in str(error.value)
    assert "good" not in str(error.value)
    assert "data.bad_files=skip" in str(error.value)


def test_a_file_of_another_kind_is_called_so(tmp_path):
    noise().save(tmp_path / "good.png")
    (tmp_path / "notes.jpg").write_text("milk, eggs")
    with pytest.raises(ValueError, match=r"notes\.jpg \(its content is no image\)"):
        FolderSource(tmp_path, prompt="x").check()


def test_bad_files_are_skipped_and_nobody_stands_in_for_them(messy):
    source = FolderSource(messy, prompt="x", bad_files="skip")
    assert source.ids() == [f"good{i}.png" for i in range(4)]
    assert len(source) == len(source.sizes()) == len(source.captions()) == 4
    for i in range(4):
        assert np.array_equal(np.asarray(source.load(i)[0]), np.asarray(noise(i)))
    assert any("skipped" in note and "empty.png" in note and "half.jpg" in note for note in source.notes)
    assert any("1 .txt" not in note and "1 .db" in note for note in source.notes)


def test_skipping_has_a_ceiling(messy):
    with pytest.raises(ValueError, match=r"max_bad_share=0\.2"):
        FolderSource(messy, prompt="x", bad_files="skip", max_bad_share=0.2).check()


def test_bad_files_and_missing_captions_are_told_at_once(messy):
    (messy / "good0.txt").write_text("one")
    with pytest.raises(ValueError, match=r"(?s)half\.jpg.*3 of 4 images have no caption: good1\.png"):
        FolderSource(messy).check()


def test_headers_alone_are_read_of_jpeg_and_png_only(tmp_path):
    for extension, format in (("jpg", "JPEG"), ("png", "PNG"), ("webp", "WEBP"), ("tif", "TIFF")):
        noise(9, 64).save(tmp_path / f"half.{extension}", format)
        whole = (tmp_path / f"half.{extension}").read_bytes()
        (tmp_path / f"half.{extension}").write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(ValueError, match="2 of 4 image files can't be read") as error:
        FolderSource(tmp_path, prompt="x", verify=False).check()
    assert "half.webp" in str(error.value)
    assert "half.tif" in str(error.value)


def test_headers_alone_find_what_is_no_image(messy):
    with pytest.raises(ValueError, match="1 of 6") as error:
        FolderSource(messy, prompt="x", verify=False).check()
    assert "half.jpg" not in str(error.value)


def test_an_image_that_broke_after_the_check_is_named(tmp_path):
    noise().save(tmp_path / "a.png")
    source = FolderSource(tmp_path, prompt="x")
    source.check()
    (tmp_path / "a.png").unlink()
    with pytest.raises(OSError, match=r"a\.png"):
        source.load(0)


@pytest.mark.parametrize("root", [None, "", "  "])
def test_an_unset_folder_is_not_the_working_directory(root):
    with pytest.raises(ValueError, match=r"data\.root is not set"):
        FolderSource(root)
    with pytest.raises(ValueError, match=r"data\.class_root is not set"):
        PriorSource(root, "a cat", 3)


def test_a_misspelt_folder_and_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.root=.*nowhere does not exist"):
        FolderSource(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is a file, not a folder"):
        FolderSource(tmp_path / "file")


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    with pytest.raises(ValueError, match=r"holds no images.*found nothing"):
        FolderSource(tmp_path).check()
    for i in range(3):
        (tmp_path / f"{i}.heic").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"holds no images.*found 3 \.heic"):
        FolderSource(tmp_path).check()


def test_subfolders_links_and_hidden_files(tmp_path):
    for name in ("b/x.png", "a.PNG", "b/.thumbs/y.png", "__MACOSX/a.png", "b/._x.png", "elsewhere/z.png"):
        path = tmp_path / "root" / name if "elsewhere" not in name else tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise().save(path)
    (tmp_path / "root/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "root/b/up").symlink_to(tmp_path / "root")
    assert list_folder(tmp_path / "root").images == ["a.PNG", "b/x.png", "link/z.png"]


def test_relative_folders_count_from_here(tmp_path, monkeypatch):
    noise().save(tmp_path / "a.png")
    monkeypatch.chdir(tmp_path)
    source = FolderSource(".", prompt="x")
    monkeypatch.chdir(os.sep)
    assert source.ids() == ["a.png"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("bad_files", "ignore"), ("missing_captions", "none"), ("repeats", 0), ("weight", -1.0)],
)
def test_options_out_of_range(tmp_path, option, value):
    with pytest.raises((ValueError, TypeError), match=str(value)):
        FolderSource(tmp_path, **{option: value})


def test_the_prompt_policy_needs_a_prompt(tmp_path):
    with pytest.raises(ValueError, match=r"data\.missing_captions=prompt needs data\.prompt"):
        FolderSource(tmp_path, missing_captions="prompt")


def test_a_checked_source_travels_to_workers(tmp_path):
    noise().save(tmp_path / "a.png")
    source = FolderSource(tmp_path, prompt="x")
    source.check()
    assert pickle.loads(pickle.dumps(source)).load(0)[1] == "x"


def test_transparent_images_are_counted_once(tmp_path):
    for i, mode in enumerate(("RGBA", "LA", "RGB")):
        Image.new(mode, (4, 4)).save(tmp_path / f"{i}.png")
    source = FolderSource(tmp_path, prompt="x")
    source.check()
    assert [note for note in source.notes if "white" in note] == [
        "2 images have transparency and are laid on white"
    ]


def test_a_prior_source_waits_for_its_images(tmp_path):
    prior = PriorSource(tmp_path / "class", "a photo of cat", 3)
    assert tuple(prior.request) == (tmp_path / "class", "a photo of cat", 3)
    assert not prior.ready
    with pytest.raises(FileNotFoundError, match="has 0 of 3 class images"):
        prior.check()
    (tmp_path / "class").mkdir()
    for i in range(5):
        noise(i).save(tmp_path / f"class/{i}.png")
    prior.check()
    assert prior.ids() == ["0.png", "1.png", "2.png"]  # as many as were asked for
    assert prior.captions() == ["a photo of cat"] * 3


def test_of_its_own_files_in_a_prior_folder_nobody_is_told(tmp_path):
    for name in ("0.png", "1.png"):
        noise().save(tmp_path / name)
    (tmp_path / "manifest.json").write_text("{}")
    prior = PriorSource(tmp_path, "a photo of cat", 2)
    prior.check()
    assert prior.notes == []
    (tmp_path / "notes.json").write_text("{}")
    prior.forget()
    prior.check()
    assert prior.notes == ["files that are no images are passed over: 1 .json"]


def test_a_prior_source_that_forgets_sees_what_was_made_since(tmp_path):
    prior = PriorSource(tmp_path, "a photo of cat", 2)
    for name in ("a", "b"):
        noise().save(tmp_path / f"{name}.png")
    prior.check()
    (tmp_path / "a.png").rename(tmp_path / "c.png")
    assert prior.ids() == ["a.png", "b.png"]
    prior.forget()
    assert prior.ids() == ["b.png", "c.png"]
    prior.forget()
    (tmp_path / "c.png").unlink()
    assert not prior.ready
    assert len(prior) == 2, "as many as there will be"


def test_a_prior_without_prompt_is_not_silently_off(tmp_path):
    with pytest.raises(ValueError, match=r"data\.class_prompt is not set.*data\.prior_weight=0"):
        PriorSource(tmp_path, None, 3)
    with pytest.raises(ValueError, match=r"data\.num_class_images=0"):
        PriorSource(tmp_path, "a cat", 0)
