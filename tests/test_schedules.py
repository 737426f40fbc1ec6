"""Closed forms of the learning-rate schedules, and that their unit is the optimizer update."""

import math

import pytest
import torch

from lit_sd import schedules


def rates(make, updates, **options):
    """The rate that each update uses, and the one after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = make(optimizer, updates, **options)
    used = []
    for _ in range(updates + 1):
        used.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        scheduler.step()
    return used


def test_constant_with_warmup():
    assert rates(schedules.constant, 6, warmup=3) == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1])


def test_linear_reaches_zero_after_the_last_update():
    assert rates(schedules.linear, 4) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rates(schedules.linear, 6, warmup=2) == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0])


def test_linear_with_floor():
    assert rates(schedules.linear, 2, floor=0.5) == pytest.approx([1, 0.75, 0.5])


def test_cosine():
    half = math.sqrt(0.5)
    assert rates(schedules.cosine, 4) == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2, 0], abs=1e-12)
    assert rates(schedules.cosine, 2, floor=0.2) == pytest.approx([1, 0.6, 0.2])


def test_stays_at_the_floor_when_a_run_is_prolonged():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    for make in (schedules.linear, schedules.cosine):
        assert make(optimizer, 4, floor=0.1).lr_lambdas[0](9) == pytest.approx(0.1)


@pytest.mark.parametrize("make", [schedules.linear, schedules.cosine])
def test_decay_needs_an_end(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=r"trainer\.max_steps or trainer\.max_epochs"):
        make(optimizer, math.inf)
    schedules.constant(optimizer, math.inf)


def test_wrong_warmups():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="warmup=-1"):
        schedules.constant(optimizer, 5, warmup=-1)
    with pytest.warns(UserWarning, match="warmup=9 covers all 5 updates"):
        schedules.linear(optimizer, 5, warmup=9)


def test_a_resumed_run_keeps_its_new_length():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    state = schedules.linear(optimizer, 4).state_dict()
    longer = schedules.linear(optimizer, 8)
    longer.load_state_dict(state)
    assert longer.lr_lambdas[0](4) == 0.5
