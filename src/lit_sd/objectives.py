"""Diffusion objectives as pure functions: noise level, target, weighting, loss per sample.

Symbols follow the papers: `x0` clean latents, `eps` noise, `abar` the cumulative product of alphas,
`xt = sqrt(abar) x0 + sqrt(1 - abar) eps` (Ho et al. 2020, arXiv:2006.11239, eq. 4).

Shape legend: b batch, n training timesteps, * latents' dimensions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

Prediction = Literal["epsilon", "v_prediction", "sample"]
Predict = Callable[[Tensor, Tensor], Tensor]
"""The network as the objective sees it: `(noisy latents, timesteps) -> output` of the latents' shape."""


@dataclass(frozen=True)
class NoiseSchedule:
    """The training noise schedule of a model.

    Attributes:
        abar: cumulative product of alphas, by timestep, in float64; after zero-terminal-SNR rescaling where
            the model has it.
        prediction: what the model's network predicts.
    """

    abar: Float[Tensor, " n"]
    prediction: Prediction

    @classmethod
    def from_scheduler(cls, scheduler) -> "NoiseSchedule":
        """From a diffusers scheduler, whose `alphas_cumprod` is already rescaled where its config asks for
        that.

        Raises:
            ValueError: the scheduler's `prediction_type` is none of `Prediction`.
        """
        prediction = scheduler.config.prediction_type
        if prediction not in get_args(Prediction):
            raise ValueError(
                f"the model's scheduler predicts {prediction!r}; "
                f"expected one of {', '.join(get_args(Prediction))}"
            )
        return cls(scheduler.alphas_cumprod.double(), prediction)

    def at(self, t: Int[Tensor, " b"], like: Tensor) -> Tensor:
        """`abar` at `t`, shaped to broadcast over `like`, in its dtype or float32, whichever is wider."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        return self.abar.to(like.device, dtype)[t].view(-1, *[1] * (like.ndim - 1))

    def snr(self, t: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Signal-to-noise ratio `abar / (1 - abar)` (Hang et al. 2023, arXiv:2303.09556, sec. 3.2), in
        float64.
        """
        abar = self.abar.to(t.device)[t]
        return abar / (1 - abar)


def add_noise(schedule: NoiseSchedule, x0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
    """`xt` of DDPM's eq. 4, shaped like `x0`."""
    abar = schedule.at(t, x0)
    return (abar.sqrt() * x0 + (1 - abar).sqrt() * eps).to(x0.dtype)


def target_of(schedule: NoiseSchedule, x0: Tensor, eps: Tensor, t: Tensor, prediction: Prediction) -> Tensor:
    """What the network should answer: eps, x0, or `v = sqrt(abar) eps - sqrt(1 - abar) x0`
    (arXiv:2202.00512, app. D).
    """
    match prediction:
        case "epsilon":
            return eps
        case "sample":
            return x0
        case "v_prediction":
            abar = schedule.at(t, x0)
            return (abar.sqrt() * eps - (1 - abar).sqrt() * x0).to(x0.dtype)
        case _:
            raise ValueError(f"prediction={prediction!r}; expected one of {', '.join(get_args(Prediction))}")


Weighting = Callable[[Float[Tensor, " b"], Prediction], Float[Tensor, " b"]]
"""`(snr, prediction) -> weight` of each sample's squared error."""


def uniform(snr: Float[Tensor, " b"], prediction: Prediction) -> Float[Tensor, " b"]:
    """Every timestep counts the same."""
    return torch.ones_like(snr)


def min_snr(snr: Float[Tensor, " b"], prediction: Prediction, *, gamma: int | float) -> Float[Tensor, " b"]:
    """Min-SNR-gamma (arXiv:2303.09556, eq. 5): `min(snr, gamma)` on x0's error, carried over to what is
    predicted.

    An error in eps is `snr` times, one in v is `snr + 1` times the error in x0. At SNR 0 the eps form is
    0/0; its limit, 1, is used.
    """
    clamped = snr.clamp(max=gamma)
    match prediction:
        case "sample":
            return clamped
        case "v_prediction":
            return clamped / (snr + 1)
        case "epsilon":
            return torch.where(snr > 0, clamped / snr.clamp(min=torch.finfo(snr.dtype).tiny), 1.0)


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Squared error, elementwise, in float32."""
    return (output.float() - target.float()).square()


@dataclass(frozen=True)
class Objective:
    """What the network is trained to do, as one choice of each part.

    Attributes:
        prediction: overrides what the model's scheduler says it predicts; None keeps that.
        weighting: weight of a sample by its SNR.
        distance: elementwise loss between output and target.
    """

    prediction: Prediction | None = None
    weighting: Weighting = field(default=uniform)
    distance: Callable[[Tensor, Tensor], Tensor] = field(default=squared)

    def __call__(
        self,
        schedule: NoiseSchedule,
        predict: Predict,
        x0: Tensor,
        eps: Tensor,
        t: Int[Tensor, " b"],
        mask: Float[Tensor, "b 1 mh mw"] | None = None,
    ) -> Float[Tensor, " b"]:
        """Loss of each sample, weighted by its timestep, in float32.

        Args:
            schedule: what noise each timestep has.
            predict: the network.
            x0: latents `b c h w`.
            eps: their noise.
            t: their timesteps.
            mask: how much each place counts, in pixels or latents; the loss is the mean weighted by it. One
                that is zero everywhere makes its sample's loss zero.
        """
        prediction = self.prediction or schedule.prediction
        output = predict(add_noise(schedule, x0, eps, t), t)
        error = self.distance(output, target_of(schedule, x0, eps, t, prediction))
        return masked_mean(error, mask) * self.weighting(schedule.snr(t), prediction).to(error)


def masked_mean(error: Float[Tensor, "b ..."], mask: Tensor | None) -> Float[Tensor, " b"]:
    """Mean of each sample's error, weighted by its mask where there is one; a mask in pixels is averaged over
    each latent's area.
    """
    if mask is None:
        return error.flatten(1).mean(1)
    mask = adaptive_avg_pool2d(mask.to(error), (error.shape[-2], error.shape[-1]))
    total = mask.flatten(1).sum(1) * error.shape[1]
    return (error * mask).flatten(1).sum(1) / total.clamp(min=torch.finfo(total.dtype).tiny)


def min_snr_weighting(gamma: int | float) -> Weighting:
    """`min_snr` with its gamma set, for configs. Raises ValueError where gamma is not positive."""
    if not gamma > 0:
        raise ValueError(f"min-SNR's gamma must be positive, got {gamma}; the paper uses 5")
    return partial(min_snr, gamma=gamma)
