"""Tiny training runs on the CPU, shared by the tests of module, callbacks and resuming."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
import yaml
from PIL import Image
from torch.optim import AdamW

from lit_sd import schedules
from lit_sd.adapters.base import Adapter
from lit_sd.callbacks import EMA, Checkpoints, Samples
from lit_sd.data.builders import folder as image_folders
from lit_sd.data.caption_rules import CaptionRule
from lit_sd.module import StableDiffusionModule
from lit_sd.objectives import Objective

CONF = Path(__file__).resolve().parents[1] / "conf"


class FewWeights(Adapter):
    """Opens two small tensors of the UNet, and leaves a fresh dropout in the way, so that the global stream
    matters.
    """

    def attach(self, model: Any) -> None:
        model.unet.conv_out.requires_grad_(True)
        model.unet.conv_out.register_forward_pre_hook(
            lambda module, args: (torch.nn.functional.dropout(args[0], 0.1, module.training),)
        )

    def export(self, model: Any, folder: Path) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(dict(model.unet.conv_out.named_parameters()), folder / "conv_out.pt")
        return [folder / "conv_out.pt"]


def write_images(path: Path, count: int, size: int = 32) -> Path:
    """Seeded noise pictures with captions beside them."""
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(count)
    for i in range(count):
        Image.fromarray(rng.integers(0, 255, (size, size, 3), np.uint8)).save(path / f"{i:02d}.png")
        (path / f"{i:02d}.txt").write_text(f"picture number {i}")
    return path


def shipped(kind: str = "folder") -> dict[str, Any]:
    """What conf/data has for a kind, ready to be handed to its builder."""
    own, common = (
        yaml.safe_load((CONF / "data" / f"{name}.yaml").read_text()) for name in (kind, "options/images")
    )
    rest = {key: value for key, value in {**common, **own}.items() if key not in ("_target_", "defaults")}
    return {**rest, "rule": CaptionRule(), "seed": 0}


def images(root: Path, **options: Any) -> Any:
    small = {"root": root, "batch_size": 1, "resolution": 32, "num_workers": 0, "decoded_mb": 16.0, "seed": 0}
    return image_folders(**{**shipped(), **small, **options})


def module_of(model: Any, adapter: Adapter | None = None, **options: Any) -> StableDiffusionModule:
    defaults = {
        "objective": Objective(),
        "optimizer": partial(AdamW, lr=1e-3),
        "scheduler": partial(schedules.linear, warmup=2),
        "seed": 3,
    }
    return StableDiffusionModule(model, adapter or FewWeights(), **{**defaults, **options})


def trainer_of(folder: Path, *callbacks: Any, **options: Any) -> lightning.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": bool(options.pop("checkpointing", False)),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "check_val_every_n_epoch": None,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return lightning.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def saver_of(folder: Path, **options: Any) -> Checkpoints:
    return Checkpoints(
        folder, **{"every_n_steps": 500, "keep": 1, "monitor": "val/loss", "mode": "min", **options}
    )


def ema_of(decay: float, **options: Any) -> EMA:
    return EMA(decay, **{"warmup": True, "every_n_updates": 1, **options})


def samples_of(folder: Path, prompts: Any = (), seeds: Any = (0, 1, 2, 3), **options: Any) -> Samples:
    defaults = {
        "every_n_steps": 500,
        "at_start": False,
        "negative": "",
        "steps": 25,
        "guidance": 7.5,
        "height": None,
        "width": None,
        "batch_size": 4,
    }
    return Samples(folder, prompts=prompts, seeds=seeds, **{**defaults, **options})


def trained(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def everything(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same(a: Any, b: Any, at: str = "state") -> None:
    """Bit equality of nested containers."""
    assert type(a) is type(b), f"{at}: {type(a)} is not {type(b)}"
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), f"{at} differs by {(a.double() - b.double()).abs().max()}"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{at}: {a.keys()} is not {b.keys()}"
        for key in a:
            assert_same(a[key], b[key], f"{at}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), f"{at}: {len(a)} is not {len(b)} long"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{at}[{i}]")
    else:
        assert a == b, f"{at}: {a} is not {b}"


class Snapshots(lightning.Callback):
    """After each optimizer update: weights, optimizer, rates, what was drawn."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, Any]] = {}
        self.seen: list[list[str]] = []
        self.draws: list[tuple[int, ...]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(batch["ids"])
        self.draws.append(tuple(pl_module.record.timesteps.tolist()))
        self.steps[trainer.global_step] = {
            "weights": trained(pl_module),
            "optimizer": copy.deepcopy(trainer.optimizers[0].state_dict()),
            "rng": torch.get_rng_state(),
            "seen": batch["pixels" if "pixels" in batch else "moments"].clone(),
        }
