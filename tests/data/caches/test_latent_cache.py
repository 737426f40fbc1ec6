"""Which variants a run may ask for, and which of them a cache lacks."""

import numpy as np
import pytest
from picture_source import CountingEncoder, PictureSource

from lit_sd.data.buckets import Buckets
from lit_sd.data.caches.filling import fill_latents
from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latents import Recipe
from lit_sd.data.lmdb import LmdbSource, LmdbWriter
from lit_sd.data.webdataset import ShardSource, ShardWriter
from lit_sd.together import Together

SIZES = [(16, 16), (32, 16), (16, 32), (64, 64)]


@pytest.fixture
def source():
    return PictureSource(SIZES)


@pytest.fixture
def cache(tmp_path, source):
    cache = LatentCache(tmp_path, Recipe("vae"))
    cache.gather([source], Together())
    return cache


def found(cache, request):
    return [(row, variant.target, variant.flip) for row, variant in cache.variants(request)]


def test_flips_stand_side_by_side(cache, source):
    both = Request(source, [(16, 16)], "random", (False, True))
    assert found(cache, both)[:4] == [
        (0, (16, 16), False),
        (0, (16, 16), True),
        (1, (16, 16), False),
        (1, (16, 16), True),
    ]
    assert len(found(cache, both)) == 8


def test_every_shape_of_each_or_the_one_of_its_bucket(cache, source):
    shapes = [(16, 16), (8, 24)]
    assert found(cache, Request(source, shapes, "center", (False,)))[:3] == [
        (0, (16, 16), False),
        (0, (8, 24), False),
        (1, (16, 16), False),
    ]
    buckets = Buckets([24], 8, 2.0)
    wanted = [
        (row, tuple(shape), False) for row, shape in enumerate(buckets.assign(np.array(SIZES)).tolist())
    ]
    assert len({shape for _, shape, _ in wanted}) == 3
    assert found(cache, Request(source, buckets, "center", (False,))) == wanted


def test_some_rows_and_all_but_some(cache, source):
    some = Request(source, [(16, 16)], "center", (False,), rows=[1, 3])
    rest = Request(source, [(16, 16)], "center", (False,), aside=[1, 3])
    assert [row for row, _ in cache.variants(some)] == [1, 3]
    assert [row for row, _ in cache.variants(rest)] == [0, 2]
    assert [some.covers(row) for row in range(4)] == [False, True, False, True]
    assert [rest.covers(row) for row in range(4)] == [True, False, True, False]
    assert [variant.target for variant in cache.variants_of(rest, 2)] == [(16, 16)]


def test_transparency_counts_where_it_is_a_mask(cache, source):
    request = Request(source, [(16, 16)], "center", (False,))
    assert not any(variant.alpha for _, variant in cache.variants(request))
    source.alpha_mask = True
    assert all(variant.alpha for _, variant in cache.variants(request))


def test_what_is_missing_is_asked_for_once(cache, source):
    """Two requests for the same variant, and two pictures of the same content."""
    source.edit(1, source.pictures[0])
    source.all[1] = source.all[0]
    cache = LatentCache(cache.folder, cache.recipe)
    cache.gather([source], Together())
    square = Request(source, [(16, 16)], "center", (False,))
    table = cache.missing([square, square])
    assert cache.wanted == 8
    assert table["row"].tolist() == [0, 2, 3]
    assert table["request"].tolist() == [0, 0, 0]


def test_a_reader_knows_its_sources(cache, source):
    other = PictureSource([(8, 8)], name="other", alpha_mask=True)
    cache.gather([source, other], Together())
    reader = cache.reader({"val": source, "more": other}, "center")
    assert reader.recipe == Recipe("vae", crop="center")
    assert reader.facts["val"][3][1] == (64, 64)
    assert reader.alpha == {"more"}


def test_one_cache_serves_every_kind(tmp_path):
    """A folder's pictures, packed, are not encoded again: keys tell content, not where it lies."""
    source, encode = PictureSource(SIZES), CountingEncoder()
    for name, writer in (("lmdb", LmdbWriter), ("shards", ShardWriter)):
        with writer(tmp_path / name) as packed:
            for i, size in enumerate(SIZES):
                packed.write(source.record(i), size)
    encoded = []
    for kind in (source, LmdbSource(tmp_path / "lmdb"), ShardSource(tmp_path / "shards")):
        kind.check()
        cache = LatentCache(tmp_path / "cache", Recipe("vae"))
        request = Request(kind, [(16, 16)], "random", (False, True))
        fill_latents(cache, [request], encode, Together())
        encoded.append(cache.encoded)
    assert encoded == [8, 0, 0]
