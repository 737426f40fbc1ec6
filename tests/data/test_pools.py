"""The endless sequence of draws, against what can be counted by hand (contract 3, F13, F14)."""

from collections import Counter

import numpy as np
import pytest
from sized_source import SizedSource

from lit_sd.data.batching import MixedBatchSampler
from lit_sd.data.buckets import Buckets
from lit_sd.data.pools import Pool

SQUARE = (16, 16)


def pool(*sources: SizedSource, quota: int = 1, **options) -> Pool:
    return Pool("images", sources, quota, square=SQUARE, **options)


def drawn(some: Pool, start: int, count: int, epoch: int = 0, shape: tuple[int, int] = SQUARE) -> list:
    """(source, image, occurrence) of a stretch of the sequence."""
    draws = some.take(epoch, shape, start, count)
    names = [some.members[number].source.name for number in draws.member]
    return list(zip(names, draws.image.tolist(), draws.occurrence.tolist(), strict=True))


def many(name: str = "shards", shards: int = 10, each: int = 7, **options) -> SizedSource:
    return SizedSource(shards * each, name=name, starts=range(0, shards * each, each), **options)


def test_a_cycle_draws_each_image_as_often_as_its_source_repeats_it():
    both = pool(SizedSource(5, name="a", repeats=3), SizedSource(4, name="b"))
    assert both.cycle == {SQUARE: 19}
    turns = Counter((name, image) for name, image, _ in drawn(both, 0, 19))
    assert turns == {**{("a", i): 3 for i in range(5)}, **{("b", i): 1 for i in range(4)}}
    assert len(set(drawn(both, 0, 38))) == 38  # each draw of an image in an epoch has its own number


def test_what_is_repeated_comes_round_evenly():
    """a comes 3 times, so the cycle has three windows, each with all of a and a third of b's six."""
    both = pool(SizedSource(5, name="a", repeats=3), SizedSource(6, name="b"))
    for window in range(3):
        part = Counter(name for name, _, _ in drawn(both, 7 * window, 7))
        assert part == {"a": 5, "b": 2}


@pytest.mark.parametrize("shuffle_shards", [None, 1, 3])
def test_any_position_can_be_told_without_what_comes_before(shuffle_shards):
    make = lambda: pool(many(), SizedSource(9, name="few", repeats=2), shuffle_shards=shuffle_shards)  # noqa: E731
    whole = drawn(make(), 0, 300)
    for start in (0, 1, 41, 87, 88, 89, 250):
        assert drawn(make(), start, 300 - start) == whole[start:]


