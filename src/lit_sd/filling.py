"""A cache on disk filled ahead of the runs that will read it: `lit-sd cache`, `lit-sd prepare --cache`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

from lit_sd.caching import prune_caches, requests_of
from lit_sd.command_line import check_command_line
from lit_sd.config import ConfigError
from lit_sd.data.caches.latent_cache import LatentCache
from lit_sd.data.caches.latent_shards import write_latent_shards
from lit_sd.places import conf_folder
from lit_sd.processes import own_ranks
from lit_sd.run import Run, prepare
from lit_sd.together import Together


class NoTraining(L.LightningModule):
    """What a trainer needs to start its processes and set up the data, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Linear(1, 1)

    def training_step(self, *_: Any) -> None:
        """Never called."""

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One that is never stepped."""
        return torch.optim.SGD(self.parameters())


def fill_from_words(words: Sequence[str], shards: Path | None = None, *, prune: bool = False) -> list[str]:
    """Fills the cache of the run that `train.py` would make of these words; see `fill`.

    Words that make no config end the process with all their faults and status 2.
    """
    words = checked(words)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        cfg = compose("train", overrides=words)
    return fill(cfg, shards, prune=prune)


def checked(words: Sequence[str]) -> list[str]:
    """The words as Hydra should get them; ends the process where they make no config."""
    return check_command_line(conf_folder(), "train", list(words))


def fill(cfg: DictConfig, shards: str | Path | None = None, *, prune: bool = False) -> list[str]:
    """Encodes what a training run would read from its cache on disk, on all its devices, and trains nothing.

    Args:
        cfg: composed from `train.py`'s own overrides; `data.cache` counts as disk.
        shards: a folder to come, for the latents as tar shards; see `lit_sd.data.caches.latent_shards`.
        prune: drop what the run doesn't ask for; nothing else may use the cache meanwhile.

    Returns:
        What was done, in lines; they are printed too.

    Raises:
        ConfigError: the config has faults, or its data has no cache.
        OSError: an image can't be read, or there is no room.
        ValueError: something can't be cached.
    """
    run = prepare(_without_training(cfg))
    data: Any = run.datamodule
    lines: list[str] = []
    data.fill_cache = partial(_filled, run, data.fill_cache, shards, prune, lines)
    with own_ranks(run.cfg):
        run.trainer.fit(NoTraining(), datamodule=data)
    if run.trainer.is_global_zero:
        print("\n".join(lines))
    return lines


def _filled(
    run: Run, fill_cache: Any, shards: str | Path | None, prune: bool, lines: list[str]
) -> LatentCache:
    latents: LatentCache = fill_cache()
    data: Any = run.datamodule
    lines += [*latents.notes, f"train with data.cache=disk data.cache_dir={data.cache.path}"]
    together = Together(run.trainer.global_rank, run.trainer.world_size)
    if shards is not None:
        requests = requests_of(data, run.trainer.world_size)
        lines.append(
            f"latents as shards: {write_latent_shards(latents, requests, shards, together=together)}"
        )
    if prune:
        lines.append(prune_caches(data, run.module, latents, together))
    return latents


def _without_training(cfg: DictConfig) -> DictConfig:
    if cfg.get("data") is None or "cache" not in cfg.data:
        raise ConfigError(["data.cache: this data has no cache; choose data=folder, lmdb, webdataset or hub"])
    cfg = cfg.copy()
    with open_dict(cfg):
        cfg.data.cache = "disk"
        cfg.ckpt = None
        cfg.callbacks = cfg.logger = None
        for option, value in {
            "max_steps": 0,
            "max_epochs": -1,
            "num_sanity_val_steps": 0,
            "strategy": "auto",
        }.items():
            cfg.trainer[option] = value
    return cfg
