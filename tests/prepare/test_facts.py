"""What is known of an image and its captions: numbers by hand, and imagehash's own."""

import hashlib
import io
import sys

import imagehash
import numpy as np
import pytest
from PIL import Image
from small_data import encoded, picture

from lit_sd.data.caption_rules import Caption
from lit_sd.data.source import Record
from lit_sd.prepare import caption_text, facts
from lit_sd.prepare.database import bits_apart
from lit_sd.prepare.examples import Unreadable
from lit_sd.prepare.facts import caption_rows, deviation, image_row, perceptual_hash, rows_of


def record(image: bytes, *captions: str, **more) -> Record:
    return Record("a", image, ".png", tuple(Caption(text) for text in captions), **more)


def test_an_upright_size_and_what_the_file_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    row = image_row(record(encoded(picture(1, 80, 60), "JPEG", exif=exif)))
    assert (row.height, row.width, row.format, row.mode, row.alpha, row.error) == (
        80,
        60,
        "JPEG",
        "RGB",
        0,
        None,
    )


def test_transparency_and_animation_are_noticed() -> None:
    clear = Image.new("RGBA", (8, 8), (9, 9, 9, 100))
    assert image_row(record(encoded(clear))).alpha == 1
    frames = [picture(seed, 8, 8) for seed in (1, 2)]
    moving = io.BytesIO()
    frames[0].save(moving, "GIF", save_all=True, append_images=frames[1:])
    row = image_row(record(moving.getvalue()))
    assert (row.animated, row.format, row.mode) == (1, "GIF", "P")


@pytest.mark.parametrize("part", ["mask", "control"])
def test_a_broken_mask_or_control_image_is_an_error(part: str) -> None:
    row = image_row(record(encoded(picture(1)), **{part: b"no image"}))
    assert row.error is not None
    assert f"the {part}" in row.error


def test_deviation_by_hand() -> None:
    image = Image.new("RGB", (10, 10), (100, 100, 100))
    image.paste((200, 100, 100), (0, 0, 5, 10))  # half of it, in one channel: 50 levels off the mean
    assert deviation(image) == 50
    image = Image.new("RGB", (10, 10))
    image.putpixel((3, 3), (255, 255, 255))  # exactly the outermost hundredth
    assert deviation(image) == 0


def test_the_hash_is_imagehashs_own_whatever_its_first_bit() -> None:
    for seed in range(6):
        image = picture(seed)
        assert f"{perceptual_hash(image) & (2**64 - 1):016x}" == str(imagehash.phash(image))


def test_scaling_and_compression_hardly_change_it_and_other_pictures_do() -> None:
    large = picture(1, 200, 160)
    own = image_row(record(encoded(large))).phash
    for other in (large.resize((100, 80)), large.resize((333, 266))):
        assert bits_apart(own, image_row(record(encoded(other, "JPEG", quality=70))).phash) <= 4
    assert bits_apart(own, image_row(record(encoded(picture(2, 200, 160)))).phash) > 12


def test_pixels_are_told_apart_by_what_is_seen() -> None:
    image = picture(1)
    png, bmp = (image_row(record(encoded(image, kind))) for kind in ("PNG", "BMP"))
    assert png.pixels == bmp.pixels
    assert png.digest != bmp.digest
    expected = hashlib.blake2b(b"(64, 64)", digest_size=16)
    expected.update(np.asarray(image).tobytes())
    assert png.pixels == expected.digest()


def test_a_mask_leaves_the_pixels_alone_and_has_to_have_the_images_proportions() -> None:
    image = encoded(picture(1, 100, 50))
    plain, masked, wrong = (
        image_row(record(image, mask=mask))
        for mask in (None, encoded(picture(2, 50, 25)), encoded(picture(2, 50, 26)))
    )
    assert (plain.pixels, plain.parts, plain.error) == (masked.pixels, 0, None)
    assert masked.parts
    assert masked.error is None
    # 100 * 26 / (50 * 50) is 1.04, and 1.01 is let pass.
    assert wrong.error == "the mask is 50 x 26, the image 100 x 50: other proportions; cut them alike"


def test_captions_stand_once_where_normalising_changes_nothing_and_twice_where_it_does() -> None:
    rows = caption_rows(7, record(b"", "a cat", " a  cafÃ© ,, red, ", "", " \u200b ", "a dog"))
    assert [row[:4] for row in rows] == [
        (7, 0, 2, "a cat"),
        (7, 1, 0, "a  cafÃ© ,, red,"),
        (7, 1, 1, "a café, red"),
        (7, 3, 0, "\u200b"),
        (7, 4, 2, "a dog"),
    ]


def test_what_is_no_image_is_called_so() -> None:
    assert image_row(Record("a.png", b"milk, eggs", ".png")).error == "its content is no image"


def test_what_cannot_be_read_has_a_row_too() -> None:
    row, captions = rows_of(3, Unreadable("gone.png", "no such file"))
    assert row[:3] == (3, "gone.png", "no such file")
    assert captions == []


@pytest.mark.parametrize(("library", "load"), [("imagehash", facts.imagehash), ("ftfy", caption_text.ftfy)])
def test_a_missing_library_is_named_with_its_extra(library: str, load, monkeypatch) -> None:
    load.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{library}.*pip install 'lit-sd\[data\]'"):
        load()
