"""Grids of sample pictures from fixed prompts and seeds while a run goes on."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from PIL import Image

from lit_sd.callbacks.ema import averaged_weights
from lit_sd.randomness import isolated


class Samples(Callback):
    """Draws prompts × seeds every N updates, to disk as `step_000500.png` and to the loggers that take
    pictures.

    All ranks draw their share, with the averaged weights where there is an `EMA`. Training is not moved by
    it: the pictures have their own generators and the global one is put back.

    Args:
        folder: where the grids go.
        prompts: one row each; with none nothing is drawn.
        seeds: one column each.
        every_n_steps: optimizer updates between two grids; 0 for the end alone.
        at_start: also before the first update.
        negative: what to steer away from.
        steps: denoising steps of each picture.
        guidance: classifier-free guidance scale.
        height: of each picture, in pixels; None for the model's own size.
        width: likewise.
        batch_size: pictures drawn at a time.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        prompts: Sequence[str],
        seeds: Sequence[int],
        every_n_steps: int,
        at_start: bool,
        negative: str,
        steps: int,
        guidance: float,
        height: int | None,
        width: int | None,
        batch_size: int,
    ) -> None:
        if every_n_steps < 0:
            raise ValueError(f"callbacks.samples.every_n_steps={every_n_steps}; expected 0 or more")
        if isinstance(prompts, str):
            raise ValueError(
                "callbacks.samples.prompts is one text; expected a list: callbacks.samples.prompts=['a cat']"
            )
        self.folder = Path(folder)
        self.prompts = list(prompts)
        self.seeds = list(seeds)
        self.every_n_steps = every_n_steps
        self.at_start = at_start
        self.options = {
            "negative": negative,
            "steps": steps,
            "guidance": guidance,
            "height": height,
            "width": width,
            "batch_size": batch_size,
        }
        self._drawn_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._drawn_step = trainer.global_step
        if self.at_start and trainer.global_step == 0:
            self.draw(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self.every_n_steps and step % self.every_n_steps == 0 and step != self._drawn_step:
            self.draw(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._drawn_step:
            self.draw(trainer, pl_module)

    @torch.no_grad()
    def draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw, write and log one grid. All ranks must call this."""
        self._drawn_step = trainer.global_step
        pairs = [(prompt, seed) for prompt in self.prompts for seed in self.seeds]
        if not pairs:
            return
        mine = pairs[trainer.global_rank :: trainer.world_size]
        draw: Any = pl_module.sample
        # In the precision of the training: on a CPU, bf16 is several times faster than fp32.
        with isolated(), averaged_weights(trainer, pl_module), trainer.precision_plugin.forward_context():
            pictures = draw([p for p, _ in mine], [s for _, s in mine], **self.options) if mine else []
        shares = gather(pictures, trainer.world_size)
        if not trainer.is_global_zero:
            return
        ordered = [shares[i % trainer.world_size][i // trainer.world_size] for i in range(len(pairs))]
        picture = grid(ordered, columns=len(self.seeds))
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{trainer.global_step:06d}.png"
        picture.save(path)
        for logger in trainer.loggers:
            log_image(logger, "samples", picture, trainer.global_step, caption=" | ".join(self.prompts))


def grid(pictures: Sequence[Image.Image], columns: int) -> Image.Image:
    """Pictures of one size, row by row."""
    width, height = pictures[0].size
    sheet = Image.new("RGB", (columns * width, -(-len(pictures) // columns) * height), "white")
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % columns * width, i // columns * height))
    return sheet


def gather(pictures: list[Image.Image], world_size: int) -> list[list[Image.Image]]:
    """All ranks' pictures, by rank, on every rank."""
    if world_size == 1:
        return [pictures]
    packed: list[Any] = [None] * world_size
    dist.all_gather_object(packed, [_to_png(picture) for picture in pictures])
    return [[Image.open(io.BytesIO(data)).convert("RGB") for data in share] for share in packed]


def _to_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def log_image(logger: Logger, key: str, picture: Image.Image, step: int, caption: str = "") -> None:
    """Send a picture to a logger, if it takes any."""
    if isinstance(logger, WandbLogger):
        logger.log_image(key, [picture], step=step, caption=[caption])
    elif isinstance(logger, TensorBoardLogger):
        import torchvision.transforms.functional as F

        logger.experiment.add_image(key, F.pil_to_tensor(picture), step)
