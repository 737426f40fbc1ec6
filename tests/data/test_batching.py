"""Which examples make a batch, against counts made by hand (F07, F14, F29's halves)."""

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from sized_source import SizedSource

from lit_sd.data.batching import Draw, MixedBatchSampler, OrderedBatchSampler, held_out
from lit_sd.data.buckets import Buckets
from lit_sd.data.examples import Examples
from lit_sd.data.folder import FolderSource
from lit_sd.data.loading import collate, to_floats
from lit_sd.data.pools import Pool
from lit_sd.data.shares import share_batch
from lit_sd.data.slots import Slots

SQUARE = (16, 16)
APART = {"instance": "instance", "prior": "prior"}
BUCKETS = Buckets([16], 8, 4)  # 16x16, then 24x8 and 32x8, then 8x24 and 8x32


def part(name: str = "a", images: int = 10, quota: int = 2, repeats: int = 1, seed: int = 0) -> Pool:
    return Pool(name, [SizedSource(images, name=name, repeats=repeats)], quota, seed=seed, square=SQUARE)


def shaped(sizes: list[tuple[int, int]], quota: int, name: str = "a", seed: int = 0) -> Pool:
    return Pool(name, [SizedSource(sizes, name=name)], quota, seed=seed, buckets=BUCKETS, square=SQUARE)


def test_an_epoch_draws_every_image_once():
    sampler = MixedBatchSampler([part(images=10, quota=2)])
    batches = list(sampler)
    assert len(sampler) == len(batches) == 5
    assert sorted(draw.image for batch in batches for draw in batch) == list(range(10))
    assert {(draw.height, draw.width) for batch in batches for draw in batch} == {SQUARE}


