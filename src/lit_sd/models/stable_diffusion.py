"""A Stable Diffusion model of any family, as the trainer sees it: pixels and captions in, a noise prediction
out.

Shape legend: b batch, c latent channels, h/w pixels (lh/lw latents), s tokens, d features, p pooled features,
n size ids.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from diffusers import DDPMScheduler
from jaxtyping import Bool, Float, Real
from torch import Tensor, nn

from lit_sd.models.families import COMPONENTS, Family, recognise
from lit_sd.models.pipelines import pipeline_of, pipeline_options
from lit_sd.models.text import count_tokens, hidden_states, tokenise
from lit_sd.objectives import NoiseSchedule, Prediction
from lit_sd.types import Batch, Conditioning, Latents, Pixels

log = logging.getLogger(__name__)

AESTHETIC_SCORE, NEGATIVE_AESTHETIC_SCORE = 6.0, 2.5
"""What SDXL's refiner is told of a picture's looks; diffusers' defaults for wanted and unwanted pictures."""


class StableDiffusion(nn.Module):
    """UNet, VAE, text encoders, tokenizers and noise schedule under diffusers' names. All is frozen: adapters
    open what trains.

    Args:
        parts: `unet`, `vae`, `scheduler` and, as the family has them, `text_encoder`, `text_encoder_2`,
            `tokenizer`, `tokenizer_2`.
        options: the pipeline's own settings, such as `force_zeros_for_empty_prompt`; they are kept for
            `pipeline()`.
        identity: hash of where the weights came from, or a function that finds it when it is first asked for.
        caption_chunks: a caption may use up to this many windows of 75 tokens; 1 cuts at 77 with start and
            end token.

    Attributes:
        family: "sd15", "sd21", "sdxl" or "sdxl_refiner", as recognised from the parts.

    Raises:
        ValueError: the parts do not make up one of these families.
    """

    unet: Any  # diffusers' and transformers' classes, which their own annotations do not fully describe
    vae: Any
    text_encoder: Any
    text_encoder_2: Any

    def __init__(
        self,
        parts: dict[str, Any],
        options: dict[str, Any] | None = None,
        identity: str | Callable[[], str] = "unknown",
        caption_chunks: int = 1,
    ) -> None:
        super().__init__()
        for name in COMPONENTS:
            setattr(self, name, parts.get(name))
        self.tokenizer, self.tokenizer_2 = parts.get("tokenizer"), parts.get("tokenizer_2")
        encoders = {name for name in COMPONENTS if name.startswith("text") and parts.get(name) is not None}
        self.family: Family = recognise(self.unet.config, self.vae.config, encoders)
        self.options = pipeline_options(self.family, options)
        self.sampling_config = dict(parts["scheduler"].config)
        self.scheduler = DDPMScheduler.from_config(parts["scheduler"].config)
        self.caption_chunks = caption_chunks
        self._identity = identity
        self.requires_grad_(False)

    @cached_property
    def identity(self) -> str:
        """Hash of the weights' source: the same for the same base, wherever it lies."""
        return self._identity() if callable(self._identity) else self._identity

    @property
    def device(self) -> torch.device:
        return self.unet.device

    @property
    def vae_scale_factor(self) -> int:
        """Pixels per latent, along each side."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def default_size(self) -> int:
        """Side of the pictures that the UNet was made for, in pixels."""
        return self.unet.config.sample_size * self.vae_scale_factor

    def components(self) -> dict[str, nn.Module]:
        """The networks that this family has, by diffusers' names."""
        return {name: part for name in COMPONENTS if (part := getattr(self, name)) is not None}

    def idle_modules(self, component: str) -> tuple[str, ...]:
        """Beginnings of the names of a network's parameters that no output depends on.

        SDXL's base reads its first text encoder before the last layer and never asks for its pooled vector.
        """
        if (self.family, component) != ("sdxl", "text_encoder") or self.text_encoder is None:
            return ()
        inside = "text_model." if hasattr(self.text_encoder, "text_model") else ""
        last = self.text_encoder.config.num_hidden_layers - 1
        return (f"{inside}encoder.layers.{last}.", f"{inside}final_layer_norm.")

    def noise_schedule(self) -> NoiseSchedule:
        """The schedule that the model was trained on, with its prediction type."""
        return NoiseSchedule.from_scheduler(self.scheduler)

    def train_as(self, prediction: Prediction) -> None:
        """From now on the UNet counts as predicting this: in training, sampling, pipelines and exports."""
        # As arguments, since from_config leaves out what the config lists as not given in its file.
        self.scheduler = DDPMScheduler.from_config(self.scheduler.config, prediction_type=prediction)
        self.sampling_config = dict(self.sampling_scheduler(prediction_type=prediction).config)

    # Pictures

    @torch.no_grad()
    def encode_images(
        self, pixels: Pixels, generator: torch.Generator | None = None
    ) -> Float[Tensor, "b c lh lw"]:
        """Draw latents of pixels in [-1, 1], scaled as the UNet expects them.

        Args:
            pixels: `b 3 h w`; each side a multiple of `vae_scale_factor`.
            generator: where the posterior's noise comes from. It may live on another device than the pixels.

        Returns:
            Latents `b c h/f w/f` in float32.
        """
        return self.draw_latents(*self.moments(pixels), generator)

    @torch.no_grad()
    def moments(self, pixels: Pixels) -> tuple[Float[Tensor, "b c lh lw"], Float[Tensor, "b c lh lw"]]:
        """Mean and standard deviation of the VAE's posterior, float32, in the VAE's own scale."""
        with self._vae_precision(pixels.device):
            posterior = self.vae.encode(pixels.to(self.vae.dtype)).latent_dist
        return posterior.mean.float(), posterior.std.float()

    def draw_latents(
        self,
        mean: Float[Tensor, "b c lh lw"],
        std: Float[Tensor, "b c lh lw"],
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "b c lh lw"]:
        """A sample of the posterior with these moments, in the UNet's scale; see `encode_images`."""
        where = generator.device if generator is not None else mean.device
        noise = torch.randn(mean.shape, generator=generator, device=where).to(mean.device)
        shift = self.vae.config.get("shift_factor") or 0.0
        return (mean + std * noise - shift) * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode_latents(self, latents: Float[Tensor, "b c lh lw"]) -> Pixels:
        """Pictures in about [-1, 1], float32, of latents in the UNet's scale."""
        shift = self.vae.config.get("shift_factor") or 0.0
        latents = latents.float() / self.vae.config.scaling_factor + shift
        with self._vae_precision(latents.device):
            return self.vae.decode(latents.to(self.vae.dtype)).sample.float()

    def _vae_precision(self, device: torch.device):
        """The VAE overflows in fp16 (SDXL's gives black pictures): it runs in fp32 there, also under
        autocast.
        """
        if self.vae.dtype == torch.float16:
            log.warning("the VAE was cast to float16, where SDXL's overflows; it is cast back to float32")
            self.vae.float()
        half = (
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
        )
        return torch.autocast(device.type, enabled=False) if half else nullcontext()

    # Captions

    def token_counts(self, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption with start and end token, before any cut; over 77 they are cut or
        chunked.
        """
        return count_tokens(self.tokenizer or self.tokenizer_2, captions)

    def encode_text(self, captions: Sequence[str]) -> Conditioning:
        """Token states (and SDXL's pooled vector) of captions, just as the family's diffusers pipeline makes
        them.

        Gradients flow into text encoders that train. Captions over 77 tokens keep their start and end token,
        or use more windows where `caption_chunks` allows; SDXL's pooled vector is then the first window's.

        Returns:
            `hidden` of shape `b s d` with s = 77 per window, `pooled` of shape `b p` for SDXL.
        """
        states, pooled = [], None
        for encoder, tokenizer in (
            (self.text_encoder, self.tokenizer),
            (self.text_encoder_2, self.tokenizer_2),
        ):
            if encoder is None:
                continue
            ids = tokenise(tokenizer, captions, self.caption_chunks).to(encoder.device)
            hidden, projected = hidden_states(encoder, ids, penultimate=self.family.startswith("sdxl"))
            states.append(hidden)
            pooled = projected
        return Conditioning(torch.cat(states, dim=-1), pooled)

    def condition(
        self,
        batch: Batch,
        drop: Bool[Tensor, " b"] | None = None,
        encode: Callable[[list[str]], Conditioning] | None = None,
    ) -> Conditioning:
        """Everything that the UNet is told about a batch.

        Args:
            batch: its captions, and for SDXL its sizes and crops.
            drop: captions to leave out, for classifier-free guidance; all encoders and the pooled vector drop
                together.
            encode: what stands in for `encode_text`, such as a cache of it.
        """
        captions = list(batch["captions"])
        if drop is not None:
            captions = [
                "" if gone else caption for caption, gone in zip(captions, drop.tolist(), strict=True)
            ]
        cond = (encode or self.encode_text)(captions)
        if drop is not None:
            cond = self.drop_captions(cond, drop)
        ids = self.time_ids(batch["original_size"], batch["crop_top_left"], batch["target_size"])
        return Conditioning(cond.hidden, cond.pooled, ids)

    def drop_captions(self, cond: Conditioning, drop: Bool[Tensor, " b"]) -> Conditioning:
        """Conditioning with `drop`'s rows, which hold the empty caption, made into what the family was
        trained on as "none".

        SDXL's base saw zeros there, of all states and the pooled vector; the others saw the empty caption
        itself.
        """
        if self.family != "sdxl" or not self.options.get("force_zeros_for_empty_prompt", True):
            return cond
        assert cond.pooled is not None
        keep = (~drop).to(cond.hidden.device, cond.hidden.dtype)
        return Conditioning(cond.hidden * keep[:, None, None], cond.pooled * keep[:, None], cond.time_ids)

    def time_ids(
        self, original: Tensor, crop: Tensor, target: Tensor, aesthetic_score: float = AESTHETIC_SCORE
    ) -> Float[Tensor, "b n"] | None:
        """SDXL's size ids, or None: original (height, width), crop (top, left), then target (height, width).

        The refiner takes an aesthetic score in place of the target size. Source: Podell et al. 2023,
        arXiv:2307.01952, sec. 2.2 and 2.5.
        """
        if not self.family.startswith("sdxl"):
            return None
        last = target
        if self.family == "sdxl_refiner":
            last = torch.full((len(original), 1), aesthetic_score)
        return torch.cat([part.to(self.device, torch.float32) for part in (original, crop, last)], dim=1)

    # The network

    def predict(self, noisy: Latents, t: Real[Tensor, " b"], cond: Conditioning, **extra: Any) -> Latents:
        """The UNet's output for noisy latents at timesteps `t`, which samplers may take between the whole
        ones. `extra` goes to the UNet, for adapters with own inputs.
        """
        dtype = self.unet.dtype
        if cond.pooled is not None and cond.time_ids is not None:
            sizes = {"text_embeds": cond.pooled.to(dtype), "time_ids": cond.time_ids}
            extra = {**extra, "added_cond_kwargs": {**sizes, **extra.get("added_cond_kwargs", {})}}
        return self.unet(
            noisy.to(dtype), t, encoder_hidden_states=cond.hidden.to(dtype), **extra, return_dict=False
        )[0]

    # Interchange

    def pipeline(self, scheduler: Any = None) -> Any:
        """The family's diffusers pipeline around these very networks; nothing is copied.

        Args:
            scheduler: any diffusers scheduler; by default the one that the model came with.
        """
        parts = {name: getattr(self, name) for name in (*COMPONENTS, "tokenizer", "tokenizer_2")}
        return pipeline_of(
            self.family, {**parts, "scheduler": scheduler or self.sampling_scheduler()}, self.options
        )

    def sampling_scheduler(self, **settings: Any) -> Any:
        """A new scheduler of the kind that the model came with; `settings` win over its own."""
        import diffusers

        cls = getattr(diffusers, self.sampling_config.get("_class_name", "DDIMScheduler"))
        return cls.from_config(self.sampling_config, **settings)
