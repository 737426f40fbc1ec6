"""Stage one of a base from nothing: an AutoencoderKL."""

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_sd.models.saving import written_aside
from lit_sd.trainable import StepRecord, Trainable, all_finite
from lit_sd.types import Batch, Pixels

MEASURED_BATCHES = 64
"""Batches of training pictures over which exported latents have zero mean and unit variance."""


def psnr(output: Pixels, target: Pixels) -> Float[Tensor, " b"]:
    """Peak signal-to-noise ratio of each picture in dB; pixels in [-1, 1], clamped to it, peak-to-peak 2."""
    error = (output.float().clamp(-1, 1) - target.float()).square().flatten(1).mean(1)
    return 10 * torch.log10(4 / error.clamp(min=1e-10))


def reconstruction_losses(output: Pixels, target: Pixels) -> dict[str, Float[Tensor, " b"]]:
    """Mean absolute errors of each picture: of pixels, of differences between neighbours, and of 8 x 8 means.

    Neighbours' differences keep outlines sharp; means over a latent's own patch settle the colour early.
    """
    error = output.float() - target.float()
    across, down = error[..., 1:] - error[..., :-1], error[..., 1:, :] - error[..., :-1, :]
    return {
        "pixel": error.abs().flatten(1).mean(1),
        "edge": across.abs().flatten(1).mean(1) + down.abs().flatten(1).mean(1),
        "colour": F.avg_pool2d(error, 8).abs().flatten(1).mean(1),
    }


class AutoencoderModule(Trainable):
    """Trains an AutoencoderKL: reconstruction, and a KL term that keeps the latents smooth.

    Args:
        model: the autoencoder.
        optimizer, scheduler, seed: as `Trainable`.
        edge_weight, colour_weight: weights of those parts of `reconstruction_losses` beside the pixels'.
        kl_weight: weight of the mean KL divergence per latent element, in nats.
        recolour: share of pictures whose colour channels are shuffled, so that colours never seen come out
            right too.
        crop: side of the random square of each picture that a step sees, in pixels; None for the whole
            picture. What lies near the border of a drawing is mostly white.
        compile: let torch compile the network.
    """

    def __init__(
        self,
        model: AutoencoderKL,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        seed: int,
        edge_weight: float,
        colour_weight: float,
        kl_weight: float,
        recolour: float,
        crop: int | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__(optimizer, scheduler, seed)
        self.model: Any = model
        self.weights = {"pixel": 1.0, "edge": edge_weight, "colour": colour_weight}
        self.kl_weight, self.recolour, self.crop = kl_weight, recolour, crop
        self._reconstruct = torch.compile(self.reconstruct) if compile else self.reconstruct

    def reconstruct(self, pixels: Pixels, noise: Tensor) -> tuple[Pixels, Tensor]:
        """Decode a sample of the posterior. Returns the pictures and the mean KL per latent element, ` b`."""
        posterior = self.model.encode(pixels).latent_dist
        kl = posterior.kl() / posterior.mean[0].numel()
        return self.model.decode(posterior.mean + posterior.std * noise).sample, kl

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pixels = self._recoloured(self._cropped(batch["pixels"]))
        noise = torch.randn(self._latent_shape(pixels), generator=self.draws.generator("noise"))
        output, kl = self._reconstruct(pixels, noise.to(pixels))
        parts = reconstruction_losses(output, pixels)
        losses = sum((w * parts[name] for name, w in self.weights.items()), self.kl_weight * kl.float())
        finite = {"pixels": all_finite(pixels), "output": all_finite(output)}
        self.record = StepRecord(batch["ids"], losses.detach(), None, finite)
        loss = (losses * batch["weight"].to(losses)).sum()
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        output = self.model.decode(self.model.encode(batch["pixels"]).latent_dist.mode()).sample
        counted = batch["weight"] > 0
        decibels = psnr(output, batch["pixels"])[counted].mean()
        self.log("val/psnr", decibels, batch_size=int(counted.sum()), prog_bar=True, sync_dist=True)

    def _latent_shape(self, pixels: Pixels) -> tuple[int, int, int, int]:
        factor = 2 ** (len(self.model.config.block_out_channels) - 1)
        return (
            len(pixels),
            self.model.config.latent_channels,
            pixels.shape[-2] // factor,
            pixels.shape[-1] // factor,
        )

    def _cropped(self, pixels: Pixels) -> Float[Tensor, "b 3 side side"]:
        height, width = pixels.shape[-2:]
        side = self.crop or 0
        if not 0 < side < min(height, width):
            return pixels
        draw = torch.rand(len(pixels), 2, generator=self.draws.generator("crop"))
        corners = (draw * torch.tensor([height - side + 1, width - side + 1])).int().tolist()
        crops = [
            x[:, top : top + side, left : left + side] for x, (top, left) in zip(pixels, corners, strict=True)
        ]
        return torch.stack(crops)

    def _recoloured(self, pixels: Pixels) -> Pixels:
        generator = self.draws.generator("recolour")
        chosen = torch.rand(len(pixels), generator=generator) < self.recolour
        order = torch.rand(len(pixels), 3, generator=generator).argsort(1)
        order[~chosen] = torch.arange(3)
        index = order.to(pixels.device)[:, :, None, None].expand_as(pixels)
        return pixels.gather(1, index)

    def export(self, folder: Path) -> list[Path]:
        """Write `folder/vae` in diffusers' format, its latents of zero mean and unit variance over training
        pictures.
        """
        vae = copy.deepcopy(self.model).eval()
        batches: Any = self.trainer.train_dataloader
        some = islice(batches, MEASURED_BATCHES)
        standardise(vae, (batch["pixels"].to(self.device) for batch in some))
        with written_aside(folder / "vae") as aside:
            vae.save_pretrained(aside)
        return [folder / "vae"]


def new_autoencoder(
    *, channels: Sequence[int], layers: int, latent_channels: int, groups: int, size: int
) -> AutoencoderKL:
    """An AutoencoderKL with random weights.

    Args:
        channels: features at each level; each level after the first halves the picture's sides.
        layers: residual blocks of a level in the encoder (the decoder has one more).
        latent_channels: channels of the latents.
        groups: of the group normalisation.
        size: pixels of a side.
    """
    levels = len(channels)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=tuple(channels),
        layers_per_block=layers,
        latent_channels=latent_channels,
        norm_num_groups=groups,
        sample_size=size,
    )


