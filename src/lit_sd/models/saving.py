"""A whole model on disk, in diffusers' layout or as a single file, as other programs read them."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from lit_sd.models.components import quiet
from lit_sd.models.families import TEXT_ENCODERS
from lit_sd.models.ldm import to_ldm
from lit_sd.models.stable_diffusion import StableDiffusion


def save_folder(model: StableDiffusion, folder: Path, dtype: torch.dtype | None = None) -> Path:
    """Write a diffusers folder. It is written aside and then put in place, so that a killed run leaves no
    half of one.

    Args:
        model: without injected matrices; those have their own export.
        folder: where; an older export there is replaced.
        dtype: of the weights; None keeps what is in memory.

    Raises:
        FileExistsError: there is something else than a model in the folder.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "model_index.json").is_file():
        raise FileExistsError(
            f"{folder} holds something that is no model, and is not overwritten; choose another folder"
        )
    with written_aside(folder) as aside:
        with quiet():
            model.pipeline().save_pretrained(aside)
        for path in sorted(aside.glob("*/*.safetensors")):
            _rewrite(path, dtype)
        forget_origin(aside)
    return folder


def forget_origin(folder: Path) -> None:
    """Take from a model's configs where its parts were loaded from: a path of this machine."""
    for path in sorted(folder.rglob("config.json")):
        settings = json.loads(path.read_text())
        if settings.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` to write to; it takes that one's place unless something is raised."""
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    yield aside
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def save_single_file(model: StableDiffusion, path: Path, dtype: torch.dtype | None = None) -> Path:
    """Write one `.safetensors` file in the layout of the family's original release."""
    tensors: dict[str, Tensor] = {}
    for name, part in model.components().items():
        tensors |= to_ldm(model.family, name, part, part.state_dict())
    cast = {k: v.detach().to(dtype or v.dtype).cpu().contiguous() for k, v in tensors.items()}
    prediction = model.noise_schedule().prediction
    metadata = {
        "format": "pt",
        "modelspec.prediction_type": "v" if prediction == "v_prediction" else prediction,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    safetensors.torch.save_file(cast, aside, metadata)
    os.replace(aside, path)
    return path


def _rewrite(path: Path, dtype: torch.dtype | None) -> None:
    """Cast a file's tensors, and give a text encoder's keys the `text_model.` that older transformers look
    for.
    """
    long_names = path.parent.name in TEXT_ENCODERS
    tensors = safetensors.torch.load_file(path)
    if dtype is None and not (long_names and not any(key.startswith("text_model.") for key in tensors)):
        return
    renamed = {}
    for key, tensor in tensors.items():
        bare = not long_names or key.startswith("text_model.") or key == "text_projection.weight"
        renamed[key if bare else f"text_model.{key}"] = (
            tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        )
    safetensors.torch.save_file(renamed, path, {"format": "pt"})
    config = path.parent / "config.json"
    if dtype is not None and long_names:
        settings = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(settings, indent=2) + "\n")
