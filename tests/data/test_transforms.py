"""Scaling, crops and SDXL's six numbers against values worked out by hand (F08, F10)."""

import numpy as np
import pytest
from PIL import Image
from sized_source import SizedSource

from lit_sd.data.batching import Draw
from lit_sd.data.examples import Examples
from lit_sd.data.folder import FolderSource
from lit_sd.data.source import Picture
from lit_sd.data.transforms import Crop, cover_size, cut, draw_crop, mask_box, pixels_of, scale_to

RED, BLUE = (255, 0, 0), (0, 0, 255)


def halves(width: int, height: int) -> Image.Image:
    """Left half red, right half blue."""
    image = Image.new("RGB", (width, height), BLUE)
    image.paste(RED, (0, 0, width // 2, height))
    return image


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
    columns = np.tile(np.arange(6, dtype=np.uint8)[None, :, None], (2, 1, 3))
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
    mask = np.zeros((6, 8, 1), np.uint8)
    assert mask_box(mask) is None
    mask[2, 3], mask[4, 6] = 1, 255
    assert mask_box(mask) == (2, 3, 5, 7)


class WithPartners(SizedSource):
    """Noise, with itself as control and its red as mask."""

    def load(self, index, cover=None, into=None):
        pixels = np.random.default_rng(index).integers(0, 255, (*self.all[index], 3), np.uint8)
        image = Image.fromarray(pixels)
        size = image.size[::-1]
        cover = cover_size(size, cover)
        scaled, red = (pixels_of(scale_to(part, cover)) for part in (image, image.getchannel("R")))
        return Picture(scaled, size, (), red, scaled.copy())


@pytest.mark.parametrize("decoded_mb", [0, 1])
def test_one_draw_serves_image_mask_and_control(decoded_mb):
    """F10: the condition is a copy of the image; so it stays in 50 draws, bit for bit."""
    source = WithPartners([(30, 50)])
    examples = Examples({"a": source}, flip=0.5, decoded_mb=decoded_mb)
    draws = [examples[Draw("a", 0, epoch, 0, 24, 16)][0] for epoch in range(50)]
    for sample in draws:
        assert np.array_equal(sample["control"], sample["pixels"])
        # Scaling one channel is scaling three, so the mask is the red of the picture.
        assert np.array_equal(sample["mask"], sample["pixels"][..., :1])
    assert len({sample["crop_top_left"] for sample in draws}) > 10
