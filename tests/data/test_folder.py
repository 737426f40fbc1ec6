"""What is found in folders, and what is said of those that can't be trained on (F03, F06)."""

import io
import json
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from lit_sd.data.caption_rules import Caption, CaptionRule
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
        assert np.array_equal(np.asarray(source.load(i).image), np.asarray(noise(i)))
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
    [
        ("bad_files", "ignore"),
        ("missing_captions", "none"),
        ("bad_captions", "skip"),
        ("caption_lines", "all"),
        ("repeats", 0),
        ("weight", -1.0),
    ],
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
    assert pickle.loads(pickle.dumps(source)).load(0).captions == (Caption("x"),)


def test_transparent_images_are_counted_once(tmp_path):
    for i, mode in enumerate(("RGBA", "LA", "RGB")):
        Image.new(mode, (4, 4)).save(tmp_path / f"{i}.png")
    source = FolderSource(tmp_path, prompt="x")
    source.check()
    assert source.notes == ["2 images have transparency and are laid on white"]
    source = FolderSource(tmp_path, prompt="x", alpha_mask=True)
    source.check()
    assert source.notes == ["2 images have transparency, which is their mask, and are laid on white"]
    assert np.asarray(source.load(0).mask).max() == 0
    assert source.load(2).mask is None


RED, WHITE, BLUE = (255, 0, 0), (255, 255, 255), (0, 0, 255)


def ugly_kinds(folder):
    """One image of each kind by file name, with the colour of its upper left corner when it is upright."""
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    halves = Image.new("RGB", (60, 20), BLUE)
    halves.paste(RED, (0, 0, 30, 20))
    turned = Image.Exif()
    turned[0x0112] = 8  # the stored right edge is the top
    halves.save(folder / "turned.jpg", quality=95, exif=turned)
    halves.save(folder / "UPPER.JPEG", quality=95)
    Image.new("RGBA", (8, 8), (*RED, 0)).save(folder / "rgba.png")
    Image.new("LA", (8, 8), (0, 0)).save(folder / "la.png")
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(folder / "cmyk.tif")
    Image.fromarray(np.full((8, 8), 32896, np.uint16)).save(folder / "grey16.png")
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, *RED])
    palette.save(folder / "palette.png")
    palette.save(folder / "clear.png", transparency=1)
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    for name in ("moving.gif", "moving.webp", "pages.tif"):
        options = {} if name == "pages.tif" else {"lossless": True}
        frames[0].save(folder / name, save_all=True, append_images=frames[1:], **options)
    Image.new("1", (8, 8), 1).save(folder / "bit.png")
    Image.new("RGB", (8, 8), RED).save(folder / "a/same.png")
    Image.new("RGB", (8, 8), BLUE).save(folder / "b/same.png")
    return {
        "UPPER.JPEG": RED,
        "a/same.png": RED,
        "b/same.png": BLUE,
        "bit.png": WHITE,
        "clear.png": WHITE,
        "cmyk.tif": RED,
        "grey16.png": (128, 128, 128),  # 32896 = 128 * 257
        "la.png": WHITE,
        "moving.gif": RED,
        "moving.webp": RED,
        "pages.tif": RED,
        "palette.png": RED,
        "rgba.png": WHITE,
        "turned.jpg": BLUE,
    }


def test_every_kind_of_image_ends_as_upright_rgb(tmp_path):
    colours = ugly_kinds(tmp_path)
    source = FolderSource(tmp_path, prompt="x")
    assert source.ids() == list(colours)
    assert source.sizes().dtype == np.int32
    assert source.sizes(12).tolist() == [[8, 8], [60, 20]]
    assert source.sizes(0, 2).tolist() == [[20, 60], [8, 8]]
    for i, (name, colour) in enumerate(colours.items()):
        picture = source.load(i)
        assert picture.image.dtype == np.uint8
        assert picture.image.shape == (*source.sizes()[i], 3)
        assert picture.size == tuple(source.sizes()[i])
        assert np.abs(picture.image[1, 1].astype(int) - colour).max() < 8, name
    assert "3 images are animated or have several pages; the first one is used" in source.notes
    assert "3 images have transparency and are laid on white" in source.notes


def test_what_no_batch_could_hold_is_named(tmp_path):
    Image.new("RGB", (1, 2000)).save(tmp_path / "line.png")
    Image.new("RGB", (4, 4)).save(tmp_path / "good.png")
    with pytest.raises(ValueError, match=r"line\.png \(it is 2000 high and 1 wide, more than 32 to 1\)"):
        FolderSource(tmp_path, prompt="x").check()


def test_a_name_that_is_no_utf_8_still_has_an_id(tmp_path):
    noise().save(os.fsencode(tmp_path) + b"/caf\xe9.png", "PNG")
    source = FolderSource(tmp_path, prompt="x")
    assert source.ids() == ["caf\\udce9.png"]
    assert len(source.identity()) == 16
    assert source.load(0).size == (16, 16)


