"""A checkpoint judged: held-out loss at fixed noise and timesteps, pictures from fixed prompts and seeds."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from omegaconf import DictConfig, ListConfig, OmegaConf
from PIL import Image
from torch import distributed

from lit_sd.evaluation_config import OVERRIDABLE
from lit_sd.places import checkpoint_in
from lit_sd.processes import own_ranks
from lit_sd.run import Rebuilt, held_out, judging_trainer, prepare_process, rebuild
from lit_sd.settled import absolute_paths

ONE_DEVICE = {"accelerator": "auto", "devices": 1, "num_nodes": 1, "strategy": "auto"}
"""What an evaluation runs on, however many devices the training had, unless it is told otherwise."""


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Judge a checkpoint, from `conf/evaluate.yaml`. Writes `metrics.json`, and pictures where the model
    draws.

    Returns:
        What the module's validation logs, and `step`, the optimizer updates that the checkpoint has behind
        it.

    Raises:
        ConfigError: there is no such checkpoint, or its config has faults.
    """
    prepare_process()
    cfg = absolute_paths(cfg)
    folder = Path(cfg.paths.output_dir)
    changes: dict[str, Any] = {name: OmegaConf.to_container(cfg[name]) for name in OVERRIDABLE}
    changes |= {"trainer": ONE_DEVICE | changes["trainer"], "paths": {"output_dir": str(folder)}}
    rebuilt = rebuild(checkpoint_in(cfg.ckpt), changes, averaged=cfg.averaged, trust=cfg.trust)
    datamodule = held_out(rebuilt.cfg.data, asked_for=bool(cfg.data))
    trainer = judging_trainer(rebuilt.cfg.trainer)
    folder.mkdir(parents=True, exist_ok=True)
    with own_ranks(cfg):
        if datamodule is not None:
            trainer.validate(rebuilt.module, datamodule=datamodule, verbose=False)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics["step"] = rebuilt.checkpoint["global_step"]
        pictures = (
            draw(cfg, rebuilt, trainer, folder / "samples") if hasattr(rebuilt.module, "sample") else []
        )
        if trainer.is_global_zero:
            report(folder, metrics, pictures)
    return metrics


def draw(cfg: DictConfig, rebuilt: Rebuilt, trainer: Trainer, folder: Path) -> list[Path]:
    """A picture for each prompt and seed, in files named by both; each rank that runs draws its share."""
    during = OmegaConf.select(rebuilt.cfg, "callbacks.samples.prompts")
    prompts = during if cfg.prompts is None else cfg.prompts
    pairs = [(prompt, seed) for prompt in plain_list(prompts) for seed in plain_list(cfg.seeds)]
    options = as_the_run_drew(rebuilt.cfg) | dict(cfg.sampling)
    # Not the trainer's world size: without validation it has started no other rank.
    ranks = distributed.is_available() and distributed.is_initialized()
    mine = pairs[distributed.get_rank() :: distributed.get_world_size()] if ranks else pairs
    rebuilt.module.to(trainer.strategy.root_device)
    with trainer.precision_plugin.forward_context():
        pictures = rebuilt.module.sample(*zip(*mine, strict=True), **options) if mine else []
    save(pictures, mine, folder, stems(prompt for prompt, _ in pairs))
    trainer.strategy.barrier("lit_sd.evaluation")
    return sorted(folder.glob("*.png"))


def draw_from_run(
    run: Path,
    prompts: Sequence[str],
    seeds: Sequence[int],
    options: dict[str, Any],
    out: Path | None = None,
    *,
    model: str | None = None,
    averaged: bool = True,
    trust: bool = False,
) -> list[Path]:
    """Pictures of prompts × seeds, from a run's checkpoint alone.

    Args:
        run: its folder, or a checkpoint.
        prompts: what to draw.
        seeds: one picture of each prompt for each.
        options: of `lit_sd.generate.generate`, over those that the run drew its samples with.
        out: folder for the pictures; None for `generated` in the run's folder.
        model: where the base model lies, if not where it was.
        averaged, trust: as `lit_sd.run.rebuild`.

    Raises:
        ConfigError: there is no checkpoint, or its config has faults.
        ValueError: the run's model does not draw pictures, or the base model is another one.
    """
    prepare_process()
    checkpoint = checkpoint_in(run)
    changes = {"model": {"path": model}} if model else None
    rebuilt = rebuild(checkpoint, changes, averaged=averaged, trust=trust)
    if not hasattr(rebuilt.module, "sample"):
        raise ValueError(
            f"{run}: its model ({type(rebuilt.module).__name__}) does not draw pictures from prompts"
        )
    rebuilt.module.to("cuda" if torch.cuda.is_available() else "cpu")
    pairs = [(prompt, seed) for prompt in prompts for seed in seeds]
    drawing = as_the_run_drew(rebuilt.cfg) | options
    pictures = rebuilt.module.sample(*zip(*pairs, strict=True), **drawing)
    folder = out or (run if run.is_dir() else checkpoint.parent.parent) / "generated"
    return save(pictures, pairs, folder, stems(prompts))


def as_the_run_drew(cfg: DictConfig) -> dict[str, Any]:
    """Options of `generate` that a run's samples were drawn with."""
    during: Any = OmegaConf.select(cfg, "callbacks.samples") or {}
    own = ("negative", "steps", "guidance", "height", "width", "batch_size")
    return {name: during[name] for name in own if name in during}


def plain_list(value: Any) -> list:
    """A config's list, or nothing, as a list."""
    return list(value) if isinstance(value, list | ListConfig) else []


def save(
    pictures: Sequence[Image.Image], pairs: Sequence[tuple[str, int]], folder: Path, names: dict[str, str]
) -> list[Path]:
    """Write pictures as `a-photo-of-sks-cat_0003.png`, by the prompt's name and the seed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture, (prompt, seed) in zip(pictures, pairs, strict=True):
        paths.append(folder / f"{names[prompt]}_{seed:04d}.png")
        picture.save(paths[-1])
    return paths


def stems(prompts: Iterable[str]) -> dict[str, str]:
    """A short file name for each prompt, another one for each: `cat`, `cat-2`."""
    names: dict[str, str] = {}
    for prompt in dict.fromkeys(prompts):
        tries = (slug(prompt) + (f"-{i}" if i > 1 else "") for i in count(1))
        names[prompt] = next(name for name in tries if name not in names.values())
    return names


def slug(text: str) -> str:
    """The text as a short file name."""
    return re.sub(r"\W+", "-", text).strip("-").lower()[:60] or "empty"


def report(folder: Path, metrics: dict[str, float], pictures: Sequence[Path]) -> None:
    """Write the metrics, and say what came out and where."""
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    if not any(name.startswith("val") for name in metrics):
        print("No validation images: data.val_root=FOLDER or data.val_share=0.1 gives some.")
    for name, value in sorted(metrics.items()):
        print(f"  {name:<24}{value:g}")
    print(f"  {'metrics':<24}{folder / 'metrics.json'}")
    if pictures:
        print(f"  {'pictures':<24}{pictures[0].parent} ({len(pictures)})")
