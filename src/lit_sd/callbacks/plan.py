"""The plan of a run, before its first step: what trains on what, how often and how fast."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, LightningModule, Trainer
from rich import box
from rich.console import Console
from rich.table import Table

from lit_sd.callbacks.ema import EMA

Rows = list[tuple[str, str]]


class Plan(Callback):
    """Prints the plan on rank zero, and writes it as plain text; after the first update, the peak of memory.

    Args:
        file: where to; None to print only.
    """

    def __init__(self, file: str | Path | None = None) -> None:
        self.file = None if file is None else Path(file)
        self._begun = 0
        self._measured = False

    def announce(self, trainer: Trainer) -> None:
        """The first lines, where class images have to be drawn before all of it is known."""
        if trainer.is_global_zero:
            length = (
                f"{trainer.max_steps} updates" if trainer.max_steps > 0 else f"{trainer.max_epochs} epochs"
            )
            Console().print(as_table([*data_rows(trainer), ("length", length)]))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begun, self._measured = trainer.global_step, False
        if not trainer.is_global_zero:
            return
        rows = (
            data_rows(trainer)
            + caption_rows(trainer, pl_module)
            + length_rows(trainer, pl_module)
            + weight_rows(trainer, pl_module)
        )
        Console().print(as_table(rows))
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(as_text(rows))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        device = trainer.strategy.root_device
        if not self._measured and trainer.global_step == self._begun and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)  # loading and sample pictures are not the question

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._measured or trainer.global_step == self._begun:
            return
        self._measured = True
        if not trainer.is_global_zero:
            return
        rows = [("peak memory", peak_memory(trainer.strategy.root_device))]
        Console().print(as_text(rows), end="", highlight=False, soft_wrap=True)
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(as_text(rows))


def peak_memory(device: torch.device) -> str:
    """The most memory that the first update took: on a GPU its tensors there, else this process with all that
    came before.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} of {total / 2**30:.2f} GiB on {device}"
    try:
        import resource
    except ImportError:  # Windows
        return "not to be measured here"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.2f} GiB of this process"


def as_table(rows: Rows) -> Table:
    table = Table(title="plan", box=box.SIMPLE, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def as_text(rows: Rows) -> str:
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {line}\n" for name, value in rows for line in value.split("\n"))


def data_rows(trainer: Trainer) -> Rows:
    """What the datamodule says of itself (`report(world_size)`: lines on sources, repeats, buckets), and the
    batch.
    """
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    report = getattr(datamodule, "report", None)
    rows: Rows = [("data", "\n".join(report(trainer.world_size)))] if callable(report) else []
    batch, accumulate, ranks = (
        getattr(datamodule, "batch_size", None),
        trainer.accumulate_grad_batches,
        trainer.world_size,
    )
    if batch is not None:
        total = batch * accumulate * ranks
        rows.append(
            (
                "batch",
                f"{batch} images x {accumulate} accumulated x {ranks} ranks = {total} images per update",
            )
        )
    return rows


def caption_rows(trainer: Trainer, module: LightningModule) -> Rows:
    """A line on captions that the module's text encoder will cut, if it does."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
    captions, report = getattr(datamodule, "captions", None), getattr(module, "caption_report", None)
    line = report(captions()) if callable(captions) and callable(report) else None
    return [("captions", line)] if line else []


def length_rows(trainer: Trainer, module: LightningModule) -> Rows:
    """Updates, epochs, warm-up and precision."""
    updates = trainer.estimated_stepping_batches
    batches = trainer.num_training_batches
    per_epoch = "?" if batches == float("inf") else str(-(-int(batches) // trainer.accumulate_grad_batches))
    begun = f", {trainer.global_step} of them done" if trainer.global_step else ""
    maker: Any = getattr(module, "make_scheduler", None)
    warmup = getattr(maker, "keywords", {}).get("warmup", 0)
    name = getattr(getattr(maker, "func", maker), "__name__", "constant") if maker else "constant"
    return [
        ("updates", f"{updates}{begun}; {per_epoch} in an epoch"),
        ("schedule", f"{name}, warm-up over {warmup} updates"),
        ("precision", f"{trainer.precision} on {trainer.strategy.root_device}"),
    ]


def weight_rows(trainer: Trainer, module: LightningModule) -> Rows:
    """Each group with its size and base rate, and the memory that all of it needs before activations."""
    rows: Rows = []
    trained = 0
    for group in trainer.optimizers[0].param_groups:
        count = sum(p.numel() for p in group["params"])
        trained += count
        rate = group.get("initial_lr", group["lr"])
        rows.append((f"trains {group.get('name', '')}".strip(), f"{count:,} parameters at lr {rate:g}"))
    frozen = [p for p in module.parameters() if not p.requires_grad]
    rows.append(("frozen", f"{sum(p.numel() for p in frozen):,} parameters"))
    averaged = any(isinstance(callback, EMA) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    rows.append(("memory", _memory(trainer, trained, frozen, averaged)))
    return rows


def _memory(trainer: Trainer, trained: int, frozen: list[Any], averaged: bool) -> str:
    """Weights and gradients in fp32, what the optimizer keeps (two moments for Adam's kin), the average."""
    moments = (
        2
        if "betas" in trainer.optimizers[0].defaults
        else 1
        if trainer.optimizers[0].defaults.get("momentum")
        else 0
    )
    size = torch.finfo(torch.float32).bits // 8
    need = trained * size * (2 + moments + averaged) + sum(p.numel() * p.element_size() for p in frozen)
    kept = "weights, gradients, optimizer" + (" and average" if averaged else "")
    return f"{need / 2**30:.2f} GiB for {kept}; activations come on top, measured in the first update"
