"""Base models in one `.safetensors` or `.ckpt` file, read without a hub and without running pickled code."""

import json
import pickle
import struct
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import safetensors.torch
import torch
from accelerate import init_empty_weights
from torch import Tensor

from lit_sd.models.architectures import (
    ARCHITECTURES,
    architecture_folder,
    build_part,
    build_tokenizer,
    config_of,
)
from lit_sd.models.components import TOKENIZERS, part_names
from lit_sd.models.families import COMPONENTS, Family
from lit_sd.models.ldm import UNET, from_ldm

ENDINGS = (".safetensors", ".ckpt")
V_PREDICTION_NORM = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"


def is_single_file(path: str) -> bool:
    """Whether a path is one file. Raises ValueError where it is neither `.safetensors` nor `.ckpt`."""
    file = Path(path)
    if file.is_file() and file.suffix not in ENDINGS:
        raise ValueError(
            f"model.path={path}: expected a .safetensors or .ckpt file, or a folder in diffusers' layout"
        )
    return file.is_file()


def load_single_file(
    path: Path, architecture: str | None = None, skip: Set[str] = frozenset()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """All parts of a model, and its pipeline's options.

    The tokenizer is CLIP's own, which ships with this package. Names and shapes are checked one by one.

    Args:
        path: the file.
        architecture: a folder of configs, where the file's shape is none of the public ones.
        skip: parts that will come from elsewhere.

    Raises:
        ValueError: the file is of no known family, would run code when read, or lacks tensors.
    """
    checkpoint, metadata = read_tensors(path)
    family = recognise_file(checkpoint, path)
    folder = architecture_folder(_shape_of(family, architecture))
    index = config_of(folder)
    parts: dict[str, Any] = {}
    for name in part_names(index):
        if name in skip:
            continue
        if name in COMPONENTS:
            with init_empty_weights(include_buffers=False):
                part = build_part(folder, name, index[name])
            part.load_state_dict(from_ldm(family, name, part, checkpoint), strict=True, assign=True)
            parts[name] = part
        elif name in TOKENIZERS:
            parts[name] = build_tokenizer(folder, name)
        else:
            parts[name] = _scheduler(folder, index[name], family, checkpoint, metadata)
    return parts, dict(index)


def architecture_of_file(path: Path, architecture: str | None = None) -> str:
    """Which architecture a single file is read as, from its names and shapes; weights are not read.

    Args:
        path: the file.
        architecture: a folder of configs, which is used, or a shipped family, which the file knows better.

    Raises:
        ValueError: the file is of no known family.
    """
    if path.suffix == ".safetensors":
        with safetensors.safe_open(path, "pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        checkpoint = _old_names({key: torch.empty(shape, device="meta") for key, shape in shapes.items()})
    else:
        checkpoint, _ = read_tensors(path, mapped=True)
    return _shape_of(recognise_file(checkpoint, path), architecture)


def _shape_of(family: Family, architecture: str | None) -> str:
    """Config groups name a public shape, but the file says itself which of those it has."""
    return family if architecture is None or architecture in ARCHITECTURES else architecture


def read_tensors(path: Path, mapped: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file.

    Args:
        path: the file.
        mapped: leave a `.ckpt`'s weights on disk until they are used, where its format allows that.

    Raises:
        ValueError: reading it would run code.
    """
    if path.suffix == ".safetensors":
        return _old_names(safetensors.torch.load_file(path)), _metadata(path)
    try:
        mapped = mapped and is_zipfile(path)  # files from before torch 1.6 are none
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path.name} holds Python objects beside its tensors, and reading those would run code from the "
            "file: refused. Use the .safetensors of the same model, or convert it where you trust it"
        ) from error
    while isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}; expected a dict of tensors by name")
    return _old_names({k: v for k, v in content.items() if isinstance(v, Tensor)}), {}


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length)).get("__metadata__", {})


def _old_names(checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    """Files from before transformers 4.x leave out `text_model.`."""
    old = "cond_stage_model.transformer."
    return {
        f"{old}text_model.{k[len(old) :]}"
        if k.startswith((f"{old}embeddings", f"{old}encoder", f"{old}final"))
        else k: v
        for k, v in checkpoint.items()
    }


def recognise_file(checkpoint: Mapping[str, Tensor], path: Path) -> Family:
    """The family of a single file, from its text encoders' names or else the width of its cross-attention.

    Raises:
        ValueError: it holds no UNet in the single-file layout.
    """
    if not any(key.startswith(UNET) for key in checkpoint):
        kind = "a LoRA" if any("lora" in key for key in checkpoint) else "no Stable Diffusion base model"
        raise ValueError(
            f"{path.name} is {kind}: it has no tensors under {UNET} (it has e.g. "
            f"{next(iter(checkpoint), 'none')}). Expected a whole model in one file; a folder in diffusers' "
            "layout is loaded by naming the folder"
        )
    signs: dict[str, Family] = {
        "conditioner.embedders.1.": "sdxl",
        "conditioner.embedders.0.model.": "sdxl_refiner",
        "cond_stage_model.model.": "sd21",
        "cond_stage_model.transformer.": "sd15",
    }
    for prefix, family in signs.items():
        if any(key.startswith(prefix) for key in checkpoint):
            return family
    widths: dict[int, Family] = {768: "sd15", 1024: "sd21", 2048: "sdxl", 1280: "sdxl_refiner"}
    width = next((v.shape[1] for k, v in checkpoint.items() if k.endswith("attn2.to_k.weight")), 0)
    if width not in widths:
        raise ValueError(
            f"{path.name}: cross-attention of width {width} is of no family known here ({widths})"
        )
    return widths[width]


def _scheduler(
    folder: Path, entry: Any, family: Family, checkpoint: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Any:
    scheduler = build_part(folder, "scheduler", entry)
    found: dict[str, Any] = {"prediction_type": recognise_prediction(family, checkpoint, metadata)}
    if "ztsnr" in checkpoint:
        found |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return type(scheduler).from_config(scheduler.config, **found)


def recognise_prediction(
    family: Family, checkpoint: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> str:
    """What a single file's UNet predicts; `model.prediction` overrides it.

    In this order: the metadata's `modelspec.prediction_type`; the marker tensor `v_pred` of SDXL models; for
    SD 2.x the spread of one norm's bias, which is larger in v-models (as ComfyUI tells them apart); else
    epsilon.
    """
    declared = metadata.get("modelspec.prediction_type", "").lower()
    if declared in ("v", "v_prediction") or "v_pred" in checkpoint:
        return "v_prediction"
    if declared in ("epsilon", "eps"):
        return "epsilon"
    norm = checkpoint.get(V_PREDICTION_NORM)
    if family == "sd21" and norm is not None and norm.float().std() > 0.09:
        return "v_prediction"
    return "epsilon"
