"""One job on several processes: all of them read the same config and write to the same folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, read_write
from torch import distributed

from lit_sd.config import ConfigError
from lit_sd.places import is_job_of_sweep

INTERACTIVE = ("bash", "interactive")
"""Names of SLURM jobs in which a command is one process, however many tasks were asked for."""


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


def refuse_folders_of_their_own(cfg: DictConfig) -> None:
    """Raises ConfigError where each of several processes would name its folder by its own clock.

    Args:
        cfg: the config, not resolved yet.
    """
    name = "sweep_dir" if is_job_of_sweep() else "output_dir"
    written: Any = OmegaConf.to_container(cfg.paths, resolve=False)
    if "${now:" in written[name] and started_elsewhere(cfg):
        raise ConfigError(
            [
                f"paths.{name}: torchrun, SLURM and several nodes start processes that would each name a "
                f"folder by their own clock; give one for all: paths.{name}=FOLDER"
            ]
        )


def started_elsewhere(cfg: DictConfig) -> bool:
    """Whether this is one of several processes that Lightning did not start from a single one."""
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    slurm = tasks > 1 and os.environ.get("SLURM_JOB_NAME") not in INTERACTIVE
    nodes = OmegaConf.select(cfg, "trainer.num_nodes") or 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 or slurm or nodes > 1
