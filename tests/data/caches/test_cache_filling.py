"""Filling a cache of latents: what is encoded is what a run would see, and only what is missing."""

import io
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_source import CountingEncoder, PictureSource, moments_of, noise, png
from PIL import Image

from lit_sd.data.batching import Draw
from lit_sd.data.buckets import Buckets
from lit_sd.data.caches.filling import fill_latents
from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latents import Recipe
from lit_sd.data.examples import Examples
from lit_sd.data.loading import collate, to_floats
from lit_sd.together import Together

SIZES = [(16, 16), (20, 16), (16, 40), (33, 17)]
SQUARE = [(16, 16)]
BOTH = (False, True)


def filled(folder, *requests, encode=None, recipe=None, **options):
    cache = LatentCache(Path(folder), recipe or Recipe("vae"))
    fill_latents(cache, requests, encode or CountingEncoder(), Together(), **options)
    return cache


def batches(source, draws, **options):
    """The batch of some draws, from pixels and from a cache."""
    cache, crop = options.pop("cache"), options.get("crop", "random")
    for latents in (None, cache.reader({source.name: source}, crop)):
        examples = Examples({source.name: source}, latents=latents, **options)
        items = examples.__getitems__(draws)
        yield to_floats(collate(items, {source.name: 1.0}, {source.name: source.name}))


def draws(source, shape=(16, 16), epochs=1, images=None):
    images = range(len(source)) if images is None else images
    return [Draw(source.name, i, epoch, 0, *shape) for epoch in range(epochs) for i in images]


