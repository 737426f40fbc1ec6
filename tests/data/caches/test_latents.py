"""Latents from a cache on disk: what their keys depend on, and how entries are read."""

import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch

from lit_sd.data.batching import Draw
from lit_sd.data.caches.digests import Facts
from lit_sd.data.caches.latents import (
    KIND,
    LatentReader,
    Recipe,
    Variant,
    _cover_sizes,
    floats_of,
    forms_of,
    one_everywhere,
    pack_moments,
    read_entry,
    unpack_moments,
)
from lit_sd.data.caches.parts import Parts
from lit_sd.data.caches.writer import PartWriter
from lit_sd.data.transforms import cover_size, draw_crop

DIGESTS = [hashlib.blake2b(b"%d" % i, digest_size=16).digest() for i in range(300)]
VARIANT = Variant(DIGESTS[0], (40, 60), (32, 32), False)


class TestKeys:
    def test_depend_on_all_that_pixels_and_values_do(self):
        """Each change alone gives another key; what does not change the pixels doesn't."""
        recipe = Recipe("vae", "float32", "random")
        keys = [
            recipe.key(VARIANT),
            recipe.key(VARIANT._replace(digest=DIGESTS[1])),
            recipe.key(VARIANT._replace(target=(32, 24))),
            recipe.key(VARIANT._replace(target=(24, 32))),
            recipe.key(VARIANT._replace(flip=True)),
            recipe.key(VARIANT._replace(alpha=True)),
            Recipe("other", "float32", "random").key(VARIANT),
            Recipe("vae", "float16", "random").key(VARIANT),
            Recipe("vae", "float32", "mask").key(VARIANT),
        ]
        assert recipe.corner(VARIANT) != Recipe("vae", "float32", "center").corner(VARIANT)
        keys.append(Recipe("vae", "float32", "center").key(VARIANT))
        assert len(set(keys)) == len(keys) == 10
        assert {len(key) for key in keys} == {16}
        assert recipe.key(VARIANT) == Recipe("vae", "float32", "random").key(VARIANT)

    def test_equal_pixels_have_one_key_whatever_the_rule(self):
        """A picture that fits without a crop."""
        fitting = VARIANT._replace(size=(64, 64))
        assert Recipe("vae", crop="random").key(fitting) == Recipe("vae", crop="center").key(fitting)

    @pytest.mark.parametrize(
        ("variant", "recipe", "key"),
        [
            (VARIANT, Recipe("vae"), "a25bd88911957b3960225b77f12676fb"),
            (VARIANT._replace(flip=True), Recipe("vae"), "9c4035a3e75152c900b89e7500784de8"),
            (
                Variant(DIGESTS[1], (333, 500), (64, 48), False, True),
                Recipe("vae", "float16", "center"),
                "7e4fdd022755f275927fef28d4e5f22d",
            ),
            (
                Variant(DIGESTS[2], (90, 33), (32, 32), False),
                Recipe("vae", "float32", "mask"),
                "059cbea78064f95d7dd6a585e1188f67",
            ),
            (
                Variant(bytes(16), (64, 64), (32, 32), False),
                Recipe("vae"),
                "0c3f1e85d16925a1188153a50075d393",
            ),
        ],
    )
    def test_are_those_of_caches_that_are_there(self, variant, recipe, key):
        """What the first version gave: other keys would have every cache encoded anew."""
        assert recipe.key(variant).hex() == key

    def test_of_many_are_those_of_each(self):
        """Also digests that begin or end with zeros, which numpy's own bytes would lose."""
        recipe = Recipe("vae")
        some = [
            VARIANT._replace(digest=digest, size=size)
            for digest in (bytes(15) + b"x", b"x" + bytes(15), bytes(16))
            for size in ((40, 60), (60, 40))
        ]
        keys = recipe.keys(forms_of(some)).tobytes()
        assert [keys[at : at + 16] for at in range(0, 96, 16)] == [recipe.key(variant) for variant in some]
        assert len({recipe.key(variant) for variant in some}) == 6


class TestCorners:
    def test_what_covers_is_the_same_for_many(self):
        """As one picture alone is scaled; also where a side comes out at a half, which rounds to even."""
        sides = np.arange(1, 130)
        sizes = np.stack(np.meshgrid(sides, sides), -1).reshape(-1, 2)
        for target in ((64, 64), (25, 50), (48, 112)):
            many = _cover_sizes(sizes, np.broadcast_to(target, sizes.shape))
            assert many.tolist() == [list(cover_size((h, w), target)) for h, w in sizes.tolist()]
        # 2 x 2.5 = 5 high, and 1 x 2.5 = 2.5 wide, which goes to 2
        assert _cover_sizes(np.array([[2, 1]]), np.array([[5, 1]])).tolist() == [[5, 2]]

    @pytest.mark.parametrize("size", [(40, 60), (63, 32), (33, 90), (500, 333)])
    @pytest.mark.parametrize("flip", [False, True])
    def test_centred_as_without_a_cache(self, size, flip):
        rng = np.random.default_rng(0)
        crop = draw_crop(cover_size(size, (32, 32)), (32, 32), rng, flip=float(flip), where="center")
        variant = Variant(DIGESTS[0], size, (32, 32), flip)
        assert Recipe("vae", crop="center").corner(variant) == (crop.top, crop.left)

    def test_random_ones_are_fixed_by_content_and_uniform(self):
        """40 x 60 covers 32 x 32 as 32 x 48: 17 corners, each equally often."""
        recipe = Recipe("vae", crop="random")
        corners = [recipe.corner(VARIANT._replace(digest=digest)) for digest in DIGESTS]
        assert corners == [recipe.corner(VARIANT._replace(digest=digest)) for digest in DIGESTS]
        assert {top for top, _ in corners} == {0}
        counts = np.bincount([left for _, left in corners], minlength=17)
        assert len(counts) == 17
        assert ((counts - 300 / 17) ** 2 / (300 / 17)).sum() < 32  # chi², 16 degrees of freedom, p = 0.01

    def test_other_shapes_have_other_corners(self):
        recipe = Recipe("vae", crop="random")
        tall = [recipe.corner(Variant(digest, (90, 90), (32, 16), False))[1] / 17 for digest in DIGESTS[:100]]
        wide = [recipe.corner(Variant(digest, (90, 90), (16, 32), False))[0] / 17 for digest in DIGESTS[:100]]
        assert abs(np.corrcoef(tall, wide)[0, 1]) < 0.3

    def test_a_mask_decides_where_it_is_asked_to(self):
        """The box is 10 wide and lies right; the crop holds it, in both flips, and differs by content."""
        recipe = Recipe("vae", crop="mask")
        assert recipe.corner(VARIANT) is None
        box = (0, 38, 32, 48)
        plain = {recipe.drawn_corner(VARIANT._replace(digest=digest), box)[1] for digest in DIGESTS[:50]}
        assert plain == {16}
        flipped = recipe.drawn_corner(VARIANT._replace(flip=True), box)
        assert flipped == (0, 0)
        free = {recipe.drawn_corner(VARIANT._replace(digest=digest), None)[1] for digest in DIGESTS[:50]}
        assert len(free) > 8


