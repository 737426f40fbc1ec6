"""The index of a shard against tarfile and Pillow, and what is found in shards that are not as they should be
(F15)."""

import os
import tarfile
import time

import numpy as np
import pytest
from PIL import Image
from tiny_shards import encoded, img2dataset_shard, jpeg, picture, png, tar

from lit_sd.data.shards.index import ShardIndex, index_shard, load_index, save_index
from lit_sd.data.shards.members import ROLES, Reading


def index_of(path, **reading) -> ShardIndex:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return index_shard(descriptor, Reading(**reading))
    finally:
        os.close(descriptor)


def at(path, span) -> bytes:
    return path.read_bytes()[span.start : span.start + span.size]


def test_every_file_is_where_the_index_says(tmp_path):
    path = img2dataset_shard(tmp_path / "0.tar", 3)
    index = index_of(path)
    assert index.names == ["000000000.jpg", "000000001.jpg", "000000002.jpg"]
    assert index.sizes.tolist() == [[16, 24], [17, 24], [18, 24]]
    for row in range(3):
        assert at(path, index.span(row, "image")) == jpeg(row, 16 + row, 24)
        assert at(path, index.span(row, "text")) == f"picture {row}".encode()
        assert b'"status": "success"' in at(path, index.span(row, "json"))
        assert index.span(row, "mask") is None
    assert index.entry[:7] == (3, 3, 0, False, 0, 0, "")
    assert index.ids == ["", "", ""]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names(tmp_path, format):
    long = f"{'folder/' * 20}picture"
    names = [f"{long}.png", "café.png"] if format != tarfile.USTAR_FORMAT else [f"{long}.png"]
    path = tar(tmp_path / "0.tar", {name: png(i) for i, name in enumerate(names)}, format)
    index = index_of(path)
    assert index.names == names
    assert [at(path, index.span(row, "image")) for row in range(len(names))] == [png(0), png(1)][: len(names)]


def test_sizes_are_of_the_upright_picture_and_transparency_is_counted(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(picture(0, 20, 60), "JPEG", exif=exif)
    clear = encoded(picture(1, 10, 12).convert("RGBA"))
    path = tar(
        tmp_path / "0.tar", {"a.jpg": turned, "b.png": clear, "c.webp": encoded(picture(2, 9, 8), "WEBP")}
    )
    for verify in (True, False):
        index = index_of(path, verify=verify)
        assert index.sizes.tolist() == [[60, 20], [10, 12], [9, 8]]
        assert index.entry.alpha == 1
        assert index.entry.verified is verify


def test_without_verify_a_large_header_is_still_read(tmp_path):
    exif = Image.Exif()
    exif[0x010E] = "x" * 60_000  # a description
    data = encoded(picture(0, 33, 44), "JPEG", exif=exif, comment=b"y" * 60_000)
    assert index_of(tar(tmp_path / "0.tar", {"a.jpg": data}), verify=False).sizes.tolist() == [[33, 44]]


def test_keys_end_at_the_first_dot_and_partners_are_told_from_the_image(tmp_path):
    files = {
        "a/x.y/0001.mask.png": png(1),
        "a/x.y/0001.JPG": jpeg(2),
        "a/x.y/0001.control.webp": encoded(picture(3), "WEBP"),
        "a/x.y/0001.cls": b"7",
        "README.md": b"no example",
        ".DS_Store": b"",
        "__MACOSX/a.jpg": b"x",
    }
    path = tar(tmp_path / "0.tar", files)
    index = index_of(path)
    assert index.names == ["a/x.y/0001.JPG"]
    assert at(path, index.span(0, "mask")) == png(1)
    assert at(path, index.span(0, "image")) == jpeg(2)
    assert at(path, index.span(0, "control")) == files["a/x.y/0001.control.webp"]
    assert index.endings[".cls"] == 1


def test_of_several_images_the_option_says_which(tmp_path):
    path = tar(tmp_path / "0.tar", {"1.left.png": png(0, 8, 8), "1.right.png": png(1, 9, 9), "1.txt": b"x"})
    assert index_of(path).faults == {
        "1": "it has 2 images, .left.png, .right.png; set data.image_ext=left.png"
    }
    assert index_of(path, image_ext="right.png").sizes.tolist() == [[9, 9]]


def test_a_shard_that_is_cut_off_keeps_what_is_whole(tmp_path):
    path = img2dataset_shard(tmp_path / "0.tar", 4)
    with tarfile.open(path) as whole:
        third = whole.getmember("000000002.jpg")
    data = path.read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[: third.offset_data + 100])
    index = index_of(tmp_path / "cut.tar")
    assert index.names == ["000000000.jpg", "000000001.jpg"]
    assert index.entry.broken.startswith(f"it is cut off or damaged at byte {third.offset} of")
    assert list(index.faults) == ["000000002"]


