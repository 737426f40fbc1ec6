"""The adapter's export at the end of a run."""

from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_sd.callbacks.ema import averaged_weights


class Export(Callback):
    """Writes what was trained in the form that other programs read, with the averaged weights where there is
    an `EMA`.

    Args:
        folder: where it goes.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files: list[Path] = []

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            with averaged_weights(trainer, pl_module):
                self.files = pl_module.export(self.folder)  # type: ignore[operator]
            rank_zero_info(f"exported: {', '.join(str(path) for path in self.files)}")
        trainer.strategy.barrier("lit_sd.export")
