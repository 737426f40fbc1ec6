"""The data contract between the layers: what a batch is, and what crosses from text encoders to the UNet.

Shape legend: b batch, c channels, h/w pixels, s tokens, d features.
"""

from dataclasses import dataclass
from typing import NotRequired, TypedDict

from jaxtyping import Float, Int
from torch import Tensor

Pixels = Float[Tensor, "b 3 h w"]
Latents = Float[Tensor, "b c h w"]
Timesteps = Int[Tensor, " b"]


class Sample(TypedDict):
    """One training example, before batching."""

    id: str
    source: str
    pixels: Float[Tensor, "3 h w"]
    caption: str
    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]


class Batch(TypedDict):
    """What the DataModule yields.

    `pixels` lie in [-1, 1]. `weight` is `w[source] / n_source_in_batch`, so that `(loss * weight).sum()` is
    the mean of each source times its weight. Sizes and crops are (height, width) and (top, left) in pixels
    of the scaled image, as SDXL's `time_ids` want them. `ids` name the examples, for error messages and for
    seeds that belong to an image.
    """

    ids: list[str]
    source: list[str]
    pixels: Pixels
    captions: list[str]
    weight: Float[Tensor, " b"]
    original_size: Int[Tensor, "b 2"]
    crop_top_left: Int[Tensor, "b 2"]
    target_size: Int[Tensor, "b 2"]
    control: NotRequired[Pixels]


@dataclass(frozen=True)
class Conditioning:
    """What the UNet is told beside the noisy latents.

    Attributes:
        hidden: token states of the text encoders, `b s d` (two encoders are joined along d).
        pooled: pooled text vector of SDXL's second encoder, else None.
        time_ids: SDXL's size ids, else None.
    """

    hidden: Float[Tensor, "b s d"]
    pooled: Float[Tensor, "b p"] | None = None
    time_ids: Float[Tensor, "b n"] | None = None
