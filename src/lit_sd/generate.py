"""Pictures from prompts. A seed is a picture: it comes out the same whatever else is drawn beside it, and on
any rank.

Shape legend: b batch, c latent channels, h/w latent rows and columns.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import diffusers
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from lit_sd.models.stable_diffusion import NEGATIVE_AESTHETIC_SCORE, StableDiffusion
from lit_sd.types import Conditioning

SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "pndm": "PNDMScheduler",
    "euler": "EulerDiscreteScheduler",
    "euler_a": "EulerAncestralDiscreteScheduler",
    "dpmpp_2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
}


def generate(
    model: StableDiffusion,
    prompts: Sequence[str],
    seeds: Sequence[int],
    negative: str | Sequence[str] = "",
    *,
    steps: int = 25,
    guidance: float = 7.5,
    height: int | None = None,
    width: int | None = None,
    batch_size: int = 1,
    scheduler: str = "ddim",
    progress: Callable[[int], None] | None = None,
) -> list[Image.Image]:
    """One picture for each prompt and seed.

    Each seed has its own random stream; the global streams are neither read nor moved, and the model's train
    mode is as it was afterwards. Batches are filled up to `batch_size`, so a picture does not depend on how
    many others are asked for; only where several CPU threads share a batch may a pixel's rounding.

    Args:
        model: any family. SDXL's refiner draws from pure noise here, without a base's picture.
        prompts: one for each picture.
        seeds: one for each picture.
        negative: what to steer away from, one for all or one for each; "" is what the model knows as no
            caption.
        steps: of the scheduler.
        guidance: of classifier-free guidance; 1 or less leaves it out (arXiv:2207.12598).
        height: in pixels, a multiple of the VAE's factor and the UNet's; by default the model's own size.
        width: the same.
        batch_size: pictures at once. More is faster and needs more memory; another number may round pixels
            otherwise.
        scheduler: one of `SCHEDULERS`, or the name of a scheduler class of diffusers.
        progress: called with the number of new pictures after each batch.

    Raises:
        ValueError: numbers of prompts, seeds and negatives differ, or a size does not fit the model.
    """
    negatives = [negative] * len(prompts) if isinstance(negative, str) else list(negative)
    if not len(prompts) == len(seeds) == len(negatives):
        raise ValueError(
            f"generate got {len(prompts)} prompts, {len(seeds)} seeds and {len(negatives)} negatives; "
            "expected one seed and one negative (or one for all) for each prompt"
        )
    if steps < 1 or batch_size < 1:
        raise ValueError(f"generate got steps={steps}, batch_size={batch_size}; expected 1 or more of each")
    size = _checked_size(model, height, width)
    pictures: list[Image.Image] = []
    with torch.no_grad(), evaluating(model):
        for start in range(0, len(prompts), batch_size):
            which = [min(i, len(prompts) - 1) for i in range(start, start + batch_size)]
            some = [
                list(part)
                for part in zip(*[(prompts[i], negatives[i], seeds[i]) for i in which], strict=True)
            ]
            latents = _draw(model, *some, size=size, steps=steps, guidance=guidance, scheduler=scheduler)
            wanted = min(batch_size, len(prompts) - start)
            pictures += to_pictures(model.decode_latents(latents)[:wanted])
            if progress is not None:
                progress(wanted)
    return pictures


def _checked_size(model: StableDiffusion, height: int | None, width: int | None) -> tuple[int, int]:
    size = (height or model.default_size, width or model.default_size)
    factor = model.vae_scale_factor * 2 ** (len(model.unet.config.block_out_channels) - 1)
    if any(side < factor or side % factor for side in size):
        raise ValueError(
            f"height={size[0]}, width={size[1]}: this model draws sides that are multiples of {factor} pixels"
        )
    return size


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode within, each module's own mode again afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _draw(
    model: StableDiffusion,
    prompts: list[str],
    negatives: list[str],
    seeds: list[int],
    *,
    size: tuple[int, int],
    steps: int,
    guidance: float,
    scheduler: str,
) -> Float[Tensor, "b c h w"]:
    """Latents of one batch: the sampling loop of diffusers' text-to-image pipelines, for every family."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shape = (
        model.unet.config.in_channels,
        size[0] // model.vae_scale_factor,
        size[1] // model.vae_scale_factor,
    )
    noise = [torch.randn(1, *shape, generator=g) for g in generators]
    sampler = make_scheduler(model, scheduler)
    sampler.set_timesteps(steps, device=model.device)
    latents = torch.cat(noise).to(model.device) * sampler.init_noise_sigma
    cond, guided = _conditioning(model, prompts, negatives, size, guidance), guidance > 1
    extra = {"generator": generators} if "generator" in signature(sampler.step).parameters else {}
    for t in sampler.timesteps:
        noisy = sampler.scale_model_input(torch.cat([latents] * 2) if guided else latents, t)
        output = model.predict(noisy, t.expand(len(noisy)), cond).float()
        if guided:
            without, with_prompt = output.chunk(2)
            output = without + guidance * (with_prompt - without)
        latents = sampler.step(output, t, latents, **extra).prev_sample
    return latents


def _conditioning(
    model: StableDiffusion, prompts: list[str], negatives: list[str], size: tuple[int, int], guidance: float
) -> Conditioning:
    count = len(prompts)
    sizes = torch.tensor([size] * count)
    ids = model.time_ids(sizes, torch.zeros_like(sizes), sizes)
    if guidance <= 1:
        cond = model.encode_text(prompts)
        return Conditioning(cond.hidden, cond.pooled, ids)
    both = model.encode_text([*negatives, *prompts])  # together, so that both have as many windows
    empty = torch.tensor([not text for text in negatives] + [False] * count)
    both = model.drop_captions(both, empty)
    other = model.time_ids(sizes, torch.zeros_like(sizes), sizes, NEGATIVE_AESTHETIC_SCORE)
    return Conditioning(
        both.hidden, both.pooled, None if ids is None or other is None else torch.cat([other, ids])
    )


def make_scheduler(model: StableDiffusion, name: str = "ddim") -> Any:
    """A scheduler for sampling with the model's own noise schedule and prediction type.

    Raises:
        ValueError: neither a name of `SCHEDULERS` nor one of diffusers' scheduler classes.
    """
    cls = getattr(diffusers, SCHEDULERS.get(name, name), None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.SchedulerMixin)):
        raise ValueError(
            f"scheduler={name!r}; expected one of {', '.join(SCHEDULERS)}, or a scheduler class of diffusers"
        )
    settings = {
        "skip_prk_steps": True,  # PNDM as Stable Diffusion's own config has it
        "prediction_type": model.scheduler.config.prediction_type,
        "clip_sample": False,
    }
    if model.sampling_config.get(
        "rescale_betas_zero_snr"
    ):  # the last timestep must be drawn (arXiv:2305.08891, sec. 3.3)
        settings["timestep_spacing"] = "trailing"
    return cls.from_config(model.sampling_config, **settings)


def to_pictures(pixels: Float[Tensor, "b 3 h w"]) -> list[Image.Image]:
    """Pictures of pixels in [-1, 1]; what lies outside is clipped."""
    scaled = (pixels.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    return [Image.fromarray(picture) for picture in scaled.permute(0, 2, 3, 1).cpu().numpy()]
