"""Which of several alike is kept, and what is refused for being in the validation data."""

from pathlib import Path

import pytest
from PIL import Image, ImageOps
from small_data import decisions, encoded, picture, refused, write_folder


def jpeg(image: Image.Image, quality: int = 90) -> bytes:
    return encoded(image, "JPEG", quality=quality)


def test_the_largest_by_area_then_by_bytes_then_by_name_is_kept(tmp_path: Path) -> None:
    big, small = picture(1, 96, 96), picture(1, 96, 96).resize((64, 64))
    examples = {
        "a_small.png": (small, "one"),
        "b_rough.jpg": (jpeg(big, 60), "one, rough"),
        "c_fine.jpg": (jpeg(big, 95), "one, fine"),
        "d_again.jpg": (jpeg(big, 95), "one, again"),
        "e_other.png": (picture(2), "two"),
    }
    rows = decisions(write_folder(tmp_path / "in", examples), tmp_path / "out")
    assert {name for name, row in rows.items() if row["kept"]} == {"c_fine.jpg", "e_other.png"}
    assert rows["d_again.jpg"]["rule"] == "exact_duplicate"
    assert rows["d_again.jpg"]["detail"] == {"kept": "c_fine.jpg", "distance": 0, "same": "file"}
    for name in ("a_small.png", "b_rough.jpg"):
        assert rows[name]["rule"] == "near_duplicate"
        assert (rows[name]["detail"]["kept"], rows[name]["detail"]["same"]) == ("c_fine.jpg", "look")


def test_the_same_pixels_in_another_file_are_an_exact_duplicate(tmp_path: Path) -> None:
    image = picture(1)
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees clockwise, which undoes it
    examples = {
        "a.png": (image, "one"),
        "b.bmp": (encoded(image, "BMP"), "one"),
        "c.png": (encoded(turned, exif=exif), "one"),
        "d.png": (ImageOps.mirror(image), "mirrored"),
    }
    data = write_folder(tmp_path / "in", examples)
    assert refused(data, tmp_path / "out") == {"a.png": "exact_duplicate", "c.png": "exact_duplicate"}
    assert (
        decisions(data, tmp_path / "out")["a.png"]["detail"]["same"] == "pixels"
    )  # BMP's file is the largest


def test_each_rule_on_duplicates_can_be_off(tmp_path: Path) -> None:
    image = picture(1)
    examples = {
        "a.png": (image, "one"),
        "b.png": (encoded(image, compress_level=0), "one"),
        "c.jpg": (jpeg(image), "one"),
        "d.png": (picture(2), "two"),
    }
    data = write_folder(tmp_path / "in", examples)
    assert refused(data, tmp_path / "out", off=("exact_duplicate", "near_duplicate")) == {}
    assert refused(data, tmp_path / "out", off=("near_duplicate",)) == {"a.png": "exact_duplicate"}
    near = {"a.png": "near_duplicate", "c.jpg": "near_duplicate"}
    assert refused(data, tmp_path / "out", off=("exact_duplicate",)) == near


def test_nothing_goes_for_the_sake_of_what_goes_itself(tmp_path: Path) -> None:
    big = picture(1, 300, 90).resize((300, 90))
    examples = {"big.png": (big, "x"), "small.png": (big.resize((150, 45)), "a good caption")}
    data = write_folder(tmp_path / "in", examples)
    assert refused(data, tmp_path / "out", max_aspect=4) == {"big.png": "caption_short"}


def test_images_with_other_control_images_are_no_duplicates(tmp_path: Path) -> None:
    image = picture(1)
    examples = {"a.png": (image, "one"), "b.png": (image, "one"), "c.png": (image, "one")}
    data = write_folder(tmp_path / "in", examples)
    for name, seed in (("x", 5), ("y", 6), ("z", 6)):
        write_folder(data, {f"control/{name}.png": (picture(seed), None)})
    rows = [
        f'{{"file_name": "{image}.png", "text": "one thing", "control": "control/{control}.png"}}\n'
        for image, control in zip("abc", "xyz", strict=True)
    ]
    (data / "metadata.jsonl").write_text("".join(rows))
    assert refused(data, tmp_path / "out") == {"c.png": "exact_duplicate"}


def test_what_the_validation_data_holds_is_refused_from_the_data(tmp_path: Path) -> None:
    val = write_folder(tmp_path / "val", {"v1.png": (picture(1), "v"), "v2.png": (picture(2, 96, 96), None)})
    examples = {
        "copy.png": (picture(1), "a copy"),
        "near.png": (picture(2, 96, 96).resize((64, 64)), "smaller"),
        "near2.jpg": (jpeg(picture(2, 96, 96)), "rougher"),
        "other.png": (picture(3), "other"),
    }
    data = write_folder(tmp_path / "in", examples)
    rows = decisions(data, tmp_path / "out", val=str(val))
    assert {name: row["rule"] for name, row in rows.items() if not row["kept"]} == {
        "copy.png": "leak",
        "near.png": "leak",
        "near2.jpg": "leak",
    }
    assert rows["copy.png"]["detail"] == {"kept": "v1.png", "distance": 0, "same": "file"}
    assert rows["near.png"]["detail"]["kept"] == "v2.png"
    only = refused(data, tmp_path / "out", val=str(val), off=("near_duplicate",))
    assert only == {"copy.png": "leak"}
    assert refused(data, tmp_path / "out", val=str(val), off=("leak",)) == {"near.png": "near_duplicate"}
    assert refused(data, tmp_path / "out") == {
        "near.png": "near_duplicate"
    }  # the validation data is forgotten


def test_what_is_held_out_leaks_whatever_mask_it_is_trained_with(tmp_path: Path) -> None:
    val = write_folder(tmp_path / "val", {"v1.png": (picture(1), "v"), "v2.png": (picture(2, 96, 96), "v")})
    images = {"copy": picture(1), "near": picture(2, 96, 96).resize((64, 64)), "other": picture(3)}
    data = write_folder(tmp_path / "in", {f"{name}.png": (image, name) for name, image in images.items()})
    masks = {f"{name}.png": (picture(9), None) for name in images}
    options = {"val": str(val), "read": {"mask_root": str(write_folder(tmp_path / "masks", masks))}}
    leaks = {"copy.png": "leak", "near.png": "leak"}
    assert refused(data, tmp_path / "out", **options) == leaks
    assert refused(data, tmp_path / "out", off=("near_duplicate",), **options) == {"copy.png": "leak"}


@pytest.mark.parametrize("change", ["crop", "colour", "mirror"])
def test_what_a_person_would_call_another_picture_stays(change: str, tmp_path: Path) -> None:
    image = picture(1)
    red, green, blue = image.split()
    other = {
        "crop": image.crop((20, 20, 64, 64)),
        "colour": Image.merge("RGB", (blue, green, red)),
        "mirror": ImageOps.mirror(image),
    }[change]
    data = write_folder(tmp_path / "in", {"a.png": (image, "one"), "b.png": (other, "two")})
    assert refused(data, tmp_path / "out") == {}
