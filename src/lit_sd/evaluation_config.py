"""`conf/evaluate.yaml` checked, together with the run's own config where that lies beside the checkpoint."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lit_sd.config import faults_in, own_faults, unknown_keys, value_faults
from lit_sd.signatures import signature_of

OVERRIDABLE = ("data", "model", "trainer")
"""Groups of the stored config that an evaluation may change."""


@dataclass
class Evaluation:
    """`conf/evaluate.yaml`. `sampling` is passed on to `lit_sd.generate.generate`; the others see there."""

    ckpt: str
    averaged: bool
    trust: bool
    prompts: list[str] | None
    seeds: list[int]
    sampling: dict
    data: dict
    model: dict
    trainer: dict


def evaluation_faults(cfg: DictConfig) -> list[str]:
    """All that is wrong with a composed evaluation config, as far as can be told without the checkpoint."""
    faults = own_faults(cfg, Evaluation, ())
    drawing = signature_of("lit_sd.generate.generate")
    if drawing is not None and isinstance(cfg.get("sampling"), DictConfig):
        known = drawing.parameters.keys() - {"model", "prompts", "seeds", "progress"}
        faults += unknown_keys(cfg.sampling, "sampling", known) + value_faults(
            cfg.sampling, "sampling", drawing
        )
    return faults + changes_faults(cfg)


def changes_faults(cfg: DictConfig) -> list[str]:
    """What the evaluation's changes would break in the run's config. Without that file beside the checkpoint
    it is told when the checkpoint has been read.
    """
    own = None if OmegaConf.is_missing(cfg, "ckpt") else config_beside(Path(str(cfg.ckpt)))
    changes = {name: cfg[name] for name in OVERRIDABLE if isinstance(cfg.get(name), DictConfig)}
    if own is None or not any(changes.values()):
        return []
    before, changed = faults_in(own), OmegaConf.merge(own, changes)
    assert isinstance(changed, DictConfig)
    return [fault for fault in faults_in(changed) if fault not in before]


def config_beside(ckpt: Path) -> DictConfig | None:
    """The `config.yaml` of a run, from its folder, its checkpoints' folder or one of these."""
    for folder in (ckpt, ckpt.parent, ckpt.parent.parent):
        try:
            found = OmegaConf.load(folder / "config.yaml")
        except (OSError, YAMLError, OmegaConfBaseException):
            continue
        if isinstance(found, DictConfig) and "task" in found:
            return found
    return None