def test_epochs_and_seeds_differ_and_repeat_themselves():
    def order(seed, epoch):
        sampler = MixedBatchSampler([part(seed=seed)], seed=seed)
        sampler.set_epoch(epoch)
        return [draw.image for batch in sampler for draw in batch]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_an_epoch_without_overlap(world_size):
    """14 images in steps of 2 x world: 7, 3 and 2 steps on each rank; no image twice in an epoch."""
    samplers = [
        MixedBatchSampler([part(images=14)], rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert {len(sampler) for sampler in samplers} == {14 // (2 * world_size)}
    assert [len(list(sampler)) for sampler in samplers] == [len(sampler) for sampler in samplers]
    drawn = [draw.image for sampler in samplers for batch in sampler for draw in batch]
    assert len(drawn) == len(set(drawn)) == 14 // (2 * world_size) * 2 * world_size


def test_repeats_draw_evenly_and_tell_the_draws_apart():
    sampler = MixedBatchSampler([part(images=3, quota=2, repeats=4)])
    draws = [draw for batch in sampler for draw in batch]
    assert len(sampler) == 6
    assert Counter(draw.image for draw in draws) == {0: 4, 1: 4, 2: 4}
    assert {(draw.image, draw.occurrence) for draw in draws} == {
        (i, turn) for i in range(3) for turn in range(4)
    }


def test_what_is_left_out_changes_with_the_epoch():
    sampler = MixedBatchSampler([part(images=5, quota=4)])
    missing = set()
    for epoch in range(20):
        sampler.set_epoch(epoch)
        (batch,) = list(sampler)
        missing |= set(range(5)) - {draw.image for draw in batch}
    assert missing == set(range(5))


def test_fewer_images_than_the_batch_is_refused_with_the_sum():
    with pytest.raises(ValueError, match="not one training step") as error:
        MixedBatchSampler([part(images=5, quota=8)])
    assert "5 images x 1 repeats = 5 draws an epoch, but a step takes 8 (8 in each batch x 1 ranks)" in str(
        error.value
    )
    assert "data.repeats=2" in str(error.value)
    assert len(MixedBatchSampler([part(images=5, quota=8, repeats=2)])) == 1
    with pytest.raises(ValueError, match=r"a step takes 8 .4 in each batch x 2 ranks\)"):
        MixedBatchSampler([part(images=5, quota=4)], world_size=2)


def test_twelve_images_over_six_ratios_make_no_batch():
    shapes = [(16, 16), (24, 8), (8, 24), (32, 8), (8, 32), (12, 16)]
    buckets = Buckets([16], 4 * 2, 4)
    assert set(buckets.shapes) == set(shapes[:-1])
    images = SizedSource([shape for shape in shapes for _ in range(2)], name="images")
    pool = Pool("images", [images], 5, buckets=buckets, square=SQUARE)
    with pytest.raises(ValueError, match="not one training step") as error:
        MixedBatchSampler([pool])
    for i in range(12):
        assert f"images{i}" in str(error.value)
    assert "bucket 24x8: 2 images, 2 draws = 0 steps of 5; never trained on: images2, images3" in str(
        error.value
    )
    assert "data.buckets=false" in str(error.value)


def test_buckets_give_batches_of_one_shape_and_tell_what_they_drop():
    sizes = [(16, 16)] * 5 + [(24, 8)] * 3 + [(8, 24)]
    sampler = MixedBatchSampler([shaped(sizes, 2)])
    batches = list(sampler)
    assert len(batches) == len(sampler) == 3
    by_shape = Counter(frozenset((draw.height, draw.width) for draw in batch) for batch in batches)
    assert by_shape == {frozenset({(16, 16)}): 2, frozenset({(24, 8)}): 1}
    for draw in (draw for batch in batches for draw in batch):
        assert sizes[draw.image] == (draw.height, draw.width)
    report = "\n".join(sampler.report())
    assert "an epoch has 3 steps of 2 images" in report
    assert "bucket 8x24: 1 images, 1 draws = 0 steps of 2; never trained on: a8" in report


def test_filled_up_buckets_leave_no_image_out():
    """5, 3 and 1 images in batches of 2: 3, 2 and 1 steps, with one further draw each."""
    sizes = [(16, 16)] * 5 + [(24, 8)] * 3 + [(8, 24)]
    sampler = MixedBatchSampler([shaped(sizes, 2)], fill=True)
    drawn = Counter(draw.image for batch in sampler for draw in batch)
    assert len(sampler) == 6
    assert set(drawn) == set(range(9))
    assert sum(drawn.values()) == 12
    assert drawn[8] == 2
    assert "bucket 8x24: 1 images, 1 draws = 1 steps of 2; 1 further draws fill up the last one" in "\n".join(
        sampler.report()
    )
    occurrences = Counter(draw for batch in sampler for draw in batch)
    assert max(occurrences.values()) == 1  # so that the two draws of one image are cropped apart


def test_the_order_of_buckets_is_mixed():
    shapes = [batch[0].height for batch in MixedBatchSampler([shaped([(16, 16)] * 20 + [(24, 8)] * 20, 2)])]
    assert shapes != sorted(shapes)
    assert Counter(shapes) == {16: 10, 24: 10}
    assert all(3 <= shapes[:i].count(16) - i // 2 + 5 <= 7 for i in range(20))  # and evenly


@pytest.mark.parametrize(("instance", "prior", "steps"), [(7, 3, 3), (3, 7, 7), (5, 200, 200)])
def test_a_batch_of_three_holds_both_halves(instance, prior, steps):
    """Two of the subject and one of the class. 7 and 3 images: 7 // 2 and 3 // 1 steps; 3 and 7: 1 and 7."""
    quotas = share_batch(3, {"instance": 1, "prior": 1})
    assert quotas == {"instance": 2, "prior": 1}
    sampler = MixedBatchSampler([part("instance", instance, 2), part("prior", prior, 1)])
    assert len(sampler) == len(list(sampler)) == steps
    for batch in sampler:
        assert [draw.source for draw in batch] == ["instance", "instance", "prior"]
    turns = Counter(draw.image for batch in sampler for draw in batch if draw.source == "instance")
    assert max(turns.values()) - min(turns.get(i, 0) for i in range(instance)) <= 1
    if steps == 200:
        prior_draws = [draw.image for batch in sampler for draw in batch if draw.source == "prior"]
        assert sorted(prior_draws) == list(range(200))


def test_the_report_says_what_drives_the_epoch():
    report = MixedBatchSampler([part("instance", 5, 2), part("prior", 200, 2)], world_size=2).report()
    assert "instance: 5 images x 1 repeats, 2 in each batch" in report
    assert "an epoch has 50 steps of 8 images, as long as prior lasts; the others start over" in report


def test_other_sources_follow_the_first_ones_shape():
    lead = shaped([(24, 8), (24, 8), (8, 24), (8, 24)], 1)
    for batch in MixedBatchSampler([lead, part("b", 4, 1)]):
        assert len({(draw.height, draw.width) for draw in batch}) == 1
        assert (batch[0].height, batch[0].width) != SQUARE


@pytest.mark.parametrize(
    ("size", "shares", "parts"),
    [
        (16, {"a": 1, "b": 1}, {"a": 8, "b": 8}),
        (16, {"emoji": 0.9, "photos": 0.1}, {"emoji": 14, "photos": 2}),
        (8, {"a": 0.99, "b": 0.01}, {"a": 7, "b": 1}),
        (5, {"a": 1, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 1}),
        (1, {"a": 0.3}, {"a": 1}),
    ],
)
def test_shares_of_a_batch(size, shares, parts):
    assert share_batch(size, shares) == parts


def test_shares_that_do_not_fit():
    with pytest.raises(ValueError, match=r"data\.batch_size=1 can't hold.*2 sources.*data\.batch_size=2"):
        share_batch(1, {"instance": 1, "prior": 1})
    with pytest.raises(ValueError, match="positive"):
        share_batch(4, {"a": 1, "b": 0})


@pytest.mark.parametrize("buckets", [False, True])
def test_an_epoch_goes_on_where_it_stopped(buckets):
    sizes = [SQUARE] * 8 + [(24, 8)] * 6
    parts = [shaped(sizes, 2) if buckets else part("a", 14, 2), part("b", 3, 1)]
    whole = MixedBatchSampler(parts, seed=5)
    whole.set_epoch(2)
    rest = MixedBatchSampler(parts, seed=5)
    rest.set_epoch(2, 3)
    assert list(rest) == list(whole)[3:]
    assert len(rest) == len(whole)  # of the whole epoch, as Lightning counts it


def test_the_position_is_asked_when_iteration_starts():
    sampler = MixedBatchSampler([part()])
    places = iter([(0, 4), (1, 0)])
    sampler.start = lambda: next(places)
    first, second = iter(sampler), iter(sampler)
    assert (len(list(second)), len(list(first))) == (5, 1)


@pytest.mark.parametrize(
    ("images", "batch", "world"), [(7, 2, 1), (7, 2, 2), (3, 4, 2), (8, 2, 2), (1, 4, 3)]
)
def test_validation_sees_each_image_once_and_no_rank_waits(images, batch, world):
    samplers = [
        OrderedBatchSampler("val", range(images), SQUARE, batch_size=batch, rank=rank, world_size=world)
        for rank in range(world)
    ]
    epochs = [list(sampler) for sampler in samplers]
    assert len({tuple(map(len, batches)) for batches in epochs}) == 1
    assert {len(batches) for batches in epochs} == {len(sampler) for sampler in samplers}
    counted = [draw.image for batches in epochs for b in batches for draw in b if not draw.padding]
    assert sorted(counted) == list(range(images))


def test_held_out_images_stay_held_out_when_others_are_added():
    ids = [f"{i}.png" for i in range(40)]
    aside = held_out(ids, 0.25, 0)
    assert len(aside) == 10
    assert aside == sorted(set(aside))
    assert held_out(ids, 0.25, 1) != aside
    assert held_out(["one", "two"], 0.01, 0) in ([0], [1])
    more = [*ids, *(f"{i}.png" for i in range(40, 44))]
    assert len(set(aside) & set(held_out(more, 0.25, 0))) >= 8
    assert held_out(ids, 0.0, 0) == []
    with pytest.raises(ValueError, match="leaves none to train on"):
        held_out(["a"], 0.5, 0)


@pytest.fixture
def source(tmp_path) -> FolderSource:
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 255, (20, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
    return FolderSource(tmp_path, prompt="x")


def test_a_draw_is_the_same_whoever_asks(source):
    """The same draw has the same pixels, another epoch or seed another crop; no global stream is used."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draws = [Draw("a", 1, epoch, turn, 16, 16) for epoch in range(3) for turn in range(3)]
    first = [Examples({"a": source}, seed=1, flip=0.5)[draw][0] for draw in draws]
    again = [Examples({"a": source}, seed=1, flip=0.5, decoded_mb=1)[draw][0] for draw in reversed(draws)][
        ::-1
    ]
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one["pixels"], other["pixels"])
        assert one["crop_top_left"] == other["crop_top_left"]
    assert len({sample["crop_top_left"] for sample in first}) > 3
    moved = [Examples({"a": source}, seed=2)[draw][0]["crop_top_left"] for draw in draws]
    assert moved != [sample["crop_top_left"] for sample in first]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_cache_keeps_to_its_room(source, monkeypatch):
    loads = Counter()
    load = source.load
    monkeypatch.setattr(source, "load", lambda index, *how: (loads.update([index]), load(index, *how))[1])
    examples = Examples({"a": source}, decoded_mb=2 * 16 * 32 * 3 / 2**20)  # room for two of three
    for _ in range(4):
        for index in range(3):
            examples[Draw("a", index, 0, 0, 16, 16)]
    assert loads == {0: 1, 1: 1, 2: 4}


def test_a_kept_picture_does_not_lie_in_a_batch(tmp_path):
    """JPEGs of the right size are decoded right into a batch, whose room the next batch takes."""
    for i in range(4):
        Image.new("RGB", (16, 16), (i * 60,) * 3).save(tmp_path / f"{i}.jpg")

    class OneRoom(Slots):
        def __init__(self) -> None: ...

        def room(self, shape: tuple[int, ...]) -> np.ndarray:
            return self.__dict__.setdefault("only", np.empty(shape, np.uint8))

    source = FolderSource(tmp_path, prompt="x")
    for room, kept in ((0, 0), (1, 4)):
        examples = Examples({"a": source}, decoded_mb=room, slots=OneRoom())
        for first in (0, 2, 0):
            items = examples.__getitems__([Draw("a", first + i, 0, 0, 16, 16) for i in range(2)])
            greys = [int(sample["pixels"].mean().round()) for sample, _ in items]
            assert greys == [first * 60, first * 60 + 60]
        assert len(examples._kept) == kept


def test_weights_make_the_sum_a_mean_of_each_source(source):
    """Losses 1 2 | 5 with a prior weight of 0.5: mean 1.5 + 0.5 * 5 = 4."""
    examples = Examples({"instance": source, "prior": source})
    draws = [
        Draw("instance", 0, 0, 0, 16, 16),
        Draw("instance", 1, 0, 0, 16, 16),
        Draw("prior", 2, 0, 0, 16, 16),
    ]
    batch = collate([examples[draw] for draw in draws], {"instance": 1.0, "prior": 0.5}, APART)
    assert batch["weight"].tolist() == [0.5, 0.5, 0.5]
    assert (torch.tensor([1.0, 2.0, 5.0]) * batch["weight"]).sum() == 4
    assert batch["source"] == ["instance", "instance", "prior"]
    assert batch["ids"] == ["0.png", "1.png", "2.png"]
    assert batch["pixels"].shape == (3, 16, 16, 3)
    assert batch["original_size"].tolist() == [[20, 40]] * 3
    assert batch["target_size"].tolist() == [[16, 16]] * 3
    assert batch["crop_top_left"].dtype == torch.int64


def test_sources_of_one_pool_count_as_one(source):
    """Losses 1 2 | 5, the last with weight 2: (1 + 2 + 2 * 5) / 3, whatever the batch holds of each."""
    examples = Examples({"a": source, "b": source})
    draws = [Draw("a", 0, 0, 0, 16, 16), Draw("a", 1, 0, 0, 16, 16), Draw("b", 2, 0, 0, 16, 16)]
    batch = collate([examples[draw] for draw in draws], {"a": 1.0, "b": 2.0}, {"a": "one", "b": "one"})
    assert (torch.tensor([1.0, 2.0, 5.0]) * batch["weight"]).sum() == pytest.approx(13 / 3)


def test_padding_weighs_nothing(source):
    examples = Examples({"val": source})
    draws = [Draw("val", i, 0, 0, 16, 16, padding) for i, padding in [(0, False), (1, False), (0, True)]]
    assert collate([examples[draw] for draw in draws], {"val": 1.0}, {"val": "val"})["weight"].tolist() == [
        0.5,
        0.5,
        0.0,
    ]


def test_on_its_device_a_batch_has_floats(source):
    examples = Examples({"val": source})
    batch = collate([examples[Draw("val", 0, 0, 0, 16, 16)]], {"val": 1.0}, {"val": "val"})
    batch["pixels"][0, 0, 1] = torch.tensor([0, 51, 255])
    batch["mask"] = torch.full((1, 16, 16, 1), 51, dtype=torch.uint8)
    batch["control"] = batch["pixels"]
    made = to_floats(batch)
    assert made["pixels"].dtype == torch.float32
    assert made["pixels"].is_contiguous()
    assert torch.allclose(made["pixels"][0, :, 0, 1], torch.tensor([-1.0, -0.6, 1.0]))
    assert torch.allclose(made["control"][0, :, 0, 1], torch.tensor([0.0, 0.2, 1.0]))
    assert made["mask"].shape == (1, 1, 16, 16)
    assert torch.allclose(made["mask"], torch.tensor(0.2))


def test_examples_without_a_mask_count_in_full_beside_those_with_one(source):
    examples = Examples({"val": source})
    (one, _), (two, _) = (examples[Draw("val", i, 0, 0, 16, 16)] for i in (0, 1))
    one["mask"] = np.zeros((16, 16, 1), np.uint8)
    mask = collate([(one, False), (two, False)], {"val": 1.0}, {"val": "val"})["mask"]
    assert [float(m.float().mean()) for m in mask] == [0, 255]
    two["control"] = two["pixels"]
    with pytest.raises(ValueError, match=r"0\.png has no control image"):
        collate([(one, False), (two, False)], {"val": 1.0}, {"val": "val"})