def test_windows_of_shards_keep_few_of_them_open():
    """10 shards of 7, two at a time: 5 windows of 14, each of two whole shards, in a new order each turn."""
    some = pool(many(), shuffle_shards=2)
    orders = []
    for turn in range(2):
        images = [image for _, image, _ in drawn(some, 70 * turn, 70)]
        assert sorted(images) == list(range(70))
        windows = [frozenset(i // 7 for i in images[at : at + 14]) for at in range(0, 70, 14)]
        assert [len(window) for window in windows] == [2] * 5
        mixed = [i // 7 for i in images[:14]]
        assert mixed not in (sorted(mixed), sorted(mixed, reverse=True))
        orders.append(windows)
    assert orders[0] != orders[1]


def test_the_whole_is_one_order_however_it_is_stored():
    one, cut = SizedSource(70, name="images"), many("images")
    assert drawn(pool(one), 0, 140) == drawn(pool(cut), 0, 140)


def test_weights_are_kept_to_by_rounding_up_or_down():
    """Weights 2, 1, 0.5, 0.5, 0: four draws a turn; a half comes every second turn on average."""
    some = pool(SizedSource(5, weights=[2, 1, 0.5, 0.5, 0]))
    assert some.cycle == {SQUARE: 4}
    totals = Counter()
    for turn in range(400):
        counts = Counter(image for _, image, _ in drawn(some, 4 * turn, 4))
        assert counts[0] == 2
        assert counts[1] == 1
        assert counts[4] == 0
        totals += counts
    assert totals[2] + totals[3] == 400
    assert abs(totals[2] - 200) < 60  # six standard deviations of a fair coin
    numbers = [(image, occurrence) for _, image, occurrence in drawn(some, 0, 400)]
    assert len(set(numbers)) == 400


def test_images_set_aside_are_never_drawn():
    some = pool(SizedSource(10), aside=[2, 7])
    assert some.cycle == {SQUARE: 8}
    assert {image for _, image, _ in drawn(some, 0, 16)} == set(range(10)) - {2, 7}


def test_each_shape_has_its_own_sequence():
    sizes = [(16, 16), (24, 8)] * 6
    some = Pool("images", [SizedSource(sizes)], 1, buckets=Buckets([16], 8, 4), square=SQUARE)
    assert some.shapes == [(16, 16), (24, 8)]
    assert {i for _, i, _ in drawn(some, 0, 6, shape=(24, 8))} == {1, 3, 5, 7, 9, 11}
    assert some.names((24, 8)) == [f"images{i}" for i in (1, 3, 5, 7, 9, 11)]


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_id_once_on_any_number_of_ranks(world_size, batch, sharded):
    """3 shards x 7 over ranks: equal numbers of batches, no image twice, less than a step left over."""
    source = many(shards=3) if sharded else SizedSource(21)
    make = lambda rank: MixedBatchSampler(  # noqa: E731
        [pool(source, quota=batch, shuffle_shards=1)], rank=rank, world_size=world_size
    )
    batches = [list(make(rank)) for rank in range(world_size)]
    assert {len(of_rank) for of_rank in batches} == {21 // (batch * world_size)} == {len(make(0))}
    images = [draw.image for of_rank in batches for b in of_rank for draw in b]
    assert len(images) == len(set(images)) > 21 - batch * world_size


def test_a_rank_reads_few_shards_at_a_time():
    """40 shards over 4 ranks, two at a time: ten for each rank, and in a stretch of two shards' length four
    at the most, for it may lie in two windows, of two shards each."""
    samplers = [
        MixedBatchSampler([pool(many(shards=40, each=8), quota=4, shuffle_shards=2)], rank=rank, world_size=4)
        for rank in range(4)
    ]
    read = [[draw.image // 8 for batch in sampler for draw in batch] for sampler in samplers]
    assert [len(set(shards)) for shards in read] == [10] * 4
    assert len(set().union(*read)) == 40
    for shards in read:
        assert max(len(set(shards[at : at + 16])) for at in range(65)) == 4


def test_a_step_has_one_shape_on_all_ranks():
    sizes = [(16, 16)] * 30 + [(24, 8)] * 30 + [(8, 24)] * 4
    order = np.random.default_rng(0).permutation(64)
    source = SizedSource([sizes[i] for i in order], starts=range(0, 64, 16))
    ranks = [
        list(
            MixedBatchSampler(
                [pool(source, quota=2, buckets=Buckets([16], 8, 4), shuffle_shards=1)],
                rank=rank,
                world_size=2,
            )
        )
        for rank in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1]) == 7 + 7 + 1
    for one, other in zip(*ranks, strict=True):
        assert {(d.height, d.width) for d in one + other} == {(one[0].height, one[0].width)}


def test_planning_reads_sizes_part_by_part():
    """For buckets the sizes of all parts are read once, one part at a time; without buckets none is."""
    source = many()
    pool(source, shuffle_shards=2)
    assert source.asked == []
    pool(source, shuffle_shards=2, buckets=Buckets([16], 8, 4))
    assert source.asked == [(at, at + 7) for at in range(0, 70, 7)]


def test_other_images_have_another_fingerprint():
    prints = {
        pool(SizedSource(5)).fingerprint(),
        pool(SizedSource(6)).fingerprint(),
        pool(SizedSource(5, repeats=2)).fingerprint(),
        pool(SizedSource(5, name="other")).fingerprint(),
        pool(SizedSource(5, weights=[1, 1, 1, 1, 2])).fingerprint(),
        pool(SizedSource(5), aside=[1]).fingerprint(),
    }
    assert len(prints) == 6
    assert pool(SizedSource(5)).fingerprint() in prints


def test_weights_of_small_parts_add_up():
    """200 parts of one image each, of weight 0.5: 100 draws a turn, not none."""
    halves = SizedSource(200, starts=range(200), weights=[0.5] * 200)
    assert pool(halves, shuffle_shards=3).cycle == {SQUARE: 100}
    more = SizedSource(400, starts=range(400), weights=[1.4] * 400)
    assert pool(more, shuffle_shards=3).cycle == {SQUARE: 560}


@pytest.mark.parametrize("shuffle_shards", [None, 3])
def test_no_image_is_left_out_however_parts_divide_them(shuffle_shards):
    """Ten shards of two images of weights 0.4 and 0: 4 draws a turn, each image 40 times in 100 turns."""
    source = SizedSource(20, starts=range(0, 20, 2), weights=[0.4, 0] * 10)
    some = pool(source, shuffle_shards=shuffle_shards)
    totals = Counter()
    for turn in range(200):
        counts = Counter(image for _, image, _ in drawn(some, 4 * turn, 4))
        assert max(counts.values()) == 1
        totals += counts
    assert sorted(totals) == list(range(0, 20, 2))
    assert all(abs(count - 80) < 42 for count in totals.values())  # six standard deviations of coins


def test_parts_without_images_of_a_shape_are_passed_over():
    """Four shards, squares and oblong ones by turns, with weights, in one window."""
    sizes = ([(16, 16)] * 3 + [(24, 8)] * 3) * 2
    source = SizedSource(sizes, starts=range(0, 12, 3), weights=[2.0] * 12)
    some = pool(source, buckets=Buckets([16], 8, 4), shuffle_shards=4)
    for shape in ((16, 16), (24, 8)):
        turns = Counter(image for _, image, _ in drawn(some, 0, 12, shape=shape))
        assert set(turns.values()) == {2}
        assert {sizes[image] for image in turns} == {shape}


def test_a_shape_whose_weights_come_to_nothing_is_reported():
    source = SizedSource([(16, 16)] * 4 + [(24, 8)], weights=[1, 1, 1, 1, 0.4])
    sampler = MixedBatchSampler([pool(source, quota=2, buckets=Buckets([16], 8, 4))])
    assert "bucket 24x8: 1 images, 0 draws = 0 steps of 2; never trained on: images4" in "\n".join(
        sampler.report()
    )


def test_a_first_pool_without_draws_is_refused():
    with pytest.raises(ValueError, match="not one training step"):
        MixedBatchSampler([pool(SizedSource(1, weights=[0.2])), pool(SizedSource(5, name="b"))])


def test_draws_left_over_are_told():
    """7 images in steps of 4."""
    report = MixedBatchSampler([pool(SizedSource(7), quota=4)]).report()
    assert "3 draws are left over after the last step, other ones each epoch" in report


def test_a_first_pool_that_starts_over_leaves_no_image_out():
    """40 images in 4 shards on 4 ranks, beside a pool of 60: 60 draws of the 40, so each once or twice."""
    lead = lambda: pool(many(shards=4, each=10), shuffle_shards=1)  # noqa: E731
    other = lambda: Pool("other", [SizedSource(60, name="other")], 1, square=SQUARE)  # noqa: E731
    turns = Counter(
        draw.image
        for rank in range(4)
        for batch in MixedBatchSampler([lead(), other()], rank=rank, world_size=4)
        for draw in batch
        if draw.source == "shards"
    )
    assert len(turns) == 40
    assert max(turns.values()) == 2


def test_moved_weights_and_shapes_have_another_fingerprint():
    weights = {pool(SizedSource(4, weights=w)).fingerprint() for w in ([2, 1, 1, 0], [0, 1, 1, 2])}
    shapes = [[(16, 16), (24, 8)], [(24, 8), (16, 16)]]
    buckets = Buckets([16], 8, 4)
    assert len(weights | {pool(SizedSource(s), buckets=buckets).fingerprint() for s in shapes}) == 4
