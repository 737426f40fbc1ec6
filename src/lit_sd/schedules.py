"""Learning-rate schedules as factors over optimizer updates (never micro-batches or epochs).

All take `(optimizer, updates)`, where `updates` is the length of the whole run, and ramp up over `warmup`
updates: update u, counted from 0, gets `(u + 1) / (warmup + 1)` of the rate, so that no update is spent at
rate 0.
"""

import math
import warnings
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def _scheduled(optimizer: Optimizer, warmup: int, after: Callable[[int], float]) -> LambdaLR:
    """Ramp up over `warmup` updates, then `after(updates since then)`."""
    if warmup < 0:
        raise ValueError(f"scheduler.warmup={warmup}; expected a number of optimizer updates, 0 or more")
    # A plain function: LambdaLR saves the attributes of callable objects, and a resumed run would get its old
    # length from them.
    return LambdaLR(optimizer, lambda u: (u + 1) / (warmup + 1) if u < warmup else after(u - warmup))


def _decay_length(name: str, updates: int | float, warmup: int) -> int:
    """Updates between the end of the warm-up and the end of the run, at least 1."""
    if math.isinf(updates):
        raise ValueError(
            f"scheduler={name} needs the run's length and this run has no end; set trainer.max_steps or "
            "trainer.max_epochs, or take scheduler=constant"
        )
    if warmup >= updates:
        warnings.warn(f"scheduler.warmup={warmup} covers all {updates} updates of this run", stacklevel=3)
    return max(int(updates) - warmup, 1)


def constant(optimizer: Optimizer, updates: int | float, warmup: int = 0) -> LambdaLR:
    """The full rate after the warm-up.

    Raises:
        ValueError: `warmup` is negative.
    """
    return _scheduled(optimizer, warmup, lambda u: 1.0)


def linear(optimizer: Optimizer, updates: int | float, warmup: int = 0, floor: float = 0.0) -> LambdaLR:
    """Straight down to `floor` times the rate, reached after the last update.

    Raises:
        ValueError: `warmup` is negative, or the run has no end.
    """
    length = _decay_length("linear", updates, warmup)
    return _scheduled(optimizer, warmup, lambda u: floor + (1 - floor) * max(1 - u / length, 0.0))


def cosine(optimizer: Optimizer, updates: int | float, warmup: int = 0, floor: float = 0.0) -> LambdaLR:
    """Half a cosine down to `floor` times the rate (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5, no
    restarts).

    Raises:
        ValueError: `warmup` is negative, or the run has no end.
    """
    length = _decay_length("cosine", updates, warmup)
    return _scheduled(
        optimizer, warmup, lambda u: floor + (1 - floor) * (1 + math.cos(math.pi * min(u / length, 1.0))) / 2
    )
