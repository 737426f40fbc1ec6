"""Pixels and SDXL's six numbers against values worked out by hand (F01, F02, F08)."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from sized_source import SizedSource

from lit_sd.data.batching import Draw
from lit_sd.data.examples import Examples
from lit_sd.data.folder import FolderSource
from lit_sd.data.source import Picture
from lit_sd.data.transforms import (
    Crop,
    cover_size,
    cut,
    decode,
    draw_crop,
    inspect_image,
    mask_box,
    read_image,
    scale_to,
    to_rgb,
)

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def halves(width: int, height: int) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), BLUE)
    image.paste(RED, (0, 0, width // 2, height))
    return image


def near(pixel: tuple[int, ...], colour: tuple[int, ...]) -> bool:
    return max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) < 12


@pytest.mark.parametrize("ext", ["jpg", "png", "webp", "tif"])
def test_a_photo_turned_by_exif_stands_upright(tmp_path, ext):
    """Orientation 6: the stored left is the picture's top. 60x20 becomes 20 wide, 60 high, red above."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / f"turned.{ext}"
    halves(60, 20).save(path, quality=95, exif=exif)
    image = read_image(path)
    assert image.size == (20, 60)
    assert near(image.getpixel((10, 5)), RED)
    assert near(image.getpixel((10, 55)), BLUE)
    assert inspect_image(path).size == inspect_image(path, decode=False).size == (60, 20)


@pytest.mark.parametrize(
    ("orientation", "corner"),
    # Where the top left pixel of the stored picture stands in the upright one, by EXIF 2.32, table 4.
    [(1, (0, 0)), (2, (3, 0)), (3, (3, 1)), (4, (0, 1)), (5, (0, 0)), (6, (1, 0)), (7, (1, 3)), (8, (0, 3))],
)
def test_every_orientation(tmp_path, orientation, corner):
    image = Image.new("RGB", (4, 2))
    image.putpixel((0, 0), WHITE)
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    upright = read_image(tmp_path / "a.png")
    assert upright.size == ((4, 2) if orientation < 5 else (2, 4))
    assert upright.getpixel(corner) == WHITE


def test_exif_behind_the_pixels_of_a_png_counts_too(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    halves(6, 2).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    end = whole.index(b"IEND") - 4
    (tmp_path / "a.png").write_bytes(whole[:end] + png_chunk(b"eXIf", exif.tobytes()[6:]) + whole[end:])
    assert inspect_image(tmp_path / "a.png").size == (6, 2)
    assert read_image(tmp_path / "a.png").size == (2, 6)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_transparency_is_laid_on_white(tmp_path):
    rng = np.random.default_rng(0)
    hidden = rng.integers(0, 255, (4, 4, 4), np.uint8)
    hidden[..., 3] = 0
    Image.fromarray(hidden).save(tmp_path / "clear.png")
    assert np.asarray(read_image(tmp_path / "clear.png")).min() == 255
    assert inspect_image(tmp_path / "clear.png").alpha
    half = Image.new("RGBA", (1, 1), (255, 0, 0, 51))  # a fifth of red on white
    assert to_rgb(half).getpixel((0, 0)) == (255, 204, 204)
    assert to_rgb(Image.new("LA", (1, 1), (0, 0))).getpixel((0, 0)) == WHITE
    palette = Image.new("P", (2, 1))
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "palette.png", transparency=0)
    read = read_image(tmp_path / "palette.png")
    assert (read.getpixel((0, 0)), read.getpixel((1, 0))) == (WHITE, BLUE)


MODES = "1 L P RGB RGBA CMYK YCbCr LAB HSV I F LA PA RGBX RGBa La I;16 I;16L I;16B".split()  # noqa: SIM905


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(mode):
    assert to_rgb(Image.new(mode, (3, 2))).mode == "RGB"


def test_sixteen_bits_are_scaled_by_their_range(tmp_path):
    """65535 is white, 0 black, and 32896 = 128 * 257 is 128 of 255."""
    Image.fromarray(np.array([[0, 32896, 65535]], np.uint16)).save(tmp_path / "grey.png")
    assert np.asarray(read_image(tmp_path / "grey.png"))[0].tolist() == [[0] * 3, [128] * 3, [255] * 3]
    assert np.asarray(to_rgb(Image.fromarray(np.array([[0, 0.2, 1]], np.float32))))[0, :, 0].tolist() == [
        0,
        51,
        255,
    ]
    with pytest.raises(ValueError, match="NaN"):
        to_rgb(Image.fromarray(np.array([[np.nan]], np.float32)))


