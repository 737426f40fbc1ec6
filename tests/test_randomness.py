"""Streams are told apart by every part of their key, and by nothing else."""

import torch

from lit_sd.randomness import Draws, generator_of, isolated, seed_of


def test_seeds_differ_in_every_part_and_fit_torch():
    keys = [("a", 1, 2), ("a", 12), ("a", 1, 3), ("b", 1, 2), ("a", "1", 2), ("a1", 2)]
    seeds = {seed_of(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process():
    # blake2b is fixed, Python's own hash of strings is not; the value is the test.
    assert seed_of("noise", 0, 0, 0) == 2636521682021381484


def test_draws_differ_by_step_rank_seed_and_stream():
    def first(draws, stream="noise"):
        return torch.randn(4, generator=draws.generator(stream)).tolist()

    base = first(Draws(0, 5, 0))
    assert base == first(Draws(0, 5, 0))
    others = [
        first(Draws(0, 6, 0)),
        first(Draws(0, 5, 1)),
        first(Draws(1, 5, 0)),
        first(Draws(0, 5, 0), "vae"),
    ]
    assert base not in others
    assert len({tuple(o) for o in others}) == 4


def test_generators_leave_the_global_stream():
    before = torch.get_rng_state()
    torch.randn(3, generator=generator_of("x", 1))
    assert torch.equal(before, torch.get_rng_state())


def test_isolated():
    torch.manual_seed(1)
    expected = torch.randn(2)
    torch.manual_seed(1)
    with isolated():
        torch.randn(100)
    assert torch.equal(expected, torch.randn(2))
