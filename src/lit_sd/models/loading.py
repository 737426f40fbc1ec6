"""Models from wherever they lie: a diffusers folder, a hub name, a single file, or an architecture with
random weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from diffusers import DiffusionPipeline

from lit_sd.models.architectures import EMBEDDED, SHIPPED, architecture_folder, build_random, config_of
from lit_sd.models.components import load_component, part_names
from lit_sd.models.families import COMPONENTS, PartName
from lit_sd.models.identity import hash_file, hash_files, hash_text, weights_read
from lit_sd.models.single_file import is_single_file, load_single_file
from lit_sd.models.stable_diffusion import StableDiffusion
from lit_sd.objectives import Prediction

Init = Literal["pretrained", "random"]
Dtype = Literal["float32", "bfloat16", "float16"]
SUFFIXES = (".safetensors", ".ckpt", ".pt", ".bin")


@dataclass
class Source:
    """What was read: a pipeline's parts and options by diffusers' names, and how to tell its identity."""

    parts: dict[str, Any]
    options: dict[str, Any]
    identity: str | Callable[[], str]


def load(
    path: str | None = None,
    init: Init = "pretrained",
    architecture: str | None = None,
    *,
    parts: Mapping[PartName, str | None] | None = None,
    prediction: Prediction | None = None,
    dtype: Dtype = "float32",
    gradient_checkpointing: bool = False,
    channels_last: bool = False,
    caption_chunks: int = 1,
    variant: str | None = None,
    revision: str | None = None,
    seed: int = 0,
) -> StableDiffusion:
    """Load or build a Stable Diffusion model, all frozen and in eval mode.

    Args:
        path: a folder in diffusers' layout, a single `.safetensors` or `.ckpt` file, a hub name `owner/name`,
            or `openmoji` for the base that this package ships.
        init: "pretrained" reads weights from `path`; "random" draws them for the shape of `architecture`,
            without a network.
        architecture: "sd15", "sd21", "sdxl", "sdxl_refiner", or a folder of configs in diffusers' layout. A
            single file is read as the shape of such a folder, where one is named, else as the shipped shape
            that it is recognised to have.
        parts: single components from elsewhere, as `{"vae": folder}`; a folder may be the component's own or
            a whole model's.
        prediction: what the UNet predicts, where the model's own scheduler config is wrong or missing (single
            files).
        dtype: of the frozen weights. The VAE is never float16. What trains is made float32 by its adapter.
        gradient_checkpointing: trade time for memory in UNet and text encoders.
        channels_last: memory format of UNet and VAE; often faster for convolutions.
        caption_chunks: windows of 75 tokens that a caption may use; 1 cuts it.
        variant: the hub's file variant, as "fp16".
        revision: the hub's branch, tag or commit.
        seed: of random weights; the global random stream is neither read nor moved.

    Raises:
        FileNotFoundError: nothing lies at `path`, or a part of it is missing.
        ValueError: an argument has no such choice, or the model is of no family that is trained here.
    """
    elsewhere: dict[str, str] = {name: where for name, where in (parts or {}).items() if where}
    _check(init, dtype, prediction, caption_chunks, set(elsewhere))
    if init == "random":
        source = _random(architecture, seed, elsewhere)
    else:
        source = _pretrained(path, architecture, elsewhere, variant, revision)
    _replace_parts(source, elsewhere, variant)
    model = StableDiffusion(source.parts, source.options, source.identity, caption_chunks)
    if prediction is not None:
        model.train_as(prediction)
    return _prepare(model, getattr(torch, dtype), gradient_checkpointing, channels_last)


def _check(init: str, dtype: str, prediction: str | None, caption_chunks: int, parts: set[str]) -> None:
    """Choices that the types name, for callers that no type checker sees."""
    for key, value, kind in (
        ("model.init", init, Init),
        ("model.dtype", dtype, Dtype),
        ("model.prediction", prediction, Prediction),
        *(("model.parts", name, PartName) for name in sorted(parts)),
    ):
        if value is not None and value not in (choices := get_args(kind)):
            raise ValueError(f"{key}={value!r}; expected one of {', '.join(choices)}")
    if caption_chunks < 1:
        raise ValueError(
            f"model.caption_chunks={caption_chunks}; expected 1 (captions are cut at 77 tokens) or more "
            "windows"
        )


def _prepare(
    model: StableDiffusion, dtype: torch.dtype, checkpointing: bool, channels_last: bool
) -> StableDiffusion:
    part: Any
    for name, part in model.components().items():
        wanted = torch.float32 if name == "vae" and dtype == torch.float16 else dtype
        if any(p.dtype != wanted for p in part.parameters()):
            part.to(wanted)
        if channels_last and name in ("unet", "vae"):
            part.to(memory_format=torch.channels_last)
    if checkpointing:
        enable_gradient_checkpointing(model)
    return model.eval()


def enable_gradient_checkpointing(model: StableDiffusion) -> None:
    """Checkpoint UNet and text encoders, in the form that needs no input with a gradient.

    The re-entrant form gives an adapter after frozen inputs no gradient at all. Text encoders checkpoint in
    train mode only, which adapters switch on for what they train.
    """
    part: Any
    for name, part in model.components().items():
        if name == "unet":
            part.enable_gradient_checkpointing()  # diffusers' own form is not re-entrant
        elif name != "vae":
            enable = (
                getattr(part, "activation_checkpointing_enable", None) or part.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False})


def _random(architecture: str | None, seed: int, elsewhere: Mapping[str, str]) -> Source:
    if architecture is None:
        raise ValueError(
            f"model.init=random needs model.architecture: a shipped one ({', '.join(SHIPPED)}) or a folder"
        )
    folder = architecture_folder(architecture)
    made = build_random(folder, seed, without=set(elsewhere))
    index = config_of(folder)
    identity = f"random-{hash_text(architecture_fingerprint(folder), str(seed))}"
    return Source(made, dict(index), identity)


def architecture_fingerprint(folder: Path) -> str:
    """All of an architecture's configs in one text, for its identity."""
    return "\n".join(f"{p.relative_to(folder)}:{p.read_text()}" for p in sorted(folder.rglob("*.json")))


