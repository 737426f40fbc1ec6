"""The one place where config becomes objects: a training run, or what a checkpoint needs to be used again.

`train` is what `train.py` calls; `rebuild` gives module and config back from a checkpoint alone.
"""

import signal
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from lit_sd.allocator import keep_freed_memory
from lit_sd.caching import connect
from lit_sd.callbacks import Interrupted, Plan
from lit_sd.closing import closing
from lit_sd.config import MANY, TASK_PARTS, ConfigError, check
from lit_sd.data import chelsea
from lit_sd.places import launch_folder
from lit_sd.prior import make_prior_images
from lit_sd.processes import own_ranks
from lit_sd.quiet import quieten_lightning
from lit_sd.settled import settle
from lit_sd.trainable import read_checkpoint, restore
from lit_sd.trust import foreign


@dataclass
class Run:
    """What trains, what it trains on, what drives it, and the settled config of it all."""

    module: LightningModule
    datamodule: LightningDataModule
    trainer: Trainer
    cfg: DictConfig


def train(cfg: DictConfig) -> dict[str, float]:
    """One training run, from the composed config. Returns the last logged metrics.

    Raises:
        ConfigError: the config has faults.
    """
    return fit(prepare(cfg))


def prepare(cfg: DictConfig) -> Run:
    """A run at its start. What is wrong with the user's input shows here, in ValueError, OSError or
    ImportError.
    """
    cfg = settle(cfg)
    prepare_process()
    if cfg.ckpt:
        refuse_finished(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    return build(cfg)


def fit(run: Run) -> dict[str, float]:
    """Trains to the end. Returns the last logged metrics.

    Raises:
        Interrupted: a signal came.
    """
    with own_ranks(run.cfg):
        try:
            run.trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=run.cfg.ckpt, weights_only=True)
        except SystemExit as stop:
            if run.trainer.interrupted and not isinstance(stop, Interrupted):
                raise Interrupted(signal.SIGINT) from None  # before training, where Lightning exits with 1
            raise
        if run.trainer.is_global_zero:
            print(closing(run.cfg, run.trainer.global_step, can_draw=hasattr(run.module, "sample")))
        return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def refuse_finished(cfg: DictConfig) -> None:
    """Raises ConfigError where the checkpoint to resume has all the updates that the run asks for."""
    done = read_checkpoint(cfg.ckpt, mapped=True).get("global_step", 0)
    wanted = OmegaConf.select(cfg, "trainer.max_steps")
    if wanted is not None and 0 < wanted <= done:
        raise ConfigError(
            [
                f"ckpt={cfg.ckpt}: it has {done} updates behind it, so with trainer.max_steps={wanted} "
                "nothing is left to do; set trainer.max_steps to more"
            ]
        )


def prepare_process() -> None:
    """What any use of a model wants of its process: few messages, and fast memory where it runs on the
    CPU.
    """
    quieten_lightning()
    if not torch.accelerator.is_available():
        keep_freed_memory()


def build(cfg: DictConfig) -> Run:
    """Objects from a settled config: the model last, since what is wrong elsewhere should be told before."""
    if isinstance(root := OmegaConf.select(cfg, "data.root"), str):
        chelsea.write_if_default(root, launch_folder())
    datamodule = make(cfg.data)
    if hasattr(datamodule, "check"):
        datamodule.check()
    callbacks, loggers = (
        [make(node) for node in (cfg.get(name) or {}).values() if node is not None] for name in MANY
    )
    options: dict[str, Any] = {"callbacks": callbacks, "logger": loggers or False}
    if "enable_checkpointing" not in cfg.trainer:  # else Lightning adds one of its own where there is none
        options["enable_checkpointing"] = any(isinstance(callback, Checkpoint) for callback in callbacks)
    trainer = make(cfg.trainer, **options)
    module = build_module(cfg)
    if hasattr(datamodule, "prior_requests") and hasattr(module, "sample"):
        datamodule.before_setup = partial(make_prior, datamodule, module, trainer)
    connect(datamodule, module, trainer)
    return Run(module, datamodule, trainer, cfg)


def make(node: DictConfig, **parts: Any) -> Any:
    """The object of a `_target_`, given plain dicts and lists and the ready-made parts."""
    try:
        if not parts:
            return instantiate(node, _convert_="all")
        # Not as arguments of `instantiate`: that would turn a part that is a dataclass into a dict.
        return instantiate(node, _partial_=True, _convert_="all")(**parts)
    except (InstantiationException, MisconfigurationException) as error:
        cause = error.__cause__ or error  # what went wrong, and not that Hydra was there
        raise (ValueError(str(cause)) if isinstance(cause, MisconfigurationException) else cause) from None