@torch.no_grad()
def standardise(vae: Any, pictures: Iterable[Tensor]) -> None:
    """Fold the latents' mean and standard deviation per channel into the 1 x 1 convolutions beside them, in
    place.

    Pipelines of SD 1.x know a scaling factor but no shift; folded in, both are 1 and 0 and no program can
    forget them.

    Raises:
        ValueError: `pictures` is empty.
    """
    count, total, squares = 0, torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for pixels in pictures:
        mean = vae.encode(pixels).latent_dist.mean.double()
        count += mean.numel() // mean.shape[1]
        total, squares = total + mean.sum((0, 2, 3)), squares + mean.square().sum((0, 2, 3))
    if not count:
        raise ValueError("no pictures to measure the latents on; expected at least one batch")
    shift = total / count
    scale = (squares / count - shift.square()).sqrt()
    quant, post = vae.quant_conv, vae.post_quant_conv
    channels = vae.config.latent_channels
    weight, bias = quant.weight.double(), quant.bias.double()
    weight[:channels] /= scale[:, None, None, None]
    bias[:channels] = (bias[:channels] - shift) / scale
    bias[channels:] -= 2 * scale.log()
    quant.weight.copy_(weight), quant.bias.copy_(bias)
    weight = post.weight.double()
    post.bias.copy_(post.bias.double() + (weight[..., 0, 0] @ shift))
    post.weight.copy_(weight * scale[None, :, None, None])
    vae.register_to_config(scaling_factor=1.0)
