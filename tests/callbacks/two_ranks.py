"""One rank of `test_ranks.py`: a LoRA run to its end, then one that a single rank interrupts."""

import os
import signal
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning
import torch
from peft import LoraConfig
from tiny_runs import ema_of, images, module_of, samples_of, saver_of, trained, trainer_of
from torch.optim import AdamW

from lit_sd import schedules
from lit_sd.adapters.peft import Peft
from lit_sd.callbacks import (
    GradientCheck,
    InterruptHandler,
    Meters,
    NonFiniteCheck,
    NonFiniteError,
    checks,
)
from lit_sd.models.loading import load

PROMPTS, SEEDS = ["a cat", "a dog", "a bird"], [5]


def module(model_dir: str):
    targets = {"unet": ["to_q", "to_v"], "text_encoder": ["q_proj"]}
    lora = Peft({name: LoraConfig(r=2, target_modules=list(found)) for name, found in targets.items()})
    optimizer = partial(AdamW, lr=1e-3)
    return module_of(load(model_dir), lora, optimizer=optimizer, scheduler=schedules.linear)


class Watch(lightning.Callback):
    """Notes what this rank drew, and can send a signal to it."""

    def __init__(self, out: Path, kill_at: int | None = None) -> None:
        self.out, self.kill_at, self.notes = out, kill_at, {"timesteps": [], "ids": [], "lr": []}

    def on_train_start(self, trainer, pl_module):
        self.notes["first"] = trained(pl_module)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.kill_at and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.notes["timesteps"].append(pl_module.record.timesteps.tolist())
        self.notes["ids"].append(batch["ids"])
        self.notes["lr"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def save(self, trainer, pl_module, code=0):
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        ends = {"last": trained(pl_module), "steps": trainer.global_step, "metrics": metrics, "code": code}
        torch.save(self.notes | ends, self.out / f"rank{trainer.global_rank}.pt")


def run(model_dir: str, root: str, out: Path, kill_at: int | None = None) -> None:
    torch.manual_seed(int(os.environ["RANK"]))  # ranks that begin apart must not stay apart
    out.mkdir(parents=True, exist_ok=True)
    watch, model = Watch(out, kill_at), module(model_dir)
    callbacks = [
        GradientCheck(),
        InterruptHandler(),
        Meters(),
        ema_of(0.9),
        samples_of(out / "samples", PROMPTS, SEEDS, every_n_steps=0, at_start=True, steps=2, batch_size=1),
        watch,
        saver_of(out / "checkpoints", every_n_steps=2),
    ]
    options = {
        "devices": 2,
        "strategy": "ddp",
        "max_epochs": 2,
        "accumulate_grad_batches": 4,
        "checkpointing": True,
    }
    trainer = trainer_of(out, *callbacks, val_check_interval=2, **options)
    code = 0
    try:
        trainer.fit(model, images(root, val_share=0.23))
    except SystemExit as stop:
        code = int(stop.code or 0)
    watch.save(trainer, model, code)


class Breaks(lightning.Callback):
    """Makes one pixel of rank 1 infinite in the second update."""

    def __init__(self) -> None:
        self.bad = ""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1 and trainer.global_rank == 1:
            batch["pixels"][0, 0, 0, 0] = float("inf")
            self.bad = self.bad or batch["ids"][0]


def run_to_nan(model_dir: str, root: str, out: Path, deferred: bool) -> None:
    """Where looking waits, as on an accelerator, the losses of two steps are looked at together."""
    out.mkdir(parents=True, exist_ok=True)
    checks.must_wait = lambda loss: deferred
    watch, breaks, error = Watch(out), Breaks(), ""
    callbacks = [breaks, NonFiniteCheck(2), watch]
    trainer = trainer_of(out, *callbacks, devices=2, strategy="ddp", max_steps=4)
    model = module(model_dir)
    try:
        trainer.fit(model, images(root))
    except NonFiniteError as stop:
        error = str(stop)
    ends = {"steps": trainer.global_step, "error": error, "bad": breaks.bad}
    torch.save(watch.notes | ends, out / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    model_dir, root, out = sys.argv[1:]
    torch.set_num_threads(1)
    run(model_dir, root, Path(out) / "whole")
    run(model_dir, root, Path(out) / "interrupted", kill_at=1)
    run_to_nan(model_dir, root, Path(out) / "nan", deferred=False)
    run_to_nan(model_dir, root, Path(out) / "nan_deferred", deferred=True)
