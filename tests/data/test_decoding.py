"""Decoded pixels against values worked out by hand (F01, F02)."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lit_sd.data.decoding import decode, decode_scaled, inspect_image, read_image, to_rgb
from lit_sd.data.transforms import cover_size, scale_to

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def halves(width: int, height: int) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), BLUE)
    image.paste(RED, (0, 0, width // 2, height))
    return image


def near(pixel: tuple[int, ...], colour: tuple[int, ...]) -> bool:
    return max(abs(int(a) - int(b)) for a, b in zip(pixel, colour, strict=True)) < 12


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


def jpeg(image: Image.Image, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": 0},
        {"subsampling": 1},
        {"subsampling": 2, "quality": 30},
        {"progressive": True},
        {"keep_rgb": True},
        {"restart_marker_blocks": 4},
    ],
)
@pytest.mark.parametrize("size", [(41, 63), (64, 48)])
def test_a_jpeg_that_needs_no_scaling_has_the_pixels_that_pillow_gives(monkeypatch, size, options):
    data = jpeg(Image.open(io.BytesIO(photograph(size[1], size[0]))), **options)
    expected = np.asarray(Image.open(io.BytesIO(data)))
    monkeypatch.setattr("lit_sd.data.decoding._decode", None)  # Pillow isn't asked
    pixels, found, alpha = decode_scaled(data, "a.jpg", (size[0], size[1] // 2))
    assert found == size
    assert alpha is None
    assert np.array_equal(pixels, expected)
    room = np.zeros((2, *size, 3), np.uint8)
    assert decode_scaled(data, "a.jpg", size, room[1])[0].base is room
    assert np.array_equal(room[1], expected)
    assert not room[0].any()
    assert np.array_equal(decode_scaled(data, "a.jpg", None, room[0, 1:])[0], expected)
    assert not room[0].any()


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_a_jpeg_without_three_colours_becomes_rgb(mode):
    data = jpeg(halves(64, 32).convert(mode))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.array_equal(decode_scaled(data, "a.jpg", (32, 64))[0], expected)


@pytest.mark.parametrize("how", ["exif", "xmp"])
def test_a_turned_jpeg_of_the_right_size_is_turned(how):
    exif = Image.Exif()
    exif[0x0112] = 6
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="6"/>'
    data = jpeg(halves(48, 48), quality=95, **{how: exif if how == "exif" else xmp})
    pixels, size, _ = decode_scaled(data, "a.jpg", (48, 48))
    assert size == (48, 48)
    assert near(pixels[4, 40], RED)
    assert near(pixels[40, 4], BLUE)


def test_what_does_not_cover_is_scaled_as_pillow_scales():
    data = photograph(90, 60)
    pixels, size, _ = decode_scaled(data, "a.jpg", (40, 40))
    whole = Image.open(io.BytesIO(data))
    assert size == (60, 90)
    assert np.array_equal(pixels, np.asarray(whole.resize((60, 40), Image.Resampling.LANCZOS)))


@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_a_truncated_jpeg_is_named(kept):
    data = photograph(64, 64)
    with pytest.raises(OSError, match=r"flowers\.jpg: can't be read as an image: .*truncated"):
        decode_scaled(data[: int(len(data) * kept)], "flowers.jpg", (64, 64))
