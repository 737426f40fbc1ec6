"""The one place where config becomes objects: a training run, or what a checkpoint needs to be used again.

`train` is what `train.py` calls; `rebuild` gives module and config back from a checkpoint alone.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from omegaconf import DictConfig, OmegaConf, read_write
from PIL import Image

from lit_sd.allocator import keep_freed_memory
from lit_sd.callbacks import Plan
from lit_sd.closing import closing
from lit_sd.config import MANY, TASK_PARTS, ConfigError, check
from lit_sd.data import chelsea
from lit_sd.models.architectures import EMBEDDED, SHIPPED
from lit_sd.models.native import native_size
from lit_sd.places import checkpoint_in, launch_folder
from lit_sd.prior import make_prior_images
from lit_sd.processes import own_ranks, refuse_folders_of_their_own
from lit_sd.quiet import quieten_lightning
from lit_sd.trainable import read_checkpoint, restore
from lit_sd.trust import foreign

PATH_KEYS = (
    "ckpt",
    "data.root",
    "data.class_root",
    "data.val_root",
    "paths.log_dir",
    "paths.output_dir",
    "paths.sweep_dir",
)
"""Values that are paths, and are made absolute by the folder that the command was started in."""
MODEL_PATHS = {"model.path": (EMBEDDED,), "model.architecture": SHIPPED}
"""Values that are paths if something lies there, else names; with the names that ship, which are no paths."""
LOADER = "lit_sd.models.loading.load"


@dataclass
class Run:
    """What trains, what it trains on, and what drives it."""

    module: LightningModule
    datamodule: LightningDataModule
    trainer: Trainer


def train(cfg: DictConfig) -> dict[str, float]:
    """One training run, from the composed config. Returns the last logged metrics.

    Raises:
        ConfigError: the config has faults.
    """
    cfg = settle(cfg)
    prepare_process()
    seed_everything(cfg.seed, workers=True, verbose=False)
    run = build(cfg)
    with own_ranks(cfg):
        run.trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=cfg.ckpt, weights_only=True)
        if run.trainer.is_global_zero:
            print(closing(cfg, run.trainer.global_step, can_draw=hasattr(run.module, "sample")))
        return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


def prepare_process() -> None:
    """What any use of a model wants of its process: few messages, and fast memory where it runs on the
    CPU.
    """
    quieten_lightning()
    if not torch.accelerator.is_available():
        keep_freed_memory()


def settle(cfg: DictConfig) -> DictConfig:
    """The config checked, with every interpolation resolved and every path absolute.

    Raises:
        ConfigError: the config has faults, or `ckpt` leads to no checkpoint.
    """
    check(cfg)
    cfg = absolute_paths(cfg)
    with read_write(cfg):
        if cfg.ckpt is not None:
            cfg.ckpt = str(checkpoint_in(cfg.ckpt))
        if "resolution" in cfg.data and cfg.data.resolution is None:
            cfg.data.resolution = resolution_of(cfg.get("model"))
    return cfg


def absolute_paths(cfg: DictConfig) -> DictConfig:
    """A copy with interpolations resolved, a sweep's job in its own folder, and paths counted from the launch
    folder.

    Raises:
        ConfigError: several processes would each write to another folder.
    """
    refuse_folders_of_their_own(cfg)
    cfg = cfg.copy()
    with read_write(cfg):
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            cfg.paths.output_dir = HydraConfig.get().runtime.output_dir
        parts = OmegaConf.select(cfg, "model.parts") or {}
        for key in (*PATH_KEYS, *MODEL_PATHS, *(f"model.parts.{name}" for name in parts)):
            value = OmegaConf.select(cfg, key)
            if isinstance(value, str) and value:
                path = launch_folder() / Path(value).expanduser()
                named = value in MODEL_PATHS.get(key, (EMBEDDED,))
                if key in PATH_KEYS or (path.exists() and not named):
                    OmegaConf.update(cfg, key, str(path))
        OmegaConf.resolve(cfg)  # last, so that what refers to a path is absolute too
    return cfg


def resolution_of(model: DictConfig | None) -> int:
    """The model's own picture size, for `data.resolution=null`. Raises ConfigError where there is no such
    model.
    """
    if model is None or model.get("_target_") != LOADER:
        raise ConfigError(
            ["data.resolution: null is the model's own size; this model has none, so it needs a value"]
        )
    init = model.get("init", "pretrained")
    return native_size(
        model.get("path"), init, model.get("architecture"), model.get("parts"), model.get("revision")
    )


def build(cfg: DictConfig) -> Run:
    """Objects from a settled config: the model last, since what is wrong elsewhere should be told before."""
    chelsea.write_if_default(OmegaConf.select(cfg, "data.root"), launch_folder())
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
    return Run(module, datamodule, trainer)


def make(node: DictConfig, **parts: Any) -> Any:
    """The object of a `_target_`, given plain dicts and lists and the ready-made parts."""
    try:
        if not parts:
            return instantiate(node, _convert_="all")
        # Not as arguments of `instantiate`: that would turn a part that is a dataclass into a dict.
        return instantiate(node, _partial_=True, _convert_="all")(**parts)
    except InstantiationException as error:
        raise error.__cause__ or error from None  # what went wrong, and not that Hydra was there


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
    if val_root and root and not Path(root).exists():
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
