"""Checks that stop a run which has gone wrong, and say where."""

import warnings
from collections import deque
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lit_sd.adapters.base import trainable_tensors
from lit_sd.callbacks.ranks import Ranks
from lit_sd.trainable import StepRecord, Trainable


class NonFiniteError(ArithmeticError):
    """The loss or the weights are NaN or infinite."""


class NonFiniteCheck(Callback):
    """Stops at a loss that is NaN or infinite, naming examples and timesteps, and lets no checkpoint of such
    weights be written.

    On the CPU each loss is looked at before its gradients are taken. On an accelerator that would make the
    host wait in every step, so losses are kept there and looked at together; a checkpoint always looks first,
    so the last one written is good. All ranks look at the same steps and stop together.

    Args:
        every_n_steps: micro-steps between two looks on an accelerator.
    """

    def __init__(self, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise ValueError(f"callbacks.finite.every_n_steps={every_n_steps}; expected 1 or more")
        self.every_n_steps = every_n_steps
        self._pending: deque[tuple[int, Tensor, StepRecord | None]] = deque()
        self._ranks = Ranks()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ranks = Ranks(trainer)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self.keep(trainer.global_step, loss, getattr(pl_module, "record", None))

    def keep(self, step: int, loss: Tensor, record: StepRecord | None) -> None:
        """Keep one loss, and look at those kept when it is time."""
        self._pending.append((step, loss.detach(), record))
        if not must_wait(loss) or len(self._pending) >= self.every_n_steps:
            self.look()

    def look(self) -> None:
        """Look at the losses that were kept.

        Raises:
            NonFiniteError: one is NaN or infinite.
        """
        pending = list(self._pending)
        self._pending.clear()
        if not pending:
            return
        good = bool(torch.stack([loss for _, loss, _ in pending]).isfinite().all())
        if not self._ranks.highest(int(not good)):
            return
        worst = next((describe(*kept) for kept in pending if not bool(kept[1].isfinite())), None)
        raise NonFiniteError("\n".join(message for message in self._ranks.collect(worst) if message))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.look()
        if bad := first_non_finite(pl_module):
            raise NonFiniteError(
                f"at step {trainer.global_step} {bad} holds NaN or infinite values, though losses so far "
                "were finite: the last update was too large. Lower optimizer.lr; no checkpoint is written, "
                "the last one is good"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look()


def must_wait(loss: Tensor) -> bool:
    """Whether reading a loss makes the host wait for an accelerator."""
    return loss.device.type != "cpu"


def first_non_finite(module: nn.Module) -> str | None:
    """Name of the first trainable parameter with a NaN or infinite value, or None."""
    trained = {name: p.detach() for name, p in trainable_tensors(module).items()}
    largest = torch._foreach_norm(list(trained.values()), float("inf"))
    finite = torch.stack([value.cpu() for value in largest]).isfinite().tolist()
    return next((name for name, good in zip(trained, finite, strict=True) if not good), None)


def describe(step: int, loss: Tensor, record: StepRecord | None) -> str:
    """What is known of a step whose loss is not finite: each bad example, its timestep, where it began."""
    head = f"the loss is {loss.item()} after {step} updates"
    advice = "The last checkpoint is good: resume from it with ckpt="
    if record is None:
        return f"{head}. Lower optimizer.lr or look at the data. {advice}"
    bad = [i for i, good in enumerate(record.losses.isfinite().tolist()) if not good]
    if not bad:
        names = ", ".join(record.ids)
        return (
            f"{head}, though each example's own is finite ({names}): a weight of the batch is not. {advice}"
        )
    lines = [
        f"  {record.ids[i]}{_timestep(record, i)}: loss {record.losses[i].item()}, {_cause(record, i)}"
        for i in bad
    ]
    return "\n".join([f"{head}, from {len(bad)} of {len(record.ids)} examples:", *lines, advice])


def _timestep(record: StepRecord, i: int) -> str:
    return f" at timestep {int(record.timesteps[i])}" if record.timesteps is not None else ""


def _cause(record: StepRecord, i: int) -> str:
    for name, finite in record.parts.items():
        if not bool(finite[i]):
            hint = " (the VAE overflowed: it must run in float32 or bfloat16)" if name == "latents" else ""
            return f"its {name} are not finite{hint}"
    names = ", ".join(record.parts) or "inputs"
    return (
        f"its {names} are finite, so the network overflowed: lower optimizer.lr, or change trainer.precision"
    )


class GradientCheck(Callback):
    """After the first backward pass, stops if something that should train got no gradient, and names it.

    A gradient of exactly zero is right for half of a fresh LoRA; a component of which all gradients are zero
    is warned of.
    """

    def __init__(self) -> None:
        self._done = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._done = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self._done:
            return
        self._done = True
        without = [name for name, p in pl_module.named_parameters() if p.requires_grad and p.grad is None]
        if without:
            raise RuntimeError(
                f"{len(without)} trainable tensors got no gradient, such as {', '.join(without[:3])}. Either "
                "the forward pass does not use them, or gradient checkpointing cut them off (it needs "
                "use_reentrant=False)"
            )
        if isinstance(pl_module, Trainable):
            for group in pl_module.parameter_groups():
                if not any(bool(p.grad.any()) for p in group["params"]):
                    warnings.warn(
                        f"all gradients of {group['name']} are zero in the first step: it learns nothing",
                        stacklevel=2,
                    )
