"""Which family a model belongs to, told from its parts: nobody has to declare it."""

from collections.abc import Mapping
from typing import Any, Literal

Family = Literal["sd15", "sd21", "sdxl", "sdxl_refiner"]
TrainedComponent = Literal["unet", "text_encoder", "text_encoder_2"]
"""What an adapter may train, by diffusers' names."""
PartName = Literal["unet", "vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"]
"""What a pipeline has, by diffusers' names."""
TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
COMPONENTS = ("unet", "vae", *TEXT_ENCODERS)
"""The networks of a pipeline by diffusers' names; this order is used wherever they are listed."""


def recognise(unet: Mapping[str, Any], vae: Mapping[str, Any], text_encoders: set[str]) -> Family:
    """Family of a model, from its UNet's and VAE's configs and the names of its text encoders.

    SDXL's UNets take size ids (`addition_embed_type="text_time"`); the refiner has the second encoder alone.
    SD 2.x differs from SD 1.x by linear projections around its attention.

    Raises:
        ValueError: the UNet takes more than noisy latents (inpainting, instruct-pix2pix, upscalers), or parts
            are missing.
    """
    latent, taken = vae.get("latent_channels", 4), unet.get("in_channels", 4)
    if taken != latent:
        raise ValueError(
            f"this UNet takes {taken} channels where the VAE's latents have {latent}: it is an inpainting, "
            "image-editing or upscaling model. lit-sd trains text-to-image models; point model.path at the "
            "base it was made from"
        )
    if unet.get("addition_embed_type") == "text_time":
        if text_encoders == {"text_encoder", "text_encoder_2"}:
            return "sdxl"
        if text_encoders == {"text_encoder_2"}:
            return "sdxl_refiner"
        raise ValueError(
            _wrong_encoders("SDXL", "text_encoder and text_encoder_2, or text_encoder_2 alone", text_encoders)
        )
    if text_encoders != {"text_encoder"}:
        raise ValueError(_wrong_encoders("SD 1.x or 2.x", "text_encoder alone", text_encoders))
    return "sd21" if unet.get("use_linear_projection") else "sd15"


def _wrong_encoders(kind: str, wanted: str, found: set[str]) -> str:
    return (
        f"the UNet is of {kind}, which needs {wanted}, but the model has {', '.join(sorted(found)) or 'none'}"
    )
