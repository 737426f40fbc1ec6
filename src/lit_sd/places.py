"""Where what the user names lies."""

import os
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf

from lit_sd.config import ConfigError


def launch_folder() -> Path:
    """The folder that the user's relative paths count from."""
    return Path(get_original_cwd() if HydraConfig.initialized() else os.getcwd())


def conf_folder() -> Path:
    """The project's `conf`: in the folder that the command was started in, else where this package lies.

    Raises:
        FileNotFoundError: it is in neither.
    """
    for root in (launch_folder(), Path(__file__).resolve().parents[2]):
        if (root / "conf" / "train.yaml").is_file():
            return root / "conf"
    raise FileNotFoundError(
        f"no conf/train.yaml in {launch_folder()}; start the command in the project's folder"
    )


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


def missing_checkpoint(cfg: DictConfig) -> list[str]:
    """What is wrong with the file or folder that `ckpt=` names, where it names one."""
    if OmegaConf.is_missing(cfg, "ckpt") or not isinstance(cfg.get("ckpt"), str) or not cfg.ckpt:
        return []
    try:
        checkpoint_in(Path(cfg.ckpt).expanduser())
    except ConfigError as error:
        return error.faults
    return []


def is_job_of_sweep() -> bool:
    """Whether other jobs come before or after this one."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
