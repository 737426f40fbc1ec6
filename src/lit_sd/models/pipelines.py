"""The diffusers pipeline of each family, put together from parts that are there already."""

from collections.abc import Mapping
from typing import Any

from diffusers import StableDiffusionPipeline, StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

from lit_sd.models.families import Family

PIPELINE_OPTIONS: dict[Family, tuple[str, ...]] = {
    "sd15": (),
    "sd21": (),
    "sdxl": ("force_zeros_for_empty_prompt",),
    "sdxl_refiner": ("force_zeros_for_empty_prompt", "requires_aesthetics_score"),
}
"""Settings in `model_index.json` that change what a family's pipeline computes."""


def pipeline_options(family: Family, index: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of a `model_index.json`'s entries that change what the family's pipeline computes."""
    return {key: value for key, value in (index or {}).items() if key in PIPELINE_OPTIONS[family]}


def pipeline_of(family: Family, parts: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """The family's pipeline around these parts, by diffusers' names; a part that the family lacks is None."""
    common = {name: parts[name] for name in ("unet", "vae", "text_encoder", "tokenizer", "scheduler")}
    if family in ("sd15", "sd21"):
        no_checker = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        return StableDiffusionPipeline(**common, **no_checker)
    cls = StableDiffusionXLPipeline if family == "sdxl" else StableDiffusionXLImg2ImgPipeline
    second = {name: parts[name] for name in ("text_encoder_2", "tokenizer_2")}
    return cls(**common, **second, **options, add_watermarker=False)
