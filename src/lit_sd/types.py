"""The data contract between the layers: what a batch is, and what crosses from text encoders to the UNet.

Shape legend: b batch, c channels, h/w pixels, lh/lw latents, s tokens, d features.
"""

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
from jaxtyping import Float, Int, UInt8
from torch import Tensor

Pixels = Float[Tensor, "b 3 h w"]
Latents = Float[Tensor, "b c h w"]
Timesteps = Int[Tensor, " b"]


class Sample(TypedDict):
    """One training example, before batching. Pixels are as they were decoded, 0 to 255. From a cache, the
    moments of its latents come instead, and a mask of their size; see `lit_sd.data.caches.latents.Found`.
    """

    id: str
    source: str
    pixels: NotRequired[UInt8[np.ndarray, "h w 3"]]
    moments: NotRequired[Int[np.ndarray, "2 c lh lw"]]
    caption: str
    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]
    mask: NotRequired[UInt8[np.ndarray, "h w 1"] | Int[np.ndarray, "1 lh lw"]]
    control: NotRequired[UInt8[np.ndarray, "h w 3"]]


class Batch(TypedDict):
    """What the DataModule yields, once it is on its device.

    `pixels` lie in [-1, 1]. `weight` is `w[source] / n_in_batch`, where n counts the examples of the pool
    that the source belongs to, so that `(loss * weight).sum()` is the mean of each pool times its weight.
    Sizes and crops are (height, width) and (top, left) in pixels of the scaled image, as SDXL's `time_ids`
    want them. `ids` name the examples, for error messages and for seeds that belong to an image. `mask` is
    how much each pixel or latent counts, 0 to 1. `control` lies in [0, 1], as ControlNets of diffusers want
    it. In place of `pixels` a cache gives `moments`: mean and standard deviation of the VAE's posterior, in
    its own scale.
    """

    ids: list[str]
    source: list[str]
    pixels: NotRequired[Pixels]
    moments: NotRequired[Float[Tensor, "b 2 c lh lw"]]
    captions: list[str]
    weight: Float[Tensor, " b"]
    original_size: Int[Tensor, "b 2"]
    crop_top_left: Int[Tensor, "b 2"]
    target_size: Int[Tensor, "b 2"]
    mask: NotRequired[Float[Tensor, "b 1 h w"]]
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