def test_a_shard_cut_between_two_files_is_cut_all_the_same(tmp_path):
    path = img2dataset_shard(tmp_path / "0.tar", 4)
    with tarfile.open(path) as whole:
        caption = whole.getmember("000000002.txt")
    (tmp_path / "cut.tar").write_bytes(path.read_bytes()[: caption.offset])
    index = index_of(tmp_path / "cut.tar")
    assert index.names == ["000000000.jpg", "000000001.jpg"], "the third lacks its caption"
    assert index.entry.broken


def test_a_damaged_header_ends_what_can_be_read(tmp_path):
    path = img2dataset_shard(tmp_path / "0.tar", 4)
    with tarfile.open(path) as whole:
        third = whole.getmember("000000002.jpg").offset
    data = bytearray(path.read_bytes())
    data[third] ^= 255
    path.write_bytes(data)
    index = index_of(path)
    assert index.names == ["000000000.jpg"]
    assert f"damaged at byte {third} of" in index.entry.broken


@pytest.mark.parametrize("data", [b"", b"<html>404</html>" * 100])
def test_what_is_no_tar_is_called_so(tmp_path, data):
    (tmp_path / "0.tar").write_bytes(data)
    assert index_of(tmp_path / "0.tar").entry.broken == "it is no tar file"


def test_what_is_bad_in_it_is_named_by_key(tmp_path):
    files = [
        ("0.png", png(0)),
        ("1.txt", b"no image"),
        ("2.jpg", jpeg(0, 64, 64)[:-600]),
        ("3.jpg", b""),
        ("4.jpg", b"milk, eggs"),
        ("5.png", png(0, 1, 40)),
        ("6.png", png(0)),
        ("6.json", b"{not json"),
        ("7.png", png(0)),
        ("7.txt", b"caf\xe9"),
        ("8.png", png(0)),
        ("8.png", png(1)),
        ("9.png", png(0)),
        ("9.mask.png", b"x"),
    ]
    index = index_of(tar(tmp_path / "0.tar", files))
    assert index.names == ["0.png"]
    assert index.entry.bad == 9
    wanted = {
        "1": "it has no image, only .txt",
        "2": "truncated",
        "3": "empty",
        "4": "its content is no image",
        "5": "1 high and 40 wide",
        "6": "its .json can't be read",
        "7": "its caption is not UTF-8",
        "8": "its .png is there twice",
        "9": "its mask: its content is no image",
    }
    assert list(index.faults) == list(wanted)
    for key, why in wanted.items():
        assert why in index.faults[key]
    assert list(index_of(tmp_path / "0.tar", verify=False).names) == ["0.png", "2.jpg", "9.png"]


def test_files_of_an_example_need_not_lie_together(tmp_path):
    files = [("0.png", png(0)), ("1.png", png(1)), ("0.txt", b"zero"), ("1.txt", b"one")]
    path = tar(tmp_path / "0.tar", files)
    index = index_of(path)
    assert [at(path, index.span(row, "text")) for row in (0, 1)] == [b"zero", b"one"]
    assert index.entry.scattered == 2


def test_an_index_survives_the_disk(tmp_path):
    files = {"0.png": png(0), "0.txt": b"zero", "1.png": png(1), "2.txt": b""}
    index = index_of(tar(tmp_path / "0.tar", files))
    save_index(tmp_path / "new/0.npz", index)
    again = load_index(tmp_path / "new/0.npz")
    assert again is not None
    for field in ("entry", "names", "ids", "faults", "endings"):
        assert getattr(again, field) == getattr(index, field)
    for field in ("spans", "sizes", "weights", "captioned"):
        assert np.array_equal(getattr(again, field), getattr(index, field))
    assert again.captioned.tolist() == [True, False]
    assert again.spans.shape == (2, len(ROLES), 2)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["0.npz"], "nothing is left aside"


def test_an_empty_index_survives_too(tmp_path):
    index = index_of(tar(tmp_path / "0.tar", {}))
    save_index(tmp_path / "0.npz", index)
    assert load_index(tmp_path / "0.npz").entry == index.entry


def test_a_damaged_index_counts_as_none(tmp_path):
    path = tmp_path / "0.npz"
    assert load_index(path) is None
    save_index(path, index_of(img2dataset_shard(tmp_path / "0.tar", 2)))
    data = path.read_bytes()
    for bad in (b"", data[: len(data) // 2], b"junk" * 100):
        path.write_bytes(bad)
        assert load_index(path) is None
    np.savez(path, names=np.array([{"a": 1}], dtype=object))  # a pickle, which may run anything
    assert load_index(path) is None


def test_a_thousand_samples_cost_little(tmp_path):
    image = png(0)
    files = {
        f"{i:09d}.{ext}": image if ext == "png" else b"{}"
        for i in range(1000)
        for ext in ("png", "txt", "json")
    }
    save_index(tmp_path / "0.npz", index_of(tar(tmp_path / "0.tar", files), verify=False))
    assert (tmp_path / "0.npz").stat().st_size < 100_000
    times = []
    for _ in range(10):
        start = time.perf_counter()
        load_index(tmp_path / "0.npz")
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01, "2 ms and less on an idle machine"
