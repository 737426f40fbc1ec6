"""Models of a given shape with random weights, from configs that ship with the package: real sizes without a
network.
"""

import json
from collections.abc import Set
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPTextConfig

from lit_sd.models.components import TOKENIZERS, component_class, part_names
from lit_sd.models.families import COMPONENTS, TEXT_ENCODERS
from lit_sd.models.tokenizer import clip_tokenizer

ARCHITECTURES = ("sd15", "sd21", "sdxl", "sdxl_refiner")
"""Shapes of the public models, one for each family."""
EMBEDDED = "openmoji"
"""The base that ships with its weights, as `model.path` and `model.architecture` name it."""
SHIPPED = (*ARCHITECTURES, EMBEDDED)
"""All shapes that ship. A folder of such a name is written with a slash, as `./sdxl`."""


def architecture_folder(name: str) -> Path:
    """Folder of a shipped architecture, or the folder that was named: configs in diffusers' layout, without
    weights.

    Raises:
        FileNotFoundError: it is neither a shipped name nor a folder with a `model_index.json`.
    """
    shipped = Path(str(files("lit_sd").joinpath("assets/architectures")))
    folder = shipped / name if name in SHIPPED else Path(name)
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"model.architecture={name}: expected one of {', '.join(sorted(SHIPPED))}, or a folder with a "
            "model_index.json"
        )
    return folder


def config_of(folder: Path, part: str | None = None) -> dict[str, Any]:
    """The config of a part, or of the pipeline (`model_index.json`)."""
    if part is None:
        return json.loads((folder / "model_index.json").read_text())
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    return json.loads((folder / part / name).read_text())


def build_random(folder: Path, seed: int, without: Set[str] = frozenset()) -> dict[str, Any]:
    """All parts of an architecture, drawn from `seed`; the global random stream stays where it was.

    Args:
        folder: configs in diffusers' layout.
        seed: of all weights. Each part has its own stream, so leaving some out does not change the others.
        without: parts that will come from elsewhere.
    """
    index = config_of(folder)
    names = [name for name in part_names(index) if name not in without]
    parts = {}
    with torch.random.fork_rng(devices=[]):
        for number, name in enumerate((*COMPONENTS, "scheduler", *TOKENIZERS)):
            if name in names:
                torch.manual_seed(seed + 1000 * number)
                parts[name] = build_part(folder, name, index[name])
    return parts


def build_part(folder: Path, name: str, entry: Any) -> Any:
    """One part of an architecture with fresh weights, in the default random stream and on the default
    device.
    """
    cls: Any = component_class(name, entry)
    if name in TOKENIZERS:
        return build_tokenizer(folder, name)
    config = config_of(folder, name)
    if name in TEXT_ENCODERS:
        return cls(CLIPTextConfig(**config))
    return cls.from_config(config)


def build_tokenizer(folder: Path, name: str) -> Any:
    """The tokenizer in the folder, or CLIP's own cut to the size of the text encoder's vocabulary."""
    if (folder / name / "tokenizer_config.json").is_file() and any((folder / name).glob("tokenizer.json")):
        return component_class(name).from_pretrained(folder / name)  # type: ignore[attr-defined]
    encoder = config_of(folder, name.replace("tokenizer", "text_encoder"))
    settings = folder / name / "tokenizer_config.json"
    pad = json.loads(settings.read_text()).get("pad_token") if settings.is_file() else None
    return clip_tokenizer(encoder["vocab_size"] - 514, **{"pad_token": pad} if pad else {})