def test_sixteen_bit_colour_with_a_transparent_colour(tmp_path):
    row = b"\0" + struct.pack(
        ">6H", 65535, 0, 0, 0, 65535, 0
    )  # a red and a green pixel; green is transparent
    png = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    png += png_chunk(b"tRNS", struct.pack(">3H", 0, 65535, 0)) + png_chunk(b"IDAT", zlib.compress(row))
    (tmp_path / "a.png").write_bytes(png + png_chunk(b"IEND", b""))
    assert read_image(tmp_path / "a.png").getpixel((0, 0)) == RED


def test_a_thread_of_an_image_is_refused(tmp_path):
    """1 x 100000 pixels would be 512 x 51200000 when they cover 512 x 512."""
    Image.new("RGB", (100000, 1)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="1 high and 100000 wide, more than 32 to 1"):
        inspect_image(tmp_path / "a.png")


def test_an_unreadable_image_is_named(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    with pytest.raises(OSError, match=r"bad\.png"):
        read_image(tmp_path / "bad.png")


@pytest.mark.parametrize(
    ("size", "target", "scaled"),
    [((40, 80), (20, 20), (20, 40)), ((100, 30), (64, 64), (213, 64)), ((8, 8), (32, 16), (32, 32))],
)
def test_scaling_covers_the_target(size, target, scaled):
    assert cover_size(size, target) == scaled
    image = scale_to(Image.new("RGB", (size[1], size[0])), scaled)
    assert (image.height, image.width) == scaled


def test_flip_comes_before_the_crop():
    """Columns 0..5 hold their number. Flipped they read 5 4 3 2 1 0, of which columns 1..3 are 4 3 2."""
    columns = Image.fromarray(np.tile(np.arange(6, dtype=np.uint8)[None, :, None], (2, 1, 3)))
    assert cut(columns, (2, 3), Crop(False, 0, 1))[0, :, 0].tolist() == [1, 2, 3]
    assert cut(columns, (2, 3), Crop(True, 0, 1))[0, :, 0].tolist() == [4, 3, 2]


def test_crops_reach_every_corner_and_nothing_beyond():
    rng = np.random.default_rng(0)
    crops = [draw_crop((10, 8), (8, 8), rng, flip=0.5) for _ in range(200)]
    assert {crop.top for crop in crops} == {0, 1, 2}
    assert {crop.left for crop in crops} == {0}
    assert 70 < sum(crop.flip for crop in crops) < 130
    assert draw_crop((11, 8), (8, 8), rng, flip=0.0, where="center") == Crop(False, 1, 0)
    assert draw_crop((8, 8), (8, 8), rng, flip=1.0, where="center").flip


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_the_six_numbers_of_sdxl(tmp_path, flip):
    """A picture 40 high and 80 wide at 20x20: scaled to 20x40, cropped in the middle at (0, 10)."""
    halves(80, 40).save(tmp_path / "a.png")
    source = FolderSource(tmp_path, prompt="halves")
    sample, padding = Examples({"a": source}, flip=flip, crop="center")[Draw("a", 0, 0, 0, 20, 20)]
    assert not padding
    assert sample["original_size"] == (40, 80)
    assert sample["crop_top_left"] == (0, 10)
    assert sample["pixels"].shape == (20, 20, 3)
    left = sample["pixels"][10, 2]
    assert (left[0] > 240) == (flip == 0.0)  # red stays left, or moves right


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_random_crop_is_where_its_numbers_say(tmp_path, flip):
    """Each column of the picture has its own grey: the first pixel tells which column the crop began at."""
    grey = np.tile((np.arange(40, dtype=np.uint8) * 5)[None, :, None], (20, 1, 3))
    Image.fromarray(grey).save(tmp_path / "a.png")
    examples = Examples({"a": FolderSource(tmp_path, prompt="")}, flip=flip, seed=3)
    lefts = set()
    for epoch in range(12):
        sample, _ = examples[Draw("a", 0, epoch, 0, 20, 20)]
        left = sample["crop_top_left"][1]
        column = round(int(sample["pixels"][0, 0, 0]) / 5)
        assert column == (39 - left if flip else left)
        lefts.add(left)
    assert len(lefts) > 4


@pytest.mark.parametrize(
    ("box", "corners"),
    [
        ((2, 3, 5, 6), {(top, left) for top in (1, 2) for left in (2, 3)}),  # 3x3 in a crop of 4: two places
        ((0, 0, 1, 1), {(0, 0)}),  # at the border
        ((1, 0, 7, 10), {(top, left) for top in (1, 2, 3) for left in range(7)}),  # larger than the crop
    ],
)
def test_crops_hold_what_the_mask_shows(box, corners):
    rng = np.random.default_rng(0)
    crops = {draw_crop((10, 10), (4, 4), rng, flip=0.0, where="mask", box=box)[1:] for _ in range(300)}
    assert crops == corners
    mirrored = {draw_crop((10, 10), (4, 4), rng, flip=1.0, where="mask", box=box)[1:] for _ in range(300)}
    assert mirrored == {(top, 6 - left) for top, left in corners}


def test_a_mask_tells_its_box():
    mask = np.zeros((6, 8), np.uint8)
    assert mask_box(Image.fromarray(mask)) is None
    mask[2, 3], mask[4, 6] = 1, 255
    assert mask_box(Image.fromarray(mask)) == (2, 3, 5, 7)


class WithPartners(SizedSource):
    """Noise, with itself as control and its red as mask."""

    def load(self, index, cover=None):
        pixels = np.random.default_rng(index).integers(0, 255, (*self.all[index], 3), np.uint8)
        image = Image.fromarray(pixels)
        return Picture(image, image.size[::-1], (), image.getchannel("R"), image.copy())


@pytest.mark.parametrize("decoded_mb", [0, 1])
def test_one_draw_serves_image_mask_and_control(decoded_mb):
    source = WithPartners([(30, 50)])
    examples = Examples({"a": source}, flip=0.5, decoded_mb=decoded_mb)
    draws = [examples[Draw("a", 0, epoch, 0, 24, 16)][0] for epoch in range(50)]
    for sample in draws:
        assert np.array_equal(sample["control"], sample["pixels"])
        # Scaling one channel is scaling three, so the mask is the red of the picture.
        assert np.array_equal(sample["mask"], sample["pixels"][..., :1])
    assert len({sample["crop_top_left"] for sample in draws}) > 10


def photograph(width: int, height: int) -> bytes:
    """A JPEG with slopes, an edge and some grain."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    grain = np.random.default_rng(0).normal(0, 3, (height, width))
    red = 255 * x + grain
    green = np.where(x + y > 1, 200, 60) + grain
    pixels = np.stack([red, green, 255 * y * x], -1).clip(0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=95, subsampling=0)
    return out.getvalue()


@pytest.mark.parametrize(
    ("size", "cover", "decoded"),
    [
        ((1600, 1200), (300, 300), (800, 600)),  # covers as 400x300: half the size is twice that
        ((1600, 1200), (301, 301), (1600, 1200)),
        ((3200, 2400), (300, 300), (800, 600)),  # a quarter
        ((1600, 1200), (600, 100), (1600, 1200)),  # 800x600: a half would be just that, not twice
    ],
)
def test_large_jpegs_are_decoded_small_and_look_the_same(size, cover, decoded):
    data = photograph(*size)
    small, whole = decode(data, "a.jpg", cover), decode(data, "a.jpg")
    assert small.image.size == decoded
    assert small.size == whole.size == size[::-1]
    target = cover_size(whole.size, cover)
    one, other = (np.asarray(scale_to(d.image, target)).astype(int) for d in (small, whole))
    assert abs(one - other).mean() < 0.5
    assert abs(one - other).max() <= 12


def test_a_turned_jpeg_is_measured_upright(tmp_path):
    image = Image.open(io.BytesIO(photograph(1600, 800)))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "a.jpg", exif=exif, quality=95)
    small = decode((tmp_path / "a.jpg").read_bytes(), "a.jpg", (200, 100))
    assert small.size == (1600, 800)
    assert small.image.size == (200, 400)  # twice what covers


def test_a_png_turned_by_xmp_is_measured_as_it_is_decoded(tmp_path):
    xmp = PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>')
    halves(60, 20).save(tmp_path / "a.png", pnginfo=xmp)
    assert inspect_image(tmp_path / "a.png").size == (60, 20)
    assert decode((tmp_path / "a.png").read_bytes(), "a.png").size == (60, 20)
