"""Shapes of buckets, and which images go where (F07)."""

import pytest

from lit_sd.data.buckets import bucket_report, listed, make_buckets, nearest_bucket, sort_into_buckets


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


def test_an_image_goes_where_least_is_cut():
    shapes = [(512, 512), (640, 384), (384, 640)]
    assert nearest_bucket((1000, 1000), shapes) == (512, 512)
    assert nearest_bucket((1600, 900), shapes) == (640, 384)
    assert nearest_bucket((9, 16), shapes) == (384, 640)
    assert sort_into_buckets([(9, 16), (10, 10), (1, 2)], shapes) == {(512, 512): [1], (384, 640): [0, 2]}
    assert sort_into_buckets([(9, 16), (10, 10), (1, 2)], shapes, {1, 2}) == {(384, 640): [0]}


def test_the_report_names_what_is_never_trained_on():
    groups = {(512, 512): [0, 1, 2, 3, 4], (640, 384): [5, 6]}
    ids = [f"{c}.png" for c in "abcdefg"]
    assert bucket_report(groups, ids, 1, 4) == [
        "bucket 512x512: 5 images, 5 draws = 1 steps of 4; 1 draws left over, other ones each epoch",
        "bucket 640x384: 2 images, 2 draws = 0 steps of 4; never trained on: f.png, g.png",
    ]
    assert bucket_report(groups, ids, 4, 4)[1] == "bucket 640x384: 2 images, 8 draws = 2 steps of 4"


def test_long_lists_end_in_a_number():
    assert listed(list("abc"), 2) == "a, b and 1 more"
    assert listed(["a"], 2) == "a"
