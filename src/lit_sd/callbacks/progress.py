"""What a run shows while it trains: loss, learning rate and images per second, at next to no cost."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from torch import Tensor


class Meters(Callback):
    """Logs `images_per_s` (over all ranks) and `lr` or `lr/<group>`, for the loggers and the progress bar.

    Args:
        every_n_steps: optimizer updates between two; None for the trainer's `log_every_n_steps`.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = every_n_steps
        self._images = 0
        self._since = 0.0
        self._seen_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._images += count_images(batch) * trainer.world_size
        step = trainer.global_step
        every = self.every_n_steps or trainer.log_every_n_steps or 1  # type: ignore[attr-defined]
        if step == self._seen_step or (step % every and step != 1):
            return
        rate = self._images / max(time.perf_counter() - self._since, 1e-9)
        groups = trainer.optimizers[0].param_groups
        if len(groups) == 1:
            rates = {"lr": float(groups[0]["lr"])}
        else:
            rates = {f"lr/{group.get('name', i)}": float(group["lr"]) for i, group in enumerate(groups)}
        pl_module.log_dict({**rates, "images_per_s": rate}, prog_bar=True, batch_size=1)
        self._restart(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart(trainer)  # what validation took is no training time

    def _restart(self, trainer: Trainer) -> None:
        self._images, self._since, self._seen_step = 0, time.perf_counter(), trainer.global_step


def count_images(batch: Any) -> int:
    """Examples in a batch: its `ids`, or the length of the first thing in it that has one."""
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, list | tuple)
        else [batch]
    )
    if isinstance(batch, Mapping) and "ids" in batch:
        return len(batch["ids"])
    return next((len(value) for value in values if isinstance(value, list | Tensor) and len(value)), 0)


class Progress(RichProgressBar):
    """One bar over the run's optimizer updates. Where the output is no terminal, a plain line now and then
    instead.

    Metrics are read from the device at most every `every_s` seconds: reading makes the host wait.

    Args:
        every_s: seconds between two readings.
        plain_every_s: seconds between two plain lines.
    """

    def __init__(self, *, every_s: float, plain_every_s: float) -> None:
        super().__init__(refresh_rate=4)
        self.every_s = every_s
        self.plain_every_s = plain_every_s
        self._read_at = self._line_at = 0.0
        self._total: int | float = float("inf")
        self._started = (0.0, 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._total = trainer.estimated_stepping_batches
        self._started = (time.monotonic(), trainer.global_step)
        self._line_at = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.is_enabled and self.progress is not None and self.train_progress_bar_id is None:
            self.train_progress_bar_id = self._add_task(self._total, "training")
            self.progress.update(self.train_progress_bar_id, completed=trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if self.is_disabled or now - self._read_at < self.every_s:
            return
        self._read_at = now
        self.on_train_epoch_start(
            trainer, pl_module
        )  # a run that resumes in mid-epoch has had no epoch start
        self._update(self.train_progress_bar_id, trainer.global_step)
        self._update_metrics(trainer, pl_module)
        if (
            self._console is not None
            and not self._console.is_terminal
            and now - self._line_at >= self.plain_every_s
        ):
            self._line_at = now
            self._console.print(self.line(trainer, pl_module), highlight=False, soft_wrap=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pass  # an epoch of five photos is over five times a second

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._update(self.train_progress_bar_id, trainer.global_step)
        self._update_metrics(trainer, pl_module)
        self.refresh(hard=True)

    def line(self, trainer: Trainer, pl_module: LightningModule) -> str:
        """One line on how far the run is."""
        since, begun = self._started
        done = trainer.global_step - begun
        left = "?"
        if done and self._total != float("inf"):
            left = str(
                timedelta(
                    seconds=round((time.monotonic() - since) / done * (self._total - trainer.global_step))
                )
            )
        total = "" if self._total == float("inf") else f"/{self._total}"
        shown = [f"{name} {value}" for name, value in self.get_metrics(trainer, pl_module).items()]
        return " · ".join([f"step {trainer.global_step}{total}", *shown, f"{left} left"])

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {name: readable(name, value) for name, value in metrics.items()}


def readable(name: str, value: Any) -> Any:
    """A metric with as many digits as it deserves."""
    if not isinstance(value, int | float):
        return value
    if name.startswith("lr"):
        return f"{value:.2e}"
    return f"{value:.1f}" if name.endswith("_per_s") else f"{value:.4f}"
