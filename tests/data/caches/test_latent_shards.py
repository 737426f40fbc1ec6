"""Latents as tar shards: read by webdataset itself, and back into a cache."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_source import CountingEncoder, PictureSource, png
from PIL import Image
from safetensors.torch import load

from lit_sd.data.caches.filling import fill_latents
from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latent_shards import import_latent_shards, write_latent_shards
from lit_sd.data.caches.latents import KIND, Recipe, unpack_moments
from lit_sd.together import Together

SIZES = [(16, 16), (20, 16), (16, 40), (33, 17), (16, 24)]


@pytest.fixture
def source():
    source = PictureSource(SIZES)
    mask = np.zeros((16, 40), np.uint8)
    mask[:, 20:30] = 255
    source.masks[2] = png(Image.fromarray(mask))
    return source


def requests(source):
    """Training crops of all but the fourth, which is for validation."""
    return [
        Request(source, [(16, 16), (16, 8)], "random", (False, True), aside=[3]),
        Request(source, [(16, 16)], "center", (False,), rows=[3]),
    ]


def filled(folder, source, dtype="float32", encode=None):
    cache = LatentCache(Path(folder), Recipe("vae", dtype))
    fill_latents(cache, requests(source), encode or CountingEncoder(), Together())
    return cache


def everything(cache, source):
    """Values by key, of all that is asked for."""
    keys = [
        cache.recipe_of(request).key(variant)
        for request in requests(source)
        for row in range(len(source))
        if request.covers(row)
        for variant in cache.variants_of(request, row)
    ]
    return {key: bytes(value) for key, value in zip(keys, cache.parts.values(keys), strict=True)}


def test_webdataset_reads_them(tmp_path, source):
    import webdataset

    cache = filled(tmp_path / "cache", source)
    out = write_latent_shards(cache, requests(source), tmp_path / "shards", shard_size=2)
    assert sorted(path.name for path in out.iterdir()) == [
        "latents-00000.tar",
        "latents-00001.tar",
        "latents-00002.tar",
        "latents.json",
    ]
    urls = str(out / "latents-{00000..00002}.tar")
    samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))
    assert [sample["__key__"] for sample in samples] == [f"{i:09d}" for i in range(5)]
    assert [sample["txt"].decode() for sample in samples] == [f"picture {i}" for i in range(5)]
    third = json.loads(samples[2]["json"])
    assert {key: third[key] for key in ("id", "captions", "width", "height", "weight", "latents")} == {
        "id": "images/2",
        "captions": [{"text": "picture 2", "weight": 1.0}],
        "width": 40,
        "height": 16,
        "weight": 1.0,
        "latents": {"source": "images", "alpha_mask": False, "version": 1, "vae": "vae", "dtype": "float32"},
    }
    assert third["digest"] == cache.facts(source)[2][0].hex()
    tensors = load(samples[2]["latents.safetensors"])
    assert len(tensors) == 2 * 2 * 3  # shapes x flips x (mean, std, mask)
    recipe = cache.recipe_of(requests(source)[0])
    for variant in cache.variants_of(requests(source)[0], 2):
        kept = unpack_moments(cache.parts.values([recipe.key(variant)])[0])
        flip = "flipped" if variant.flip else "plain"
        stem = f"16x{variant.target[1]}/random/{flip}/{kept.corner[0]}_{kept.corner[1]}"
        for part in ("mean", "std", "mask"):
            assert torch.equal(tensors[f"{stem}/{part}"], getattr(kept, part))
    held = load(samples[3]["latents.safetensors"])
    assert sorted(held) == ["16x16/center/plain/7_0/mean", "16x16/center/plain/7_0/std"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_folder_of_shards_is_a_cache(tmp_path, source, dtype):
    cache = filled(tmp_path / "cache", source, dtype)
    out = write_latent_shards(cache, requests(source), tmp_path / "shards", shard_size=2)
    other = LatentCache(out, Recipe("vae", dtype))
    assert import_latent_shards(other) == 4 * 4 + 1
    encode = CountingEncoder()
    assert everything(filled(out, source, dtype, encode), source) == everything(cache, source)
    assert encode.seen == []
    assert import_latent_shards(LatentCache(out, Recipe("vae", dtype))) == 0


def test_latents_of_another_vae_or_dtype_are_not_taken(tmp_path, source):
    out = write_latent_shards(filled(tmp_path / "cache", source), requests(source), tmp_path / "shards")
    for recipe in (Recipe("another"), Recipe("vae", "float16")):
        assert import_latent_shards(LatentCache(out, recipe)) == 0
    assert import_latent_shards(LatentCache(out, Recipe("vae"))) == 17


def test_bytes_are_the_same_and_a_killed_writer_goes_on(tmp_path, source):
    cache = filled(tmp_path / "cache", source)
    out = write_latent_shards(cache, requests(source), tmp_path / "one", shard_size=2)
    partial = tmp_path / "two.partial"
    partial.mkdir()
    (partial / "latents.json").write_text((out / "latents.json").read_text())
    (partial / "latents-00001.tar").write_bytes((out / "latents-00001.tar").read_bytes())
    kept = (partial / "latents-00001.tar").stat().st_ino
    (partial / ".latents-00002.tar.999").write_bytes(b"torn")
    again = write_latent_shards(cache, requests(source), tmp_path / "two", shard_size=2)
    assert (again / "latents-00001.tar").stat().st_ino == kept
    names = sorted(path.name for path in out.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    for name in names:
        assert (again / name).read_bytes() == (out / name).read_bytes(), name


def test_what_is_there_is_not_overwritten(tmp_path, source):
    cache = filled(tmp_path / "cache", source)
    write_latent_shards(cache, requests(source), tmp_path / "shards")
    with pytest.raises(FileExistsError, match="is there already"):
        write_latent_shards(cache, requests(source), tmp_path / "shards")
    (tmp_path / "more.partial").mkdir()
    (tmp_path / "more.partial" / "latents.json").write_text("{}")
    with pytest.raises(FileExistsError, match="a part of other latents"):
        write_latent_shards(cache, requests(source), tmp_path / "more")


def test_a_cache_that_is_not_filled_is_said(tmp_path, source):
    cache = LatentCache(tmp_path, Recipe("vae"))
    cache.gather([source], Together())
    with pytest.raises(OSError, match=r"images: image 0 isn't in .*; fill the cache first"):
        write_latent_shards(cache, requests(source), tmp_path / "shards")
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize("cut", [700, 5000])
def test_a_damaged_shard_is_named(tmp_path, source, cut):
    cache = filled(tmp_path / "cache", source)
    out = write_latent_shards(cache, requests(source), tmp_path / "shards")
    os.truncate(out / "latents-00000.tar", cut)
    with pytest.raises(ValueError, match=r"latents-00000\.tar can't be read as a shard of latents"):
        import_latent_shards(LatentCache(out, Recipe("vae")))


def test_foreign_tars_are_left_alone(tmp_path):
    (tmp_path / "00000.tar").write_bytes(io.BytesIO(b"images").getvalue())
    assert import_latent_shards(LatentCache(tmp_path, Recipe("vae"))) == 0
    assert not (tmp_path / KIND).exists()