def test_a_record_is_the_files_as_they_are(tmp_path):
    (tmp_path / "Sub").mkdir()
    noise().save(tmp_path / "Sub/A.PNG")
    Image.new("L", (16, 16), 99).save(tmp_path / "m.png")
    noise(1).save(tmp_path / "Sub/c.webp")
    row = {
        "file_name": "Sub/A.PNG",
        "text": "a",
        "mask": "m.png",
        "control": "Sub/c.webp",
        "weight": 2,
        "n": 1,
    }
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    record = FolderSource(tmp_path).record(0)
    assert (record.id, record.suffix, record.captions) == ("Sub/A.PNG", ".png", (Caption("a"),))
    assert record.image == (tmp_path / "Sub/A.PNG").read_bytes()
    assert record.mask == (tmp_path / "m.png").read_bytes()
    assert record.control == (tmp_path / "Sub/c.webp").read_bytes()
    assert (record.weight, record.extra) == (2, {"n": 1})


def test_captions_are_told_without_the_files(tmp_path):
    noise().save(tmp_path / "a.png")
    source = FolderSource(tmp_path, prompt="x")
    source.check()
    (tmp_path / "a.png").unlink()
    assert source.captions_of(0) == (Caption("x"),)


def test_ids_of_rows_are_used_where_they_tell_images_apart(tmp_path):
    rows = [("a", "one"), ("b", "one"), ("c", "a.png"), ("d", 7), ("e", "five")]
    for name, _ in rows:
        noise().save(tmp_path / f"{name}.png")
    (tmp_path / "metadata.jsonl").write_text(
        "\n".join(json.dumps({"file_name": f"{name}.png", "text": "x", "id": id}) for name, id in rows)
    )
    assert FolderSource(tmp_path).ids() == ["a.png", "b.png", "c.png", "d.png", "five"]