def _pretrained(
    path: str | None,
    architecture: str | None,
    elsewhere: Mapping[str, str],
    variant: str | None,
    revision: str | None,
) -> Source:
    where = resolve(path)
    if is_single_file(where):
        parts, options = load_single_file(Path(where), architecture, skip=set(elsewhere))
        return Source(parts, options, partial(hash_file, Path(where)))
    index = read_index(where, revision)
    names = [name for name in part_names(index) if name not in elsewhere]
    parts = {
        name: load_component(where, name, index[name], variant=variant, revision=revision) for name in names
    }
    return Source(parts, index, partial(_folder_identity, where, variant, revision))


def resolve(path: str | None, key: str = "model.path") -> str:
    """A model's path, with `openmoji` made into its folder (a folder of that name here is `./openmoji`);
    `key` names the setting in messages.

    Raises:
        ValueError: no path was given.
        FileNotFoundError: it is plainly a local path, and nothing lies there; or the embedded base is not in
            this checkout.
    """
    if not path:
        raise ValueError(
            f"{key} is not set: expected a diffusers folder, a .safetensors or .ckpt file, or a hub name"
        )
    if path == EMBEDDED:
        folder = Path(str(files("lit_sd").joinpath("assets/openmoji")))
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError(
                f"{key}=openmoji: the embedded base is not in this checkout (expected model_index.json in "
                "src/lit_sd/assets/openmoji). Train it with experiment=openmoji_vae, then openmoji_clip and "
                "openmoji_unet, or name another model"
            )
        return str(folder)
    local = Path(path).expanduser()
    if local.exists():
        return str(local)
    plainly_local = local.is_absolute() or path.startswith(("./", "../", "~")) or local.suffix in SUFFIXES
    if plainly_local or path.count("/") != 1:
        raise FileNotFoundError(
            f"{key}={path}: nothing lies there. Expected a diffusers folder, a .safetensors or .ckpt file, "
            "or a hub name of the form owner/name"
        )
    return path


def read_index(where: str, revision: str | None) -> dict[str, Any]:
    """The `model_index.json` of a folder or hub model. Raises FileNotFoundError where none is to be had."""
    if Path(where).is_dir() and not (Path(where) / "model_index.json").is_file():
        raise FileNotFoundError(
            f"model.path={where}: the folder has no model_index.json, so it is no diffusers model. It holds "
            f"{', '.join(sorted(p.name for p in Path(where).iterdir())[:8]) or 'nothing'}"
        )
    try:
        return dict(DiffusionPipeline.load_config(where, revision=revision))
    except OSError as error:
        raise FileNotFoundError(
            f"model.path={where}: there is no such folder here, and the hub did not give a model of that "
            f"name ({error})"
        ) from error


def _folder_identity(where: str, variant: str | None, revision: str | None) -> str:
    folder = Path(where)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(where, revision=revision, local_files_only=True))
    return hash_files(folder, [path for name in COMPONENTS for path in weights_read(folder / name, variant)])


def place_of_part(name: str, path: str) -> tuple[str, str | None]:
    """Where a part from elsewhere lies: under its name in a whole model's folder, or in its own folder."""
    where = resolve(path, f"model.parts.{name}")
    return where, name if (Path(where) / name).is_dir() else None


def _replace_parts(source: Source, elsewhere: Mapping[str, str], variant: str | None) -> None:
    found = {}
    for name, path in elsewhere.items():
        where, inside = place_of_part(name, path)
        source.parts[name] = load_component(where, name, variant=variant, subfolder=inside)
        found[name] = Path(where, inside or "")
    if found:
        source.identity = partial(_joint_identity, source.identity, found, variant)


def _joint_identity(base: str | Callable[[], str], parts: Mapping[str, Path], variant: str | None) -> str:
    whole = base if isinstance(base, str) else base()
    return hash_text(whole, *(f"{name}:{_part_identity(p, variant)}" for name, p in parts.items()))


def _part_identity(folder: Path, variant: str | None) -> str:
    if not folder.is_dir():
        return str(folder)  # a hub name
    settings = [p for p in folder.iterdir() if p.suffix in (".json", ".txt") and ".index." not in p.name]
    return hash_files(folder, [*weights_read(folder, variant), *settings])
