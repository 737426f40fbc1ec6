"""One component of a pipeline from its folder, without running any code that lies beside the weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import transformers
from transformers.utils import logging as transformers_logging

from lit_sd.models.families import COMPONENTS

TOKENIZERS = ("tokenizer", "tokenizer_2")
DEFAULT_CLASSES = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "tokenizer": "CLIPTokenizer",
    "tokenizer_2": "CLIPTokenizer",
}
ALLOWED = {
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "CLIPTokenizer",
    "CLIPTokenizerFast",
    "AutoencoderKL",
    "UNet2DConditionModel",
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars: they tear the trainer's own apart."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def part_names(index: Mapping[str, Any]) -> list[str]:
    """The parts that a `model_index.json` has, of those that are used here.

    Raises:
        ValueError: there is no unet, vae or scheduler among them.
    """
    used = (*COMPONENTS, *TOKENIZERS, "scheduler")
    found = [
        name for name in used if isinstance(index.get(name), list | tuple) and index[name][1] is not None
    ]
    if missing := [name for name in ("unet", "vae", "scheduler") if name not in found]:
        raise ValueError(
            f"this {index.get('_class_name', 'pipeline')} has no {', '.join(missing)}: expected a Stable "
            "Diffusion 1.x, 2.x or XL pipeline"
        )
    return found


def component_class(name: str, entry: Any = None) -> type:
    """The class of a component, from its entry in `model_index.json` or by its name.

    Raises:
        ValueError: the entry names a class that Stable Diffusion's families do not have.
    """
    wanted = entry[1] if entry else DEFAULT_CLASSES[name]
    if name == "scheduler":
        found = getattr(diffusers, wanted, None)
        if not (isinstance(found, type) and issubclass(found, diffusers.SchedulerMixin)):
            raise ValueError(f"scheduler: {wanted!r} is no scheduler of diffusers {diffusers.__version__}")
        return found
    if wanted not in ALLOWED:
        raise ValueError(f"{name}: {wanted!r} is not trained here; expected {DEFAULT_CLASSES[name]}")
    if "Tokenizer" in wanted:
        return transformers.CLIPTokenizer
    return getattr(transformers if wanted.startswith("CLIP") else diffusers, wanted)


def load_component(
    where: str,
    name: str,
    entry: Any = None,
    *,
    variant: str | None = None,
    revision: str | None = None,
    subfolder: str | None = "",
) -> Any:
    """Load one part from a folder or the hub.

    Args:
        where: the model's folder or hub name.
        name: diffusers' name of the part.
        entry: its entry in `model_index.json`, or None for the class that the name stands for.
        variant: file variant, as "fp16".
        revision: the hub's revision.
        subfolder: where in it; "" for the part's own name, None for `where` itself.

    Raises:
        FileNotFoundError: its files are missing or of another variant.
    """
    inside = {"subfolder": name if subfolder == "" else subfolder} if subfolder is not None else {}
    if name == "scheduler" and entry is None:
        config = diffusers.DDPMScheduler.load_config(where, **inside)
        entry = ("diffusers", config["_class_name"])
    cls: Any = component_class(name, entry)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if name in COMPONENTS and variant:
        options["variant"] = variant
    if Path(where).is_dir():
        options["local_files_only"] = True
    try:
        with quiet():
            return cls.from_pretrained(where, **inside, **options)
    except OSError as error:
        raise FileNotFoundError(f"{name} of {where} could not be read: {error}") from error