@pytest.fixture
def partnered(tmp_path):
    """Two images, one in a subfolder, with masks within the folder and control images beside it."""
    for i, name in enumerate(
        ("photos/a.jpg", "photos/sub/a.PNG", "photos/masks/a.png", "photos/masks/sub/a.png")
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise(i).convert("RGB" if i < 2 else "L").save(tmp_path / name)
    (tmp_path / "edges/sub").mkdir(parents=True)
    noise(4, 32).save(tmp_path / "edges/a.webp", lossless=True)
    noise(5, 32).save(tmp_path / "edges/sub/a.bmp")
    return tmp_path


def test_masks_and_control_images_lie_in_folders_of_their_own(partnered):
    source = FolderSource(
        partnered / "photos",
        prompt="x",
        mask_root=partnered / "photos/masks",
        control_root=str(partnered / "edges"),
    )
    assert source.ids() == ["a.jpg", "sub/a.PNG"]
    for i in range(2):
        picture = source.load(i)
        assert np.array_equal(picture.mask[..., 0], np.asarray(noise(i + 2).convert("L")))
        control = noise(i + 4, 32).resize((16, 16), Image.Resampling.LANCZOS)
        assert np.array_equal(picture.control, np.asarray(control))


def test_the_images_may_be_their_own_control_images(partnered):
    source = FolderSource(partnered / "edges", prompt="x", control_root=partnered / "edges")
    assert len(source) == 2
    assert np.array_equal(np.asarray(source.load(1).image), np.asarray(source.load(1).control))


def test_images_without_their_mask_are_all_named(partnered):
    (partnered / "photos/masks/a.png").unlink()
    noise().save(partnered / "photos/masks/sub/a.bmp")
    options = {"prompt": "x", "mask_root": partnered / "photos/masks", "control_root": partnered / "edges"}
    (partnered / "edges/sub/a.bmp").unlink()
    with pytest.raises(
        ValueError,
        match=r"(?s)data\.mask_root=.* lacks a file for 2 of 2 images: a\.jpg, sub/a\.PNG \(several: "
        r"sub/a\.bmp, sub/a\.png\).*data\.control_root=.* lacks a file for 1 of 2 images: sub/a\.PNG",
    ):
        FolderSource(partnered / "photos", **options).check()
    noise().save(partnered / "photos/masks/sub/a.PNG")
    with pytest.raises(ValueError, match=r"mask_root=.* for 1 of 2 images: a\.jpg;"):
        FolderSource(partnered / "photos", **options).check()


@pytest.mark.parametrize(("width", "fits"), [(1008, True), (1012, False)])
def test_masks_of_other_proportions_are_refused(tmp_path, width, fits):
    Image.new("RGB", (100, 50)).save(tmp_path / "a.png")
    Image.new("L", (width, 500)).save(tmp_path / "m.png")
    row = {"file_name": "a.png", "text": "x", "mask": "m.png"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    source = FolderSource(tmp_path)
    if fits:
        assert len(source) == 1
    else:
        with pytest.raises(ValueError, match=r"other proportions .*: a\.png 50x100, its mask 500x1012; cut"):
            source.check()


def test_an_image_whose_mask_is_broken_is_a_bad_file(partnered):
    (partnered / "photos/masks/a.png").write_bytes(b"")
    root = partnered / "photos/masks"
    with pytest.raises(ValueError, match=r"1 of 2 .* a\.jpg \(its mask .*a\.png: the file is empty"):
        FolderSource(partnered / "photos", prompt="x", mask_root=root).check()
    source = FolderSource(partnered / "photos", prompt="x", mask_root=root, bad_files="skip")
    assert source.ids() == ["sub/a.PNG"]
    with pytest.raises(FileNotFoundError, match=r"data\.mask_root=.*nowhere does not exist"):
        FolderSource(partnered / "photos", mask_root=partnered / "nowhere")


@pytest.fixture
def kohya(tmp_path):
    """Three folders in kohya's way; one image of the first has a caption of its own."""
    for name in ("10_sks cat/1", "10_sks cat/2", "1_dog/in/1", "2024_holiday/1", "top"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise().save(tmp_path / f"{name}.png")
    (tmp_path / "10_sks cat/2.txt").write_text("own")
    return tmp_path


def test_numbers_of_folders_repeat_only_when_asked(kohya):
    source = FolderSource(kohya, prompt="x")
    assert source.draw_weights() is None
    assert source.notes == [
        "the numbers of these folders repeat nothing: 10_sks cat, 1_dog, 2024_holiday; with "
        "data.repeat_folders=true their images would be drawn as often"
    ]
    packed = {
        "file_name": "10_sks cat/1.png",
        "weight": 10,
    }  # what `lit-sd prepare` leaves has them in its table
    (kohya / "metadata.jsonl").write_text(json.dumps(packed))
    source = FolderSource(kohya, prompt="x")
    assert source.draw_weights().tolist() == [10, 1, 1, 1, 1]
    assert source.notes == []
    (kohya / "metadata.jsonl").unlink()
    source = FolderSource(kohya, prompt="x", repeat_folders=True)
    assert source.draw_weights().tolist() == [10, 10, 1, 2024, 1]
    assert source.notes == ["draws of the images by folder: 10_sks cat x10, 1_dog x1, 2024_holiday x2024"]
    assert source.record(0).weight == 10


def test_repeats_multiply_the_weights_of_a_table(kohya):
    (kohya / "10_sks cat/metadata.jsonl").write_text('{"file_name": "1.png", "weight": 0.5}')
    source = FolderSource(kohya, missing_captions="empty", repeat_folders=True)
    assert source.draw_weights().tolist() == [5, 10, 1, 2024, 1]
    assert source.captions() == ["", "own", "", "", ""]
    assert source.record(0).captions == ()


def test_names_of_folders_are_captions_where_images_have_none(kohya):
    with pytest.raises(ValueError, match=r"4 of 5 images have no caption.*but top\.png lie in no subfolder"):
        FolderSource(kohya, missing_captions="folder").check()
    (kohya / "top.png").unlink()
    source = FolderSource(kohya, missing_captions="folder")
    assert source.captions() == ["sks cat", "own", "dog", "holiday"]
    assert any("3 of 4 images have no caption" in note for note in source.notes)
    (kohya / "10_sks cat/2.txt").unlink()
    (kohya / "10_sks cat").rename(kohya / "cats")
    assert FolderSource(kohya, missing_captions="folder").captions() == ["dog", "holiday", "cats", "cats"]


def test_a_stamp_changes_with_the_files_and_only_then(partnered):
    source = FolderSource(partnered / "edges", prompt="x", control_root=partnered / "edges")
    stamps = [source.stamp(i) for i in range(2)]
    assert len({*stamps}) == 2
    again = FolderSource(partnered / "edges", prompt="y", control_root=partnered / "edges", repeats=3)
    assert [again.stamp(i) for i in range(2)] == stamps
    os.utime(partnered / "edges/a.webp", ns=(1, 1))
    assert [source.stamp(i) == stamps[i] for i in range(2)] == [False, True]
    (partnered / "edges/a.webp").unlink()
    assert source.stamp(0) is None
    assert source.digest(1) == source.record(1).digest


def test_a_stamp_holds_the_mask_too(partnered):
    source = FolderSource(partnered / "photos", prompt="x", mask_root=partnered / "photos/masks")
    before = source.stamp(0), source.stamp(1)
    os.utime(partnered / "photos/masks/a.png", ns=(1, 1))
    assert (source.stamp(0) == before[0], source.stamp(1) == before[1]) == (False, True)


def test_the_rule_is_the_sources(tmp_path):
    noise().save(tmp_path / "a.png")
    rule = CaptionRule(prefix="sks")
    assert FolderSource(tmp_path, prompt="x", rule=rule).rule is rule
    assert FolderSource(tmp_path, prompt="x").rule == CaptionRule()


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


@pytest.mark.parametrize(
    ("file", "kind"), [("00000.tar", "webdataset"), ("data.mdb", "lmdb"), ("a.arrow", "hub"), ("a.md", None)]
)
def test_a_folder_for_another_kind_is_told_which(tmp_path, file, kind):
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(ValueError, match="holds no images") as error:
        FolderSource(tmp_path, prompt="x").check()
    assert str(error.value).endswith(f"; data={kind} reads such folders") == (kind is not None)