class TestEqual:
    """A cached example is the uncached one, encoded."""

    @pytest.mark.parametrize("flip", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize("workers", [0, 2])
    def test_centred_with_flips(self, tmp_path, flip, workers):
        source = PictureSource(SIZES)
        flips = tuple(f for f in BOTH if (flip < 1, flip > 0)[f])
        encode = CountingEncoder()
        cache = filled(tmp_path, Request(source, SQUARE, "center", flips), encode=encode, num_workers=workers)
        assert len(encode.seen) == cache.encoded == cache.wanted == 4 * len(flips)
        shown, cached = batches(
            source, draws(source, epochs=8), cache=cache, crop="center", flip=flip, seed=3
        )
        mean, std = moments_of(((shown["pixels"] + 1) * 127.5).round().permute(0, 2, 3, 1))
        assert torch.equal(cached["moments"], torch.stack([mean, std], 1))
        assert "pixels" not in cached
        assert cached["captions"] == shown["captions"]
        for name in ("original_size", "crop_top_left", "target_size", "weight"):
            assert torch.equal(cached[name], shown[name]), name

    def test_both_flips_are_drawn_each_epoch(self, tmp_path):
        source = PictureSource(SIZES[:1])
        cache = filled(tmp_path, Request(source, SQUARE, "center", BOTH))
        _, cached = batches(source, draws(source, epochs=200), cache=cache, crop="center", flip=0.5)
        plain = np.asarray(Image.open(io.BytesIO(source.pictures[0])))
        pair = [moments_of(torch.from_numpy(p.copy())[None])[0][0] for p in (plain, plain[:, ::-1])]
        is_flipped = [torch.equal(moments[0], pair[1]) for moments in cached["moments"]]
        assert all(
            torch.equal(moments[0], pair[flip])
            for moments, flip in zip(cached["moments"], is_flipped, strict=True)
        )
        assert 70 < sum(is_flipped) < 130

    def test_random_crops_are_fixed_and_of_the_flipped_picture(self, tmp_path):
        """A picture of columns 0 to 39: what is in the crop tells where it is."""
        source = PictureSource([(16, 40)])
        columns = np.broadcast_to(np.arange(40, dtype=np.uint8)[None, :, None], (16, 40, 3))
        source.edit(0, png(columns.copy()))
        encode = CountingEncoder()
        cache = filled(tmp_path, Request(source, SQUARE, "random", BOTH), encode=encode)
        plain, flipped = (picture[0, :, 0].tolist() for picture in encode.seen)
        _, cached = batches(source, draws(source, epochs=40), cache=cache, flip=0.5)
        (left,) = {tuple(crop) for crop in cached["crop_top_left"].tolist()}
        assert plain == list(range(left[1], left[1] + 16))
        assert flipped == list(range(39, -1, -1))[left[1] : left[1] + 16]
        assert cached["original_size"].tolist() == [[16, 40]] * 40

    def test_buckets_and_several_shapes(self, tmp_path):
        source = PictureSource(SIZES)
        buckets = Buckets([24], 8, 2.0)
        other = PictureSource(SIZES[:2], name="other")
        encode = CountingEncoder()
        cache = filled(
            tmp_path,
            Request(source, buckets, "center", (False,)),
            Request(other, buckets.shapes, "center", (False,)),
            encode=encode,
        )
        shapes = [tuple(shape) for shape in buckets.assign(source.sizes()).tolist()]
        seen = [picture.shape[:2] for picture in encode.seen]
        assert seen[:4] == shapes
        # the first two pictures of `other` are those of `source`: only their other shapes are new
        assert sorted(seen[4:]) == sorted(
            [s for s in buckets.shapes if s != shapes[0]] + [s for s in buckets.shapes if s != shapes[1]]
        )
        for image, shape in enumerate(shapes):
            shown, cached = batches(source, draws(source, shape, images=[image]), cache=cache, crop="center")
            mean, _ = moments_of(((shown["pixels"] + 1) * 127.5).round().permute(0, 2, 3, 1))
            assert torch.equal(cached["moments"][:, 0], mean)
            assert cached["target_size"].tolist() == [list(shape)]

    @pytest.mark.parametrize("crop", ["center", "mask"])
    def test_masks_are_averaged_over_latents(self, tmp_path, crop):
        source = PictureSource([(16, 32), (16, 32)])
        mask = np.zeros((16, 32), np.uint8)
        mask[:, 18:26] = 255
        source.masks[0] = png(Image.fromarray(mask))
        cache = filled(tmp_path, Request(source, SQUARE, crop, BOTH))
        shown, cached = batches(source, draws(source, epochs=4), cache=cache, crop=crop, flip=0.5)
        if crop == "center":
            pooled = torch.nn.functional.adaptive_avg_pool2d(shown["mask"], (2, 2))
            assert torch.equal(cached["mask"], pooled)
        else:  # corners are drawn apart, but what the mask shows is inside
            assert cached["mask"][0::2].mean((1, 2, 3)).tolist() == [0.5] * 4
        assert (cached["mask"][1::2] == 1).all()

    def test_float16_halves_it_and_rounds(self, tmp_path):
        source = PictureSource(SIZES)
        request = Request(source, SQUARE, "center", (False,))
        caches = [
            filled(tmp_path / dtype, request, recipe=Recipe("vae", dtype)) for dtype in ("float32", "float16")
        ]
        whole, half = (next(batches_of(source, cache)) for cache in caches)
        assert torch.equal(whole.half().float(), half)
        assert half.dtype == torch.float32


def batches_of(source, cache):
    _, cached = batches(source, draws(source), cache=cache, crop="center")
    yield cached["moments"]


class TestOnlyWhatIsMissing:
    """F11, as far as pictures go; `test_caching.py` has models and captions."""

    @pytest.fixture
    def source(self):
        return PictureSource(SIZES)

    def again(self, tmp_path, source, request=None, recipe=None):
        encode = CountingEncoder()
        request = request or Request(source, SQUARE, "random", BOTH)
        cache = filled(tmp_path, request, encode=encode, recipe=recipe)
        assert cache.encoded == len(encode.seen)
        return cache.encoded

    def test_four_edits(self, tmp_path, source):
        assert self.again(tmp_path, source) == 8
        assert self.again(tmp_path, source) == 0
        source.edit(1, noise(50, SIZES[1]))
        assert self.again(tmp_path, source) == 2, "one picture, in both flips"
        assert self.again(tmp_path, source, Request(source, [(8, 8)], "random", BOTH)) == 8
        assert self.again(tmp_path, source, recipe=Recipe("another")) == 8
        source.edit(2, source.pictures[2])  # touched
        source.texts[0], source.name = "another caption", "renamed"
        source.pictures.append(source.pictures.pop(0))  # under other names
        source.all = np.roll(source.all, -1, 0)
        source.versions = [99, 98, 97, 96]
        assert self.again(tmp_path, source) == 0

    def test_a_changed_mask_is_another_picture(self, tmp_path, source):
        self.again(tmp_path, source)
        source.masks[0] = png(Image.new("L", (16, 16), 255))
        source.versions[0] += 1
        assert self.again(tmp_path, source) == 2

    def test_what_was_there_before_comes_back(self, tmp_path, source):
        before = source.pictures[0]
        self.again(tmp_path, source)
        source.edit(0, noise(50, SIZES[0]))
        self.again(tmp_path, source)
        source.edit(0, before)
        assert self.again(tmp_path, source) == 0

    def test_without_flips_none_are_made(self, tmp_path, source):
        assert self.again(tmp_path, source, Request(source, SQUARE, "random", (False,))) == 4
        assert self.again(tmp_path, source) == 4


def test_pictures_are_encoded_alone_or_with_those_of_their_shape(tmp_path):
    source = PictureSource(SIZES)
    request = Request(source, [(16, 16), (8, 16)], "center", (False,))
    for batch, sizes in ((1, [1] * 8), (3, [3, 3, 1, 1])):
        given = []

        def encode(pictures, given=given):
            given.append(tuple(pictures.shape[:3]))
            return moments_of(pictures)

        cache = filled(tmp_path / str(batch), request, encode=encode, batch=batch)
        assert [count for count, *_ in given] == sizes
        assert cache.encoded == 8


def test_a_picture_is_decoded_once_for_both_flips(tmp_path):
    source = PictureSource(SIZES)
    filled(tmp_path, Request(source, SQUARE, "center", BOTH))
    assert source.reads == 2 * len(SIZES)  # once for the digest, once for the pixels


def test_the_global_stream_is_left(tmp_path):
    before = torch.get_rng_state()
    filled(tmp_path, Request(PictureSource(SIZES), SQUARE, "random", BOTH))
    assert torch.equal(before, torch.get_rng_state())


def test_control_images_are_refused(tmp_path):
    source = PictureSource(SIZES)
    source.controls[2] = source.pictures[2]
    with pytest.raises(ValueError, match=r"images: images/2 has a control image.*data\.cache=memory or off"):
        filled(tmp_path, Request(source, SQUARE, "center", BOTH))


def test_a_broken_latent_names_its_picture(tmp_path):
    """F22."""

    def encode(pictures):
        mean, std = moments_of(pictures)
        return mean.where(mean < 0, torch.inf), std

    with pytest.raises(
        ValueError, match=r"images: images/0: its latents are not finite \(the VAE overflowed"
    ):
        filled(tmp_path, Request(PictureSource(SIZES), SQUARE, "center", BOTH), encode=encode)


def test_a_size_that_is_not_the_picture_s_is_said(tmp_path):
    source = PictureSource(SIZES)
    source.pictures[0] = noise(0, (17, 16))
    with pytest.raises(OSError, match=r"images/0 was \(16, 16\) a moment ago and is \(17, 16\) now"):
        filled(tmp_path, Request(source, SQUARE, "center", BOTH))


KILLED = """
    import sys, time
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from picture_source import CountingEncoder, PictureSource
    from lit_sd.data.caches import filling as cache_filling
    from lit_sd.data.caches.writer import PartWriter
    from lit_sd.data.caches.latent_cache import LatentCache, Request
    from lit_sd.data.caches.latents import Recipe
    from lit_sd.together import Together

    class Often(PartWriter):
        def __init__(self, folder, kind):
            super().__init__(folder, kind, every=4)

    cache_filling.PartWriter = Often
    encoder = CountingEncoder()

    def encode(pictures):
        if len(encoder.seen) == 14:
            print("now", flush=True)
            time.sleep(60)
        return encoder(pictures)

    request = Request(PictureSource([(16, 16)] * 20), [(16, 16)], "center", (False,))
    cache_filling.fill_latents(LatentCache(Path(sys.argv[1]), Recipe("vae")), [request], encode, Together())
"""


def test_a_killed_filling_goes_on(tmp_path):
    """Twenty pictures, durable by fours; killed with 14 behind it, 12 are kept."""
    tests = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), str(tests)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    source, encode = PictureSource([(16, 16)] * 20), CountingEncoder()
    cache = filled(tmp_path, Request(source, SQUARE, "center", (False,)), encode=encode)
    assert cache.encoded == len(encode.seen) == 8
    shown, cached = batches(source, draws(source), cache=cache, crop="center")
    mean, _ = moments_of(((shown["pixels"] + 1) * 127.5).round().permute(0, 2, 3, 1))
    assert torch.equal(cached["moments"][:, 0], mean)


def test_a_damaged_part_stops_it(tmp_path):
    request = Request(PictureSource(SIZES), SQUARE, "center", BOTH)
    filled(tmp_path, request)
    (data,) = (tmp_path / "latents").glob("*/data.mdb")
    os.truncate(data, 4096)
    with pytest.raises(ValueError, match="is damaged"):
        filled(tmp_path, request)
