"""Which variants a run may ask for, and which of them a cache lacks."""

import numpy as np
import pytest
from picture_source import CountingEncoder, PictureSource

from lit_sd.data.buckets import Buckets
from lit_sd.data.caches import latent_cache
from lit_sd.data.caches.filling import fill_latents
from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latents import KIND, Recipe, Variant
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
    return [
        (row, tuple(form["target"].tolist()), bool(form["flip"]))
        for rows, forms in cache.forms(request)
        for row, form in zip(rows.tolist(), forms, strict=True)
    ]


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
    assert [row for row, *_ in found(cache, some)] == [1, 3]
    assert [row for row, *_ in found(cache, rest)] == [0, 2]
    assert [some.covers(row) for row in range(4)] == [False, True, False, True]
    assert [rest.covers(row) for row in range(4)] == [True, False, True, False]
    assert [variant.target for variant in cache.variants_of(rest, 2)] == [(16, 16)]


def test_transparency_counts_where_it_is_a_mask(cache, source):
    request = Request(source, [(16, 16)], "center", (False,))
    assert [forms["alpha"].tolist() for _, forms in cache.forms(request)] == [[False] * 4]
    source.alpha_mask = True
    assert [forms["alpha"].tolist() for _, forms in cache.forms(request)] == [[True] * 4]


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


@pytest.mark.parametrize("crop", ["random", "center", "mask"])
def test_many_variants_have_the_keys_of_each_alone(cache, source, monkeypatch, crop):
    """Five at a time are two pictures of two forms each: where a stretch ends, none is lost or doubled."""
    monkeypatch.setattr(latent_cache, "CHUNK", 5)
    request = Request(source, [(16, 8)], crop, (False, True), aside=[1])
    recipe, stretches = cache.recipe_of(request), list(cache.forms(request))
    assert [rows.tolist() for rows, _ in stretches] == [[0, 0], [2, 2, 3, 3]]
    alone = [recipe.key(variant) for row in (0, 2, 3) for variant in cache.variants_of(request, row)]
    assert b"".join(recipe.keys(forms).tobytes() for _, forms in stretches) == b"".join(alone)
    table = cache.missing([request])
    assert table["key"].tobytes() == b"".join(alone)
    assert table["row"].tolist() == [0, 0, 2, 2, 3, 3]
    assert table["shape"].tolist() == [[16, 8]] * 6
    assert table["flip"].tolist() == [False, True] * 3


def test_pruned_it_holds_what_is_asked_for(tmp_path):
    """Two sources, two sizes, two VAEs; then one of each is left."""
    kept, gone, encode = PictureSource(SIZES[:2]), PictureSource([(8, 8)], name="gone"), CountingEncoder()
    asked = Request(kept, [(16, 16)], "random", (False, True))
    for recipe in (Recipe("vae"), Recipe("other")):
        cache = LatentCache(tmp_path, recipe)
        fill_latents(cache, [asked, Request(gone, [(8, 8)], "random", (False,))], encode, Together())
    old = Request(kept, [(8, 8)], "random", (False,))
    cache = LatentCache(tmp_path, Recipe("vae"))
    fill_latents(cache, [asked, old], encode, Together())
    assert len(cache.parts) == 2 * (4 + 1) + 2
    assert len(list((tmp_path / "digests").glob("*.facts"))) == 2

    assert cache.prune([asked]) == 2 * 1 + 4 + 2
    assert [path.name for path in (tmp_path / "digests").glob("*.facts")] == [cache.facts(kept).path.name]
    assert len(np.load(tmp_path / "digests" / "stamps.npy")) == 2
    assert [path for path in (tmp_path / KIND).glob(".*") if path.is_dir() and path.name != ".index"] == []
    again = LatentCache(tmp_path, Recipe("vae"))
    fill_latents(again, [asked], encode, Together())
    assert (again.encoded, len(again.parts)) == (0, 4)
    assert kept.reads == 2 + 2 + 2 + 2, "for digests, for each VAE (both flips at once), and for 8 x 8"
    assert again.prune([asked]) == 0


def test_variants_of_one_are_those_of_all(cache, source):
    request = Request(source, [(16, 16)], "center", (False, True))
    digest, size = cache.facts(source)[1]
    assert cache.variants_of(request, 1) == [Variant(digest, size, (16, 16), flip) for flip in (False, True)]
