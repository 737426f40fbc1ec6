"""What a training run prints last: where its results lie, and what to try next."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lit_sd.places import is_job_of_sweep


def closing(cfg: DictConfig, updates: int, can_draw: bool) -> str:
    """Places of pictures, checkpoint and export, and three commands, but in a sweep.

    Args:
        cfg: the settled config.
        updates: optimizer updates that the run has behind it.
        can_draw: whether the module makes pictures from prompts.
    """
    run = Path(cfg.paths.output_dir)
    places = {
        "pictures": folder_of(cfg, "samples"),
        "checkpoint": last_checkpoint(cfg),
        "export": folder_of(cfg, "export"),
    }
    lines = [f"Done after {updates} updates."]
    lines += [
        f"  {name:<12}{shown(path)}" for name, path in places.items() if path is not None and path.exists()
    ]
    if not is_job_of_sweep():
        commands = next_commands(cfg, run, places["checkpoint"], can_draw)
        lines += ["Next:", *(f"  {command}" for command in commands)] if commands else []
    return "\n".join(lines)


def folder_of(cfg: DictConfig, callback: str) -> Path | None:
    """The folder that a callback writes to, if it is among the run's."""
    folder: Any = OmegaConf.select(cfg, f"callbacks.{callback}.folder")
    return Path(folder) if folder else None


def last_checkpoint(cfg: DictConfig) -> Path | None:
    """`last.ckpt` of the run."""
    folder = folder_of(cfg, "checkpoint")
    return folder / "last.ckpt" if folder else None


def next_commands(cfg: DictConfig, run: Path, checkpoint: Path | None, can_draw: bool) -> list[str]:
    """Draw, evaluate, train on one's own photos; without checkpoint or pictures, what is left of these."""
    python, script = program("python"), program("lit-sd")
    commands = []
    if can_draw and checkpoint is not None:
        prompt = f"{subject(cfg)}, in the snow"
        commands.append(f"{script} generate --run {shlex.quote(shown(run))} --prompt {shlex.quote(prompt)}")
    if checkpoint is not None:
        commands.append(f"{python} evaluate.py ckpt={shlex.quote(shown(checkpoint))}")
    bare = [word.lstrip("+") for word in overrides()]
    words = {word.partition("=")[0]: word for word in bare}  # the last one counts
    own_photos = "data.root" in words
    for of_this_run in ("ckpt", "paths.output_dir"):
        words.pop(of_this_run, None)
    if can_draw and "root" in cfg.data and not own_photos:
        words["data.root"] = "data.root=FOLDER_OF_YOUR_PHOTOS"
    elif checkpoint is not None:
        words |= {"ckpt": f"ckpt={shown(checkpoint)}", "trainer.max_steps": "trainer.max_steps=MORE"}
    else:
        return commands
    commands.append(" ".join([python, "train.py", *map(shlex.quote, words.values())]))
    return commands


def subject(cfg: DictConfig) -> str:
    """A prompt that the run has learned: the one for all its photos, or the first of its samples."""
    prompts = OmegaConf.select(cfg, "callbacks.samples.prompts") or []
    return OmegaConf.select(cfg, "data.prompt") or (prompts[0] if prompts else "a photo of a cat")


def overrides() -> list[str]:
    """The command line that started this job."""
    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def program(name: str) -> str:
    """How to call a program of this environment from the folder we are in: its bare name if that is the one
    found.
    """
    own = Path(sys.executable).parent / name
    found = shutil.which(name)
    if found and Path(found).absolute() == own:
        return name
    return shown(own) if own.exists() else name


def shown(path: Path) -> str:
    """The path as short as it can be written from here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
