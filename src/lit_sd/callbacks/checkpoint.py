"""Checkpoints every N steps, at the end, and of the best validation; never half a file, never a dangling
name.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

PARTIAL = ".partial"


class AsideCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames. Straight to disk: Lightning's own writes all to memory first."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}{PARTIAL}")
        with aside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)


class Checkpoints(Checkpoint):
    """Writes `step_000500.ckpt`, `last.ckpt` and `best.ckpt`.

    `last` and `best` are files of their own (hard links, or copies where the file system has none), so that
    removing older steps can't take them away.

    Args:
        folder: where they go.
        every_n_steps: optimizer updates between two; 0 for the end alone.
        keep: how many of the numbered files stay, the newest; 0 for none beside `last` and `best`, -1 for
            all.
        monitor: logged metric that decides which is best, judged after each validation; None for no `best`.
        mode: whether the best is the smallest or the largest.

    Raises:
        ValueError: a count is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_n_steps: int,
        keep: int,
        monitor: str | None,
        mode: Literal["min", "max"],
    ) -> None:
        if every_n_steps < 0 or keep < -1:
            raise ValueError(
                f"callbacks.checkpoint: every_n_steps={every_n_steps}, keep={keep}; expected >= 0 and >= -1"
            )
        self.folder = Path(folder)
        self.every_n_steps = every_n_steps
        self.keep = keep
        self.monitor = monitor
        self.mode = mode
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._seen_step = 0
        self._saved_step = -1

    @property
    def last(self) -> Path:
        return self.folder / "last.ckpt"

    @property
    def best(self) -> Path:
        return self.folder / "best.ckpt"

    @property
    def best_model_path(self) -> str:
        """Under Lightning's name, for `trainer.test(ckpt_path="best")`; empty where there is none."""
        return str(self.best) if self.best.exists() else ""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AsideCheckpointIO()
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(f".*{PARTIAL}"):
                leftover.unlink()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step = trainer.global_step
        if self.best_score is not None and not trainer.strategy.broadcast(self.best.exists()):
            self.best_score = self.best_step = None  # of another folder: this one shall have a best as well

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step:  # gradients are still being accumulated, and a checkpoint would lose them
            return
        self._seen_step = step
        due = self.every_n_steps and step % self.every_n_steps == 0
        if due or trainer.should_stop or step >= trainer.estimated_stepping_batches:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._saved_step != trainer.global_step and trainer.global_step > 0:
            self.save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.monitor is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if self.monitor not in trainer.callback_metrics:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise ValueError(
                f"callbacks.checkpoint.monitor={self.monitor!r} was not logged by validation, only {known}"
            )
        score = trainer.strategy.broadcast(float(trainer.callback_metrics[self.monitor]))
        better = self.best_score is None or (
            score < self.best_score if self.mode == "min" else score > self.best_score
        )
        if better:
            self.best_score, self.best_step = score, trainer.global_step
            trainer.save_checkpoint(self.best, weights_only=False)

    def save(self, trainer: Trainer) -> Path:
        """Write a checkpoint of the present step; it becomes `last`. All ranks must call this. Returns its
        path.
        """
        step = trainer.global_step
        numbered = self.folder / f"step_{step:06d}.ckpt"
        self._saved_step = step
        trainer.save_checkpoint(numbered if self.keep else self.last, weights_only=False)
        if self.keep and trainer.is_global_zero:
            replace_by_link(numbered, self.last)
            self._remove_old()
        trainer.strategy.barrier("lit_sd.checkpoints")
        rank_zero_info(f"checkpoint at step {step}: {self.last}")
        return self.last

    def _remove_old(self) -> None:
        if self.keep < 0:
            return
        # By age and not by step: an earlier run in this folder may have come further.
        numbered = sorted(self.folder.glob("step_*.ckpt"), key=lambda path: (path.stat().st_mtime_ns, path))
        for path in numbered[: -self.keep]:
            path.unlink()

    def state_dict(self) -> dict[str, Any]:
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_score, self.best_step = state_dict["best_score"], state_dict["best_step"]


def replace_by_link(source: Path, name: Path) -> None:
    """Make `name` the same file as `source` in one step: at any moment it is the old one or the new one,
    whole.
    """
    if name.exists() and os.path.samefile(source, name):
        return  # renaming one link over another does nothing and would leave the temporary name behind
    aside = name.with_name(f".{name.name}{PARTIAL}")
    aside.unlink(missing_ok=True)
    try:
        os.link(source, aside)
    except OSError as error:
        warnings.warn(f"no hard links here ({error.strerror}); {name.name} becomes a copy", stacklevel=2)
        shutil.copyfile(source, aside)
    os.replace(aside, name)