def moments(seed, shape=(4, 3, 5)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)


class TestEntries:
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_there_and_back(self, dtype, masked):
        mean, std = moments(0)
        mask = torch.rand(1, 3, 5) if masked else None
        value = pack_moments(mean, std, (7, 9), mask, dtype)
        kept = unpack_moments(value)
        own = getattr(torch, dtype)
        assert torch.equal(kept.mean, mean.to(own))
        assert torch.equal(kept.std, std.to(own))
        assert kept.corner == (7, 9)
        assert kept.mask is None if mask is None else torch.equal(kept.mask, mask.to(own))
        each = 4 if dtype == "float32" else 2
        assert len(value) == 32 + each * (2 * 60 + 15 * masked)

    def test_what_is_not_finite_is_refused_with_its_cause(self):
        mean, std = moments(0)
        with pytest.raises(ValueError, match="the VAE overflowed"):
            pack_moments(mean * float("inf"), std, (0, 0), None, "float32")
        with pytest.raises(ValueError, match=r"overflow float16; set data\.cache_dtype=float32"):
            pack_moments(mean * 1e6, std, (0, 0), None, "float16")

    def test_something_else_is_refused(self):
        value = pack_moments(*moments(0), (0, 0), None, "float32")
        for wrong, message in (
            (b"x" * len(value), "something else"),
            (value[:-4], "expected 512 bytes, got 508"),
        ):
            with pytest.raises(ValueError, match=message):
                read_entry(wrong)

    def test_a_mask_of_ones(self):
        assert one_everywhere(np.zeros((8, 8, 1), np.uint8)).tolist() == np.full((8, 8, 1), 255).tolist()
        for kind in (np.int16, np.int32):
            whole = one_everywhere(np.zeros((1, 2, 2), kind))
            assert whole.dtype == kind
            assert floats_of(torch.from_numpy(whole)).tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


@pytest.fixture(params=["float32", "float16"])
def reader(tmp_path, request):
    """Four pictures of 24 x 40, to be cropped to 24 x 40; the second has a mask."""
    recipe = Recipe("vae", request.param)
    (tmp_path / "facts").write_bytes(b"".join(struct.pack("<16sii", d, 48, 80) for d in DIGESTS[:4]))
    with PartWriter(tmp_path / KIND, KIND) as writer:
        for i in range(4):
            for flip in (False, True):
                mean, std = moments(2 * i + flip)
                mask = torch.full((1, 3, 5), 0.25) if i == 1 else None
                variant = Variant(DIGESTS[i], (48, 80), (24, 40), flip)
                writer.write(recipe.key(variant), pack_moments(mean, std, (0, i), mask, recipe.dtype))
    parts = Parts(tmp_path / KIND, KIND)
    parts.refresh()
    return LatentReader(parts, recipe, {"images": Facts(tmp_path / "facts")})


def draw(image, height=24, width=40):
    return Draw("images", image, 0, 0, height, width)


class TestReader:
    def test_each_draw_gets_its_own(self, reader):
        found = reader.read([draw(2), draw(1), draw(2)], [True, False, False])
        own = getattr(torch, reader.recipe.dtype)
        for row, seed in zip(found, (5, 2, 4), strict=True):
            values = floats_of(torch.from_numpy(row.moments.copy()))
            assert torch.equal(values, torch.stack(moments(seed)).to(own).float())
            assert row.size == (48, 80)
        assert [row.corner for row in found] == [(0, 2), (0, 1), (0, 2)]
        assert [row.mask is None for row in found] == [True, False, True]
        assert (floats_of(torch.from_numpy(found[1].mask.copy())) == 0.25).all()

    def test_pickled(self, reader):
        before = reader.read([draw(0)], [False])[0].moments.copy()
        again = pickle.loads(pickle.dumps(reader))
        assert (again.read([draw(0)], [False])[0].moments == before).all()

    def test_what_is_missing_is_named(self, reader):
        with pytest.raises(
            OSError, match=r"images: image 3 in the cache .* is not there any more; start the run"
        ):
            reader.read([draw(0), draw(3, 32, 32)], [False, False])
