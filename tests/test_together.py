"""Work that ranks share; several ranks are in `test_two_rank_caching.py`."""

import pytest

from lit_sd.together import Together


@pytest.mark.parametrize(("total", "world_size"), [(10, 3), (2, 4), (0, 2), (7, 1)])
def test_shares_are_stretches_that_differ_by_one_at_most(total, world_size):
    alone = Together()
    shares = []
    for rank in range(world_size):
        alone.rank, alone.world_size = rank, world_size
        shares.append(alone.share(total))
    assert [i for share in shares for i in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_alone_just_works():
    assert Together().run("counting", lambda: 3) == [3]
    with pytest.raises(KeyError):
        Together().run("failing", lambda: {}["x"])


def test_several_need_to_talk():
    with pytest.raises(RuntimeError, match=r"2 ranks can't work together before torch\.distributed"):
        Together(0, 2)
