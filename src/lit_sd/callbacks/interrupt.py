"""SIGINT and SIGTERM leave a resumable checkpoint and a non-zero exit code."""

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_sd.callbacks.checkpoint import Checkpoints
from lit_sd.callbacks.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """Ends the process with 128 + the signal's number, as a shell reports it: 130 for SIGINT, 143 for
    SIGTERM.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class InterruptHandler(Callback):
    """On the first signal: finish the optimizer update, save, and stop all ranks at the same step. A second
    one kills at once.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}
        self._seen_step = 0
        self._ranks = Ranks()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.received = 0
        self._ranks = Ranks(trainer)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning sets its own SIGTERM handler after on_fit_start; it exits with 0, without saving.
        self.install()
        self._seen_step = trainer.global_step

    def install(self) -> None:
        """Take over the signals, in the main thread alone, where Python allows it."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        self._before = {int(signum): signal.signal(signum, self._on_signal) for signum in SIGNALS}

    def uninstall(self) -> None:
        """Give the signals back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.received = signum
        self.uninstall()
        signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen_step:  # mid-accumulation: gradients are not saved
            return
        self._seen_step = trainer.global_step
        if signum := self._ranks.highest(self.received):
            path = self._save(trainer)
            name = signal.Signals(signum).name
            rank_zero_info(f"{name}: stopped after {trainer.global_step} updates; resume with ckpt={path}")
            raise Interrupted(signum)

    @staticmethod
    def _save(trainer: Trainer) -> Path:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):
                return callback.save(trainer)
        path = Path(trainer.default_root_dir) / "interrupted.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        return path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.uninstall()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.uninstall()
