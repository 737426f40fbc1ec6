"""Exponential moving average of what trains."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_sd.adapters.base import trainable_tensors
from lit_sd.trainable import check_tensors


class EMA(Callback):
    """Averages the trainable parameters after each optimizer update; validation, sampling and export use the
    average.

    The average is kept in float32. A checkpoint holds both: the raw weights as `state_dict`, whatever is
    swapped in at that moment, and the average under `ema`.

    Args:
        decay: share of the old average that is kept at each update.
        warmup: let the share grow as `(1 + n) / (10 + n)` over the first updates n, so that a short run's
            average is not mostly its initial weights.
        every_n_updates: average only every so many updates, with the decay raised to that power; cheaper,
            nearly the same.

    Raises:
        ValueError: `decay` is not within [0, 1), or `every_n_updates` below 1.
    """

    def __init__(self, decay: float, *, warmup: bool, every_n_updates: int) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"callbacks.ema.decay={decay}; expected 0 or more and less than 1")
        if every_n_updates < 1:
            raise ValueError(f"callbacks.ema.every_n_updates={every_n_updates}; expected 1 or more")
        self.decay = decay
        self.warmup = warmup
        self.every_n_updates = every_n_updates
        self.updates = 0
        self.average: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] | None = None
        self._depth = 0
        self._hook: Any = None

    def decay_at(self, update: int) -> float:
        """Share of the old average kept at the `update`-th update, counted from 1."""
        decay = min(self.decay, (1 + update) / (10 + update)) if self.warmup else self.decay
        return decay**self.every_n_updates

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.average:
            self.average = {
                name: p.detach().float().clone() for name, p in trainable_tensors(pl_module).items()
            }
        self._place(pl_module)
        # On the optimizer, not one of Lightning's: the average must move before any other callback saves.
        self._hook = trainer.optimizers[0].register_step_post_hook(lambda *_: self.update(pl_module))

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        """Count one optimizer update and move the average."""
        self.updates += 1
        if self.updates % self.every_n_updates:
            return
        weights = [p.detach().float() for p in trainable_tensors(module).values()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - self.decay_at(self.updates))

    @torch.no_grad()
    def swap_in(self, module: nn.Module) -> None:
        """Put the average in place of the weights. Calls nest; the outermost counts."""
        self._depth += 1
        if self._depth > 1 or not self.average:
            return
        self._place(module)
        self._raw = {name: p.detach().clone() for name, p in trainable_tensors(module).items()}
        for name, p in trainable_tensors(module).items():
            p.copy_(self.average[name])

    @torch.no_grad()
    def swap_out(self, module: nn.Module) -> None:
        """Put the weights back, bit for bit."""
        self._depth = max(self._depth - 1, 0)
        if self._depth or self._raw is None:
            return
        for name, p in trainable_tensors(module).items():
            p.copy_(self._raw[name])
        self._raw = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap_in(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap_out(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap_in(pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.swap_out(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._depth = min(self._depth, 1)
        self.swap_out(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._raw is not None:
            checkpoint["state_dict"] = {**checkpoint["state_dict"], **self._raw}
        checkpoint["ema"] = {"updates": self.updates, "decay": self.decay, "average": dict(self.average)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        saved = checkpoint.get("ema")
        if saved is None:
            warnings.warn(
                "the checkpoint holds no average (it was written without EMA); averaging starts anew",
                stacklevel=2,
            )
            return
        check_tensors(saved["average"], trainable_tensors(pl_module))
        self.updates = saved["updates"]
        self.average = {name: saved["average"][name].float() for name in trainable_tensors(pl_module)}

    def _place(self, module: nn.Module) -> None:
        self.average = {
            name: self.average[name].to(p.device) for name, p in trainable_tensors(module).items()
        }


@contextmanager
def averaged_weights(trainer: Trainer, module: nn.Module) -> Iterator[None]:
    """Inside, the module holds the averaged weights, if the trainer has an `EMA` among its callbacks."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    averages = [callback for callback in callbacks if isinstance(callback, EMA)]
    for ema in averages:
        ema.swap_in(module)
    try:
        yield
    finally:
        for ema in averages:
            ema.swap_out(module)
