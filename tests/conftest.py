# ruff: noqa: E402
"""Tiny pipelines of every family, made from random weights and saved in diffusers' layout. Nothing is
downloaded.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

from jaxtyping import install_import_hook

# Shapes are types: every function of the package is checked against its annotations while the tests run.
install_import_hook("lit_sd", "type_checks.check")

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from lit_sd.models.families import Family
from lit_sd.models.tokenizer import clip_tokenizer

FAMILIES = get_args(Family)


def tiny_text_encoder(cls=CLIPTextModel, act: str = "quick_gelu", layers: int = 2, width: int = 32):
    return cls(
        CLIPTextConfig(
            vocab_size=514,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            projection_dim=width,
            hidden_act=act,
            bos_token_id=512,
            eos_token_id=513,
            pad_token_id=513,
        )
    )


def tiny_vae(**config) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=[8, 8, 16, 16],
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        **config,
    )


def tiny_unet(**config) -> UNet2DConditionModel:
    defaults = {
        "sample_size": 8,
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "norm_num_groups": 8,
        "attention_head_dim": 2,
        "cross_attention_dim": 32,
    }
    return UNet2DConditionModel(**defaults | config)


def tiny_pipeline(family: str):
    """A random pipeline of a family, with all that tells the families apart."""
    torch.manual_seed(get_args(Family).index(family))
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
    ddim = betas | {"clip_sample": False, "set_alpha_to_one": False}
    size_ids = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    xl_unet = size_ids | {"use_linear_projection": True, "transformer_layers_per_block": (1, 2)}
    xl_vae = {"scaling_factor": 0.13025, "force_upcast": True}
    bang = "!"
    match family:
        case "sd15" | "sd21":
            v2 = family == "sd21"
            return StableDiffusionPipeline(
                unet=tiny_unet(**{"use_linear_projection": True, "attention_head_dim": (2, 4)} if v2 else {}),
                vae=tiny_vae(),
                text_encoder=tiny_text_encoder(act="gelu" if v2 else "quick_gelu"),
                tokenizer=clip_tokenizer(0, **{"pad_token": bang} if v2 else {}),
                scheduler=DDIMScheduler(**ddim, prediction_type="v_prediction" if v2 else "epsilon"),
                safety_checker=None,
                feature_extractor=None,
                requires_safety_checker=False,
            )
        case "sdxl":
            return StableDiffusionXLPipeline(
                unet=tiny_unet(
                    **xl_unet, cross_attention_dim=32 + 40, projection_class_embeddings_input_dim=40 + 6 * 8
                ),
                vae=tiny_vae(**xl_vae),
                text_encoder=tiny_text_encoder(),
                text_encoder_2=tiny_text_encoder(CLIPTextModelWithProjection, "gelu", 3, width=40),
                tokenizer=clip_tokenizer(0),
                tokenizer_2=clip_tokenizer(0, pad_token=bang),
                scheduler=EulerDiscreteScheduler(**betas, timestep_spacing="leading"),
                add_watermarker=False,
            )
        case "sdxl_refiner":
            return StableDiffusionXLImg2ImgPipeline(
                unet=tiny_unet(**xl_unet, projection_class_embeddings_input_dim=32 + 5 * 8),
                vae=tiny_vae(**xl_vae),
                text_encoder=None,
                text_encoder_2=tiny_text_encoder(CLIPTextModelWithProjection, "gelu", 3),
                tokenizer=None,
                tokenizer_2=clip_tokenizer(0, pad_token=bang),
                scheduler=EulerDiscreteScheduler(**betas, timestep_spacing="leading"),
                requires_aesthetics_score=True,
                force_zeros_for_empty_prompt=False,
                add_watermarker=False,
            )
    raise ValueError(f"no tiny pipeline of family {family!r}; there are {', '.join(FAMILIES)}")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Callable[[str], Path]:
    """`tiny_model_dir("sd15")` is a folder in diffusers' layout, written once per test session. Never write
    into it.
    """
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(f"tiny_{family}")
            rng = torch.get_rng_state()
            tiny_pipeline(family).save_pretrained(folder)
            torch.set_rng_state(rng)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    """Each family in turn."""
    return request.param


@pytest.fixture
def tiny_model(tiny_model_dir):
    """`tiny_model("sdxl", **load's arguments)` is a freshly loaded tiny model."""
    from lit_sd.models.loading import load

    return lambda family="sd15", **kwargs: load(str(tiny_model_dir(family)), **kwargs)


@pytest.fixture
def cpu_threads():
    """Sets torch's number of CPU threads for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
