"""The one place where config becomes objects: a training run, or what a checkpoint needs to be used again.

`train` is what `train.py` calls; `rebuild` gives module and config back from a checkpoint alone.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import get_original_cwd, instantiate
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf, read_write
from torch import distributed

from lit_sd.allocator import keep_freed_memory
from lit_sd.closing import closing
from lit_sd.config import MANY, TASK_PARTS, ConfigError, check
from lit_sd.data import chelsea
from lit_sd.models.native import native_size
from lit_sd.prior import make_prior_images
from lit_sd.quiet import quieten_lightning
from lit_sd.trainable import read_checkpoint, restore

log = logging.getLogger(__name__)

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
MODEL_PATHS = ("model.path", "model.architecture")
"""Values that are paths if something lies there, else names."""
LOADER = "lit_sd.models.loading.load"
TRUSTED = ("lit_sd.", "torch.optim.", "lightning.Trainer", "lightning.pytorch.")
"""What a checkpoint's config may call."""


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
    quieten_lightning()
    if not torch.accelerator.is_available():
        keep_freed_memory()
    seed_everything(cfg.seed, workers=True, verbose=False)
    run = build(cfg)
    with own_ranks(cfg):
        run.trainer.fit(run.module, datamodule=run.datamodule, ckpt_path=cfg.ckpt, weights_only=True)
        if run.trainer.is_global_zero:
            print(closing(cfg, run.trainer.global_step, can_draw=hasattr(run.module, "sample")))
        return {name: float(value) for name, value in run.trainer.callback_metrics.items()}


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
    """
    cfg = cfg.copy()
    with read_write(cfg):
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            cfg.paths.output_dir = HydraConfig.get().runtime.output_dir
        parts = OmegaConf.select(cfg, "model.parts") or {}
        for key in (*PATH_KEYS, *MODEL_PATHS, *(f"model.parts.{name}" for name in parts)):
            value = OmegaConf.select(cfg, key)
            if isinstance(value, str) and value:
                path = launch_folder() / Path(value).expanduser()
                if key in PATH_KEYS or path.exists():
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
    return native_size(model.get("path"), model.get("init", "pretrained"), model.get("architecture"))


def launch_folder() -> Path:
    """The folder that the user's relative paths count from."""
    return Path(get_original_cwd() if HydraConfig.initialized() else os.getcwd())


def checkpoint_in(path: str | Path) -> Path:
    """A checkpoint, from its file, its folder, or its run's folder (`last.ckpt` there).

    Raises:
        ConfigError: there is none.
    """
    path = Path(path)
    candidates = [path / "checkpoints" / "last.ckpt", path / "last.ckpt"]
    if path.is_file():
        return path
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if not path.is_dir():
        raise ConfigError(
            [f"ckpt={path}: there is no such file; expected a .ckpt file or the folder of a run"]
        )
    there = sorted(str(p.relative_to(path)) for p in path.rglob("*.ckpt"))
    what = f"it holds {', '.join(there)}; name one of them" if there else "it holds no checkpoint"
    raise ConfigError([f"ckpt={path}: no last.ckpt in this folder; {what}"])


def build(cfg: DictConfig) -> Run:
    """Objects from a settled config: data first, since a wrong folder should be told before a model loads."""
    chelsea.write_if_default(OmegaConf.select(cfg, "data.root"), launch_folder())
    datamodule = make(cfg.data)
    if hasattr(datamodule, "check"):
        datamodule.check()
    module = build_module(cfg)
    parts = {
        name: [make(node) for node in (cfg.get(name) or {}).values() if node is not None] for name in MANY
    }
    trainer = make(cfg.trainer, callbacks=parts["callbacks"], logger=parts["logger"] or False)
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
    """Class images that are still missing, drawn by the base model on all ranks."""
    options = dict(getattr(datamodule, "prior_sampling", None) or {})
    at_once = options.setdefault("batch_size", 4)
    drawn_by = " ".join(
        [str(module.base_identity()), *(f"{name}={options[name]}" for name in sorted(options))]
    )
    for request in datamodule.prior_requests():
        module.to(trainer.strategy.root_device)
        with trainer.precision_plugin.forward_context():
            make_prior_images(
                partial(module.sample, **options),
                request.folder,
                request.prompt,
                request.count,
                drawn_by,
                trainer.global_rank,
                trainer.world_size,
                batch_size=at_once,
            )


@contextmanager
def own_ranks(cfg: DictConfig) -> Iterator[None]:
    """Lets the ranks that Lightning starts read this job's config from its folder, and cleans up after it.

    They get this process's arguments; with `-m` each would run the whole sweep again. What Lightning leaves
    in the environment would make the sweep's next job wait for ranks that nobody starts.
    """
    folder = Path(cfg.paths.output_dir)
    if "LOCAL_RANK" in os.environ or not HydraConfig.initialized():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, folder / "config.yaml")
    hydra: Any = HydraConfig.instance().cfg
    with read_write(hydra.hydra.run):
        hydra.hydra.run.dir = str(folder)
    arguments, environment = sys.argv, dict(os.environ)
    sys.argv = [arguments[0], "-cp", str(folder), "-cn", "config"]
    try:
        yield
    finally:
        sys.argv = arguments
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
        for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
            if name in environment:
                os.environ[name] = environment[name]


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
        trust: let the stored config call anything, not this project's and Lightning's parts alone.

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
    foreign = sorted(target for target in targets(stored) if not target.startswith(TRUSTED))
    if foreign and not trust:
        raise ConfigError(
            [
                f"ckpt={path}: its config would call {name}; if you trust its author, set trust=true"
                for name in foreign
            ]
        )
    cfg = OmegaConf.merge(cfg, overrides or {})
    assert isinstance(cfg, DictConfig)
    check(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    module = build_module(cfg)
    restore(module, checkpoint, averaged)
    return Rebuilt(module.eval(), cfg, checkpoint)


def targets(node: Any) -> set[str]:
    """Every `_target_` in nested plain data."""
    if isinstance(node, dict):
        own = {str(node["_target_"])} if "_target_" in node else set()
        return own.union(*(targets(value) for value in node.values()))
    return set().union(*(targets(value) for value in node)) if isinstance(node, list) else set()