def build_module(cfg: DictConfig) -> Any:
    """The task's module, with those groups that are there, holding the config that its checkpoints will
    carry.
    """
    chosen = [name for name in TASK_PARTS if cfg.get(name) is not None]
    parts = {name: make(cfg[name]) for name in reversed(chosen)}  # the model last: the others fail in no time
    module = make(cfg.task, **parts)
    module.config = OmegaConf.to_container(cfg, resolve=True)
    return module


def make_prior(datamodule: Any, module: Any, trainer: Trainer) -> None:
    """Class images that are still missing, drawn by the base model on all ranks; the plan's first lines come
    before the first of them.
    """
    options = dict(getattr(datamodule, "prior_sampling", None) or {})
    at_once = options.setdefault("batch_size", 4)
    shaping = {"prediction": module.schedule.prediction, **options}
    del shaping["batch_size"]  # the pictures do not depend on it
    drawn_by = " ".join(
        [str(module.base_identity()), *(f"{name}={shaping[name]}" for name in sorted(shaping))]
    )
    plans = [callback for callback in trainer.callbacks if isinstance(callback, Plan)]  # type: ignore[attr-defined]

    def draw(prompts: list[str], seeds: list[int]) -> list[Image.Image]:
        while plans:
            plans.pop().announce(trainer)
        return module.sample(prompts, seeds, **options)

    for request in datamodule.prior_requests():
        module.to(trainer.strategy.root_device)
        with trainer.precision_plugin.forward_context():
            make_prior_images(
                draw,
                request.folder,
                request.prompt,
                request.count,
                drawn_by,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                batch_size=at_once,
            )


@dataclass
class Rebuilt:
    """A module as a checkpoint left it, and the config that made it."""

    module: Any  # a Trainable; with `sample` where it draws
    cfg: DictConfig
    checkpoint: dict[str, Any]


def rebuild(
    path: str | Path, overrides: dict[str, Any] | None = None, averaged: bool = True, trust: bool = False
) -> Rebuilt:
    """Module and config from a checkpoint alone.

    Args:
        path: the checkpoint.
        overrides: nested config values that win over the stored ones.
        averaged: take the averaged weights where the run kept any.
        trust: let the stored config call anything, not only what `lit_sd.trust` lists.

    Raises:
        ConfigError: the checkpoint holds no config of this project, or it has faults, or names a foreign
            target.
        ValueError: its tensors or its base model are not those that the config builds.
    """
    checkpoint = read_checkpoint(path)
    stored = checkpoint.get("config")
    if not stored:
        raise ConfigError([f"ckpt={path}: it holds no config, so it is no checkpoint of this project"])
    cfg = OmegaConf.create(stored)
    assert isinstance(cfg, DictConfig)
    calls = [] if trust else foreign(OmegaConf.to_container(cfg, resolve=False))
    if calls:
        raise ConfigError(
            [
                f"ckpt={path}: its config would call {name}; if you trust its author, set trust=true"
                for name in calls
            ]
        )
    cfg = OmegaConf.merge(cfg, overrides or {})
    assert isinstance(cfg, DictConfig)
    check(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    module = build_module(cfg)
    restore(module, checkpoint, averaged)
    return Rebuilt(module.eval(), cfg, checkpoint)


def held_out(data: DictConfig, asked_for: bool) -> LightningDataModule | None:
    """A checkpoint's DataModule, or None with a message where its folders are not here.

    Args:
        data: its config.
        asked_for: whether the user named other data; then that they are not there is an error.
    """
    root, val_root = data.get("root"), data.get("val_root")
    if val_root and isinstance(root, str) and "://" not in root and not Path(root).exists():
        data = OmegaConf.merge(data, {"root": val_root})  # type: ignore[assignment]
    try:
        datamodule = make(data)
        if hasattr(datamodule, "check"):
            datamodule.check()
    except (FileNotFoundError, ValueError) as error:
        if asked_for:
            raise
        print(f"The held-out loss is left out, since the run's images are not to be had: {error}")
        return None
    return datamodule


def judging_trainer(trainer: DictConfig) -> Trainer:
    """A Trainer that neither logs nor saves."""
    return make(trainer, logger=False, callbacks=[], enable_checkpointing=False, enable_progress_bar=False)
