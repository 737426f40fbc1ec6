"""Shapes of buckets, and which images go where (F07)."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_sd.data.buckets import Buckets, bucket_line, listed, make_buckets, nearest_shapes


def test_shapes_fill_the_area_and_no_more():
    """Of 512² = 262144 pixels in 64s: 576 -> 455 -> 448, 640 -> 409 -> 384; 704x320 is over 2:1."""
    assert make_buckets(512, 64, 2.0) == [(512, 512), (576, 448), (640, 384), (448, 576), (384, 640)]


@pytest.mark.parametrize(("resolution", "step"), [(512, 64), (1024, 64), (128, 16)])
def test_every_shape_obeys_the_rules(resolution, step):
    shapes = make_buckets(resolution, step, 3.0)
    assert len(set(shapes)) == len(shapes) > 5
    for height, width in shapes:
        assert height % step == width % step == 0
        assert height * width <= resolution**2
        assert 1 / 3 <= height / width <= 3
        assert (width, height) in shapes


def test_what_makes_no_buckets():
    with pytest.raises(ValueError, match=r"data\.resolution=500.*data\.bucket_step=64.*data\.resolution=448"):
        make_buckets(500, 64, 2.0)
    with pytest.raises(ValueError, match="multiple of 8"):
        make_buckets(512, 12, 2.0)
    with pytest.raises(ValueError, match="1 or more"):
        make_buckets(512, 64, 0.5)


def assigned(buckets: Buckets, *sizes: tuple[int, int]) -> list[tuple[int, int]]:
    return [tuple(shape) for shape in buckets.assign(np.array(sizes)).tolist()]


def test_an_image_goes_where_least_is_cut():
    shapes = [(512, 512), (640, 384), (384, 640)]
    ratios = np.log([1000 / 1000, 1600 / 900, 9 / 16])
    assert nearest_shapes(ratios, shapes).tolist() == [[512, 512], [640, 384], [384, 640]]


def test_of_equally_near_shapes_the_first_counts():
    """3:2 lies as far from 1:1 as from 9:4."""
    for shapes in ([(64, 64), (144, 64)], [(144, 64), (64, 64)]):
        assert tuple(nearest_shapes(np.log([1.5]), shapes)[0]) == shapes[0]


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_the_nearest_shape_is_that_of_a_plain_search(height, width):
    shapes = make_buckets(512, 64, 3.0)
    away = [abs(math.log(h / w) - math.log(height / width)) for h, w in shapes]
    found = shapes.index(tuple(nearest_shapes(np.log([height / width]), shapes)[0].tolist()))
    assert away[found] == pytest.approx(min(away), abs=1e-12)


def test_the_largest_resolution_is_taken_that_needs_no_upscaling():
    """At 1024 in 64s, 2:1 is 1408x704; at 512 it is 704x320 (2.2) or 640x384 (1.67): 2 is nearer to 2.2."""
    buckets = Buckets([512, 1024], 64, 2.5)
    assert assigned(buckets, (1024, 1024), (1023, 2000)) == [(1024, 1024), (704, 1408)]
    assert assigned(buckets, (700, 700)) == [(512, 512)]
    assert assigned(buckets, (1400, 704), (1408, 704)) == [(704, 320), (1408, 704)]
    assert assigned(buckets, (100, 100)) == [(512, 512)]  # nothing else is left


def test_small_images_may_keep_their_size():
    buckets = Buckets([512], 64, 2.0, upscale=False)
    assert assigned(buckets, (512, 512), (511, 511), (130, 200)) == [(512, 512), (448, 448), (128, 192)]
    assert assigned(buckets, (130, 2000)) == [(128, 256)]  # no longer than max_ratio
    assert assigned(buckets, (40, 40)) == [(64, 64)]  # nothing is smaller than the step


def test_wrong_resolutions_are_refused():
    for wrong in ([], [512, 512]):
        with pytest.raises(ValueError, match=r"data\.resolution"):
            Buckets(wrong, 64, 2.0)


def test_a_bucket_says_what_becomes_of_its_images():
    assert bucket_line((512, 512), 5, 5, 1, 4) == (
        "bucket 512x512: 5 images, 5 draws = 1 steps of 4; 1 draws left over, other ones each epoch"
    )
    assert bucket_line((640, 384), 2, 2, 0, 4, ["f.png", "g.png"]) == (
        "bucket 640x384: 2 images, 2 draws = 0 steps of 4; never trained on: f.png, g.png"
    )
    assert bucket_line((640, 384), 2, 8, 2, 4) == "bucket 640x384: 2 images, 8 draws = 2 steps of 4"


def test_long_lists_end_in_a_number():
    assert listed(list("abc"), 2) == "a, b and 1 more"
    assert listed(["a"], 2) == "a"


def test_buckets_that_are_squares_alone_are_told():
    """Of 128² pixels and sides of 64, 192x64 is the next shape, 3 to 1; in steps of 16 there is 144x112."""
    (told,) = Buckets([128], 64, 2).notes()
    assert "data.resolution=128 has no other shape of multiples of data.bucket_step=64" in told
    assert told.endswith("set data.bucket_step=16")
    assert (
        Buckets([128], 16, 2).notes() == Buckets([128], 64, 3).notes() == Buckets([128], 64, 1).notes() == []
    )
