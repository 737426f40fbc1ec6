"""The config of one run settled: checked, every interpolation resolved, every path absolute."""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write

from lit_sd.config import ConfigError, check
from lit_sd.models.architectures import EMBEDDED, SHIPPED
from lit_sd.models.native import native_size
from lit_sd.places import checkpoint_in, is_job_of_sweep, launch_folder
from lit_sd.processes import refuse_folders_of_their_own

LOADER = "lit_sd.models.loading.load"
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
