"""What pictures are measured by: cosines in a CLIP's space, and the Fréchet distance.

Shape legend: b batch, n and m numbers of pictures, d features, h/w pixels.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor, nn


class ClipFeatures(nn.Module):
    """Unit vectors of pictures and captions in the space of a CLIP.

    Args:
        model: transformers' CLIPModel.
        tokenizer: its tokenizer.
        mean, std: of the pixels that it takes, which lie in [0, 1] before; the shipped CLIP takes 0.5 and
            0.5.
    """

    def __init__(self, model: Any, tokenizer: Any, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1))
        self.size: int = model.config.vision_config.image_size
        self.num_features: int = model.config.projection_dim

    @classmethod
    def from_folder(cls, folder: Path) -> "ClipFeatures":
        """A CLIP with tokenizer and image processor in transformers' layout. Raises OSError where one is
        missing.
        """
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

        processor = CLIPImageProcessor.from_pretrained(folder)
        model = CLIPModel.from_pretrained(folder, dtype=torch.float32)
        return cls(model, CLIPTokenizer.from_pretrained(folder), processor.image_mean, processor.image_std)

    def forward(self, pictures: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b d"]:
        """Unit vectors of pictures, scaled to the size that the CLIP takes."""
        pixels = pictures.float() / 255
        if pixels.shape[-2:] != (self.size, self.size):
            pixels = F.interpolate(pixels, (self.size, self.size), mode="bicubic", antialias=True).clamp(0, 1)
        output = self.model.vision_model(pixel_values=(pixels - self.mean) / self.std)
        return F.normalize(self.model.visual_projection(output.pooler_output), dim=1)

    @torch.no_grad()
    def pictures(self, pictures: Iterable[Image.Image], batch_size: int = 64) -> Float[Tensor, "n d"]:
        """Unit vectors of PIL pictures, which may differ in size."""
        found, waiting = [], [*pictures]
        for start in range(0, len(waiting), batch_size):
            some = [
                picture.resize((self.size, self.size), Image.Resampling.BICUBIC)
                for picture in waiting[start : start + batch_size]
            ]
            found.append(self(to_uint8(some)))
        return torch.cat(found) if found else torch.empty(0, self.num_features)

    @torch.no_grad()
    def captions(self, captions: Sequence[str], batch_size: int = 256) -> Float[Tensor, "n d"]:
        """Unit vectors of captions, cut at 77 tokens."""
        found = []
        for start in range(0, len(captions), batch_size):
            some = list(captions[start : start + batch_size])
            tokens = self.tokenizer(some, padding=True, truncation=True, return_tensors="pt").to(
                self.mean.device
            )
            output = self.model.text_model(**tokens)
            found.append(F.normalize(self.model.text_projection(output.pooler_output), dim=1))
        return torch.cat(found) if found else torch.empty(0, self.num_features)


def to_uint8(pictures: Sequence[Image.Image]) -> UInt8[Tensor, "b 3 h w"]:
    """RGB pictures of one size as a tensor."""
    return torch.stack([torch.from_numpy(np.array(p.convert("RGB"))) for p in pictures]).permute(0, 3, 1, 2)


def mean_cosine(a: Float[Tensor, "n d"], b: Float[Tensor, "m d"]) -> float:
    """Mean cosine of all pairs of one vector from each set; both hold unit vectors.

    Raises:
        ValueError: a set is empty.
    """
    if not len(a) or not len(b):
        raise ValueError(f"mean cosine of {len(a)} and {len(b)} vectors; expected at least one of each")
    return (a.double().mean(0) @ b.double().mean(0)).item()


def recall_at(similarity: Float[Tensor, "n n"], k: int) -> float:
    """Share of rows whose own column is among the row's k largest; a tie counts against it."""
    own = similarity.diagonal()[:, None]
    return ((similarity >= own).sum(1) <= k).float().mean().item()


def frechet_distance(features: Any, real: Iterable[Tensor], generated: Iterable[Tensor]) -> float:
    """Fréchet distance between two sets of pictures (Heusel et al. 2017, arXiv:1706.08500, eq. 6), through
    torchmetrics.

    Args:
        features: `b 3 h w` uint8 to `b d`, with `num_features` and `size`.
        real, generated: batches of pictures, `b 3 h w` uint8.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    metric = FrechetInceptionDistance(
        feature=features, input_img_size=(3, features.size, features.size), antialias=True
    )
    with torch.no_grad():
        for is_real, batches in ((True, real), (False, generated)):
            for batch in batches:
                metric.update(batch, real=is_real)
    return metric.compute().item()
