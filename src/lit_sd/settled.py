"""The config of one run settled: checked, every interpolation resolved, every path absolute."""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf, read_write

from lit_sd.config import ConfigError, check
from lit_sd.models.architectures import EMBEDDED, SHIPPED
from lit_sd.models.native import native_size
from lit_sd.places import checkpoint_in, is_job_of_sweep, launch_folder
from lit_sd.processes import refuse_folders_of_their_own

LOADER = "lit_sd.models.loading.load"
HUB = "lit_sd.data.builders.hub"
PATH_KEYS = (
    "ckpt",
    "data.root",
    "data.class_root",
    "data.val_root",
    "data.mask_root",
    "data.control_root",
    "data.cache_dir",
    "paths.log_dir",
    "paths.output_dir",
    "paths.sweep_dir",
)
"""Values that are paths, and are made absolute by the folder that the command was started in; those of
further sources, `data.sources.NAME.root`, too.
"""
SOURCE_PATHS = ("root", "mask_root", "control_root", "cache_dir")
MODEL_PATHS = {"model.path": (EMBEDDED,), "model.architecture": SHIPPED}
"""Values that are paths if something lies there, else names; with the names that ship, which are no paths."""


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
        if is_job_of_sweep():
            cfg.paths.output_dir = HydraConfig.get().runtime.output_dir
        parts = OmegaConf.select(cfg, "model.parts") or {}
        for key in (*MODEL_PATHS, *(f"model.parts.{name}" for name in parts)):
            value = OmegaConf.select(cfg, key)
            if value and value not in MODEL_PATHS.get(key, (EMBEDDED,)):
                OmegaConf.update(cfg, key, absolute(value, only_if_there=True))
        sources = OmegaConf.select(cfg, "data.sources") or {}
        further = [f"data.sources.{name}.{key}" for name in sources for key in SOURCE_PATHS]
        on_hub = OmegaConf.select(cfg, "data._target_") == HUB
        for key in (*PATH_KEYS, *further):
            if value := OmegaConf.select(cfg, key):
                hub = (on_hub and key in ("data.root", "data.val_root")) or key in hub_roots(sources)
                OmegaConf.update(cfg, key, absolute(value, only_if_there=hub))
        OmegaConf.resolve(cfg)  # last, so that what refers to a path is absolute too
    return cfg


def absolute(value: Any, only_if_there: bool = False) -> Any:
    """A path, or each of a list, counted from the launch folder. What is fetched (`s3://…`, `pipe:…`) is no
    path, nor, with `only_if_there`, what names nothing that lies there.
    """
    if isinstance(value, ListConfig):
        return [absolute(part, only_if_there) for part in value]
    if not isinstance(value, str) or not value or "://" in value or value.startswith("pipe:"):
        return value
    path = launch_folder() / Path(value).expanduser()
    return value if only_if_there and not path.exists() else str(path)


def hub_roots(sources: Any) -> set[str]:
    """Keys of the roots of those further sources that may be names on a hub."""
    hub = "lit_sd.data.hub.HubSource"
    return {
        f"data.sources.{name}.root"
        for name, node in sources.items()
        if isinstance(node, DictConfig) and node.get("_target_") == hub
    }


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
