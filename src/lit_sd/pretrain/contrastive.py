"""Stage two of a base from nothing: a CLIP, whose text tower conditions the UNet and whose image tower
measures pictures.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTextModel, CLIPTokenizer

from lit_sd.metrics import recall_at
from lit_sd.models.saving import written_aside
from lit_sd.randomness import isolated
from lit_sd.trainable import StepRecord, Trainable, all_finite
from lit_sd.types import Batch, Pixels

MEAN = STD = (0.5, 0.5, 0.5)
"""The image tower takes pixels in [-1, 1], as the VAE does."""


def multi_positive(logits: Float[Tensor, "b n"], positive: Bool[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """Cross-entropy against the uniform distribution over each row's positives (Khosla et al. 2020,
    arXiv:2004.11362, eq. 2).

    A row without positives has loss 0.
    """
    log_likelihood = logits.log_softmax(1).masked_fill(~positive, 0.0)
    return -log_likelihood.sum(1) / positive.sum(1).clamp(min=1)


def contrastive_losses(
    images: Float[Tensor, "b d"], texts: Float[Tensor, "b d"], scale: Tensor, same: Bool[Tensor, "b b"]
) -> dict[str, Float[Tensor, " b"]]:
    """CLIP's symmetric loss (Radford et al. 2021, arXiv:2103.00020, fig. 3), and one between pictures of
    the same caption.

    Args:
        images, texts: unit vectors.
        scale: multiplies cosines; CLIP's learned inverse temperature.
        same: which pairs of the batch have the same caption; these count as positives.
    """
    logits = scale * images @ texts.T
    itself = torch.eye(len(images), dtype=torch.bool, device=images.device)
    between = (scale * images @ images.T).masked_fill(itself, -math.inf)
    return {
        "text": (multi_positive(logits, same) + multi_positive(logits.T, same)) / 2,
        "image": multi_positive(between, same & ~itself),
    }


def jitter(pixels: Pixels, amount: float, generator: torch.Generator) -> Pixels:
    """Each picture shifted, scaled and turned a little, white where nothing is left; `amount` 0.1 is up to
    a tenth and 6 degrees.
    """
    b = len(pixels)
    draw = torch.rand(b, 4, generator=generator) * 2 - 1
    angle, size = draw[:, 0] * amount, 1 + draw[:, 1] * amount
    rotation = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(b, 2, 2)
    theta = torch.cat([rotation * size[:, None, None], draw[:, 2:, None] * amount], 2).to(pixels)
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels - 1, grid, align_corners=False) + 1


class ContrastiveModule(Trainable):
    """Trains a CLIP on pictures and captions.

    Args:
        model: the CLIP and its tokenizer.
        optimizer, scheduler, seed: as `Trainable`.
        image_weight: weight of the loss between pictures of one caption, which keeps photographs apart from
            one another.
        jitter: amount of shift, scale and turn, see `jitter`.
    """

    def __init__(
        self,
        model: "TokenizedCLIP",
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        *,
        seed: int,
        image_weight: float,
        jitter: float,
    ) -> None:
        super().__init__(optimizer, scheduler, seed)
        self.model: Any = model.model
        self.tokenizer = model.tokenizer
        self.image_weight, self.jitter = image_weight, jitter
        self._held: list[tuple[Tensor, Tensor]] = []

    def parameter_groups(self) -> list[dict]:
        """Weight decay on matrices alone, as the CLIP paper has it (sec. 2.5)."""
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        return [
            {"name": "matrices", "params": [p for _, p in named if p.ndim > 1]},
            {
                "name": "gains, biases and temperature",
                "params": [p for _, p in named if p.ndim <= 1],
                "weight_decay": 0.0,
            },
        ]

    def embed(self, pixels: Pixels, captions: list[str]) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
        """Unit vectors of pictures and of captions."""
        tokens = self.tokenizer(captions, padding=True, truncation=True, return_tensors="pt").to(self.device)
        output = self.model(pixel_values=pixels, **tokens)
        return F.normalize(output.image_embeds.float(), dim=1), F.normalize(output.text_embeds.float(), dim=1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pixels = jitter(batch["pixels"], self.jitter, self.draws.generator("jitter"))
        images, texts = self.embed(pixels, batch["captions"])
        numbers = {caption: i for i, caption in enumerate(dict.fromkeys(batch["captions"]))}
        label = torch.tensor([numbers[caption] for caption in batch["captions"]], device=self.device)
        scale = self.model.logit_scale.exp().clamp(max=100)
        parts = contrastive_losses(images, texts, scale, label[:, None] == label[None])
        losses = parts["text"] + self.image_weight * parts["image"]
        finite = {"images": all_finite(images), "texts": all_finite(texts)}
        self.record = StepRecord(batch["ids"], losses.detach(), None, finite)
        loss = (losses * batch["weight"].to(losses)).sum()
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, texts = self.embed(batch["pixels"], batch["captions"])
        counted = batch["weight"] > 0
        self._held.append((images[counted], texts[counted]))

    def on_validation_epoch_end(self) -> None:
        images, texts = (torch.cat(parts) for parts in zip(*self._held, strict=True))
        self._held.clear()
        if self.trainer.world_size > 1:
            gathered: Any = self.all_gather((images, texts))
            images, texts = (x.flatten(0, 1) for x in gathered)
        similarity = texts @ images.T
        for k in (1, 10):
            self.log(f"val/recall_at_{k}", recall_at(similarity, k), prog_bar=True, sync_dist=True)
        self.log("val/clip_score", similarity.diagonal().mean(), sync_dist=True)

    def export(self, folder: Path) -> list[Path]:
        """Write `clip/`, and `text_encoder/` and `tokenizer/` as a Stable Diffusion pipeline has them."""
        size = self.model.config.vision_config.image_size
        processor = CLIPImageProcessor(
            size={"shortest_edge": size},
            crop_size={"height": size, "width": size},
            image_mean=MEAN,
            image_std=STD,
        )
        parts: dict[str, list[Any]] = {
            "clip": [self.model, self.tokenizer, processor],
            "text_encoder": [text_encoder(self.model)],
            "tokenizer": [self.tokenizer],
        }
        for name, objects in parts.items():
            with written_aside(folder / name) as aside:
                for thing in objects:
                    thing.save_pretrained(aside)
        return [folder / name for name in parts]


def text_encoder(model: Any) -> CLIPTextModel:
    """The text tower alone, as Stable Diffusion pipelines take it; a copy."""
    with isolated():
        encoder = CLIPTextModel(model.config.text_config)
    own = encoder.state_dict()
    weights = model.state_dict()
    encoder.load_state_dict(
        {name: weights[name if name.startswith("text_model.") else f"text_model.{name}"] for name in own}
    )
    return encoder


class TokenizedCLIP(NamedTuple):
    """A CLIP and the tokenizer whose ids it reads."""

    model: CLIPModel
    tokenizer: CLIPTokenizer


def new_clip(
    tokenizer: CLIPTokenizer,
    *,
    size: int,
    patch: int,
    width: int,
    image_layers: int,
    text_layers: int,
    dim: int,
) -> TokenizedCLIP:
    """A CLIP with random weights.

    Args:
        tokenizer: whose vocabulary the text tower gets.
        size, patch: pixels of a side of pictures and of patches.
        width: features of both towers; heads have 64.
        image_layers, text_layers: layers of the towers.
        dim: features of the common space.
    """
    shared: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": width // 64,
        "projection_dim": dim,
    }
    text = {
        "num_hidden_layers": text_layers,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"num_hidden_layers": image_layers, "image_size": size, "patch_size": patch}
    config = CLIPConfig(text_config=shared | text, vision_config=shared | vision, projection_dim=dim)
    return TokenizedCLIP(CLIPModel(config), tokenizer)
