"""Training one diffusion model: what the adapter opens learns what the objective asks, on whatever the data
yields.

Shape legend: b batch, c latent channels, h/w latents, k strata of timesteps.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_sd.adapters.base import Adapter
from lit_sd.data.cache import EncoderCache, Moments
from lit_sd.data.captions import length_report
from lit_sd.generate import generate
from lit_sd.models.stable_diffusion import StableDiffusion
from lit_sd.objectives import NoiseSchedule, Objective
from lit_sd.randomness import generator_of
from lit_sd.trainable import Groups, StepRecord, Trainable, all_finite
from lit_sd.types import Batch, Conditioning, Latents

log = logging.getLogger(__name__)


class StableDiffusionModule(Trainable):
    """Latents, noise, timesteps and captions in; the objective's loss out.

    Args:
        model: all frozen; the adapter opens what trains.
        adapter: attached at once.
        objective: loss of each example, from latents, noise and timesteps.
        optimizer: `parameter groups -> Optimizer`.
        scheduler: `(optimizer, updates) -> LRScheduler`, or None for a constant rate.
        seed: root of every random stream.
        caption_dropout: share of captions that are emptied, drawn anew for each use.
        component_lr: learning rate by component, where it differs from the optimizer's.
        val_strata: each validation example is judged once in each of this many equal ranges of timesteps.

    Attributes:
        cache: keeps what the frozen VAE and text encoders gave for a picture or caption; None encodes each
            time. `lit_sd.caching` sets it.

    Raises:
        ValueError: a share is out of range, nothing trains, or `component_lr` names what does not.
    """

    def __init__(
        self,
        model: StableDiffusion,
        adapter: Adapter,
        objective: Objective,
        optimizer: Callable[..., Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        seed: int = 0,
        caption_dropout: float = 0.0,
        component_lr: Mapping[str, float] | None = None,
        val_strata: int = 4,
    ) -> None:
        super().__init__(optimizer, scheduler, seed)
        if not 0 <= caption_dropout <= 1:
            raise ValueError(f"task.caption_dropout={caption_dropout}; expected a share between 0 and 1")
        if val_strata < 1:
            raise ValueError(f"task.val_strata={val_strata}; expected 1 or more")
        self.model = model
        self.adapter = adapter
        self.objective = objective
        self.caption_dropout = caption_dropout
        self.component_lr = dict(component_lr or {})
        adapter.attach(model)
        self.schedule = model.noise_schedule()
        self.val_strata = val_strata
        self.val_totals = torch.zeros(val_strata, 2, dtype=torch.float64)
        self.cache: EncoderCache | None = None
        self.parameter_groups()  # a component_lr that fits nothing is said before any data is read

    def base_identity(self) -> str:
        return self.model.identity

    def networks(self) -> Iterable[nn.Module]:
        return self.model.components().values()

    def parameter_groups(self) -> Groups:
        """One group for each component that trains, under diffusers' name for it."""
        groups: Groups = []
        for name, part in self.model.components().items():
            if trained := [p for p in part.parameters() if p.requires_grad]:
                rate = {"lr": self.component_lr[name]} if name in self.component_lr else {}
                groups.append({"name": name, "params": trained, **rate})
        if wrong := sorted(self.component_lr.keys() - {group["name"] for group in groups}):
            trains = ", ".join(group["name"] for group in groups) or "nothing"
            raise ValueError(
                f"task.component_lr sets a rate for {', '.join(wrong)}, where {trains} trains. Name one of "
                "these, or add the component to adapter.components"
            )
        return groups

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._adopt_prediction()
        self._move_schedule()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self._adopt_prediction()

    def _adopt_prediction(self) -> None:
        """Sampling and exports follow what the objective trains; class images, made before, do not."""
        own, trained = self.schedule.prediction, self.objective.prediction
        if trained is not None and trained != own:
            log.warning(
                "the base predicts %s; it is trained, sampled and exported as %s from now on", own, trained
            )
            self.model.train_as(trained)
            self.schedule = self.model.noise_schedule()

    def on_validation_start(self) -> None:
        self._move_schedule()

    def on_test_start(self) -> None:
        self._move_schedule()

    def _move_schedule(self) -> None:
        # Once, since moving it in each step would make the GPU wait for the host.
        self.schedule = NoiseSchedule(self.schedule.abar.to(self.device), self.schedule.prediction)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        latents, t, losses = self.losses(batch)
        seen = {"pixels": all_finite(batch["pixels"])} if "pixels" in batch else {}
        parts = {**seen, "latents": all_finite(latents)}
        self.record = StepRecord(batch["ids"], losses.detach(), t, parts)
        loss = (losses * batch["weight"].to(losses)).sum()
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=len(losses))
        return loss

    def losses(self, batch: Batch) -> tuple[Latents, Int[Tensor, " b"], Float[Tensor, " b"]]:
        """Latents, timesteps and loss of each example, at the current step's draws."""
        latents = self.model.draw_latents(*self._moments(batch), self.draws.generator("vae", self.device))
        noise_from = self.draws.generator("noise", self.device)
        eps = torch.randn(latents.shape, generator=noise_from, device=self.device, dtype=latents.dtype)
        t = torch.randint(len(self.schedule.abar), (len(latents),), generator=noise_from, device=self.device)
        drop = None
        if self.caption_dropout:
            drop = torch.rand(len(latents), generator=self.draws.generator("captions")) < self.caption_dropout
        predict = self.predictor(batch, self.model.condition(batch, drop, self._text_cache()))
        return latents, t, self.objective(self.schedule, predict, latents, eps, t, batch.get("mask"))

    def _moments(self, batch: Batch) -> Moments:
        if "moments" in batch:
            return batch["moments"][:, 0], batch["moments"][:, 1]
        if self.cache is None or trains(self.model.vae):
            return self.model.moments(batch["pixels"])
        return self.cache.moments(batch["pixels"], self.model.moments)

    def _text_cache(self) -> Callable[[list[str]], Conditioning] | None:
        encoders = [part for name, part in self.model.components().items() if name.startswith("text_encoder")]
        if self.cache is None or any(trains(encoder) for encoder in encoders):
            return None
        return self._cached_text

    def _cached_text(self, captions: list[str]) -> Conditioning:
        assert self.cache is not None
        cond = self.cache.text(captions, self.model.encode_text)
        pooled = None if cond.pooled is None else cond.pooled.to(self.device)
        return Conditioning(cond.hidden.to(self.device), pooled)

    def predictor(self, batch: Batch, cond: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """The network with its conditioning filled in, as the objective calls it."""

        def predict(noisy: Tensor, t: Tensor) -> Tensor:
            extra = self.adapter.unet_kwargs(self.model, batch, noisy, t, cond)
            return self.model.predict(noisy, t, cond, **extra)

        return predict

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_totals += self.fixed_losses(batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_totals += self.fixed_losses(batch)

    def on_validation_epoch_start(self) -> None:
        self.val_totals.zero_()

    def on_test_epoch_start(self) -> None:
        self.val_totals.zero_()

    def on_validation_epoch_end(self) -> None:
        self._log_totals("val")

    def on_test_epoch_end(self) -> None:
        self._log_totals("test")

    @torch.no_grad()
    def fixed_losses(self, batch: Batch) -> Float[Tensor, "k 2"]:
        """Sum of losses and number of examples, by stratum of timesteps.

        Noise, timesteps and the VAE's sample belong to the example's id, whatever the batch, the rank and the
        step are. Examples of weight 0 only fill the batch and count nothing.
        """
        counted = batch["weight"].cpu() > 0
        streams = [generator_of("validation", self.seed, name) for name in batch["ids"]]
        if "moments" in batch:
            moments = [(mean[None], std[None]) for mean, std in batch["moments"]]
        else:  # not kept in memory, which is for training
            moments = [self.model.moments(x[None]) for x in batch["pixels"]]
        latents = torch.cat(
            [self.model.draw_latents(*pair, g) for pair, g in zip(moments, streams, strict=True)]
        )
        predict = self.predictor(batch, self.model.condition(batch, encode=self._text_cache()))
        count = len(self.schedule.abar)
        totals = torch.zeros(self.val_strata, 2, dtype=torch.float64)
        for stratum in range(self.val_strata):
            low, high = stratum * count // self.val_strata, (stratum + 1) * count // self.val_strata
            t = torch.cat([torch.randint(low, high, (1,), generator=g) for g in streams])
            eps = torch.stack([torch.randn(latents.shape[1:], generator=g) for g in streams])
            t, eps = t.to(self.device), eps.to(latents)
            losses = self.objective(self.schedule, predict, latents, eps, t, batch.get("mask"))
            totals[stratum] = torch.stack([losses.double().cpu()[counted].sum(), counted.sum()])
        return totals

    def _log_totals(self, stage: str) -> None:
        """Mean loss over all ranks' examples, overall and by stratum."""
        totals = self.trainer.strategy.reduce(self.val_totals.float().to(self.device), reduce_op="sum")
        count, means = len(self.schedule.abar), (totals[:, 0] / totals[:, 1]).tolist()
        self.log(f"{stage}/loss", sum(means) / len(means), prog_bar=True, sync_dist=True)
        for stratum, mean in enumerate(means):
            low, high = stratum * count // self.val_strata, (stratum + 1) * count // self.val_strata
            self.log(f"{stage}/loss_t{low}-{high}", mean, sync_dist=True)

    def caption_report(self, captions: Sequence[str]) -> str | None:
        """One line on captions that are longer than the text encoder reads, or None."""
        limit = 75 * self.model.caption_chunks + 2
        return length_report(captions, lambda caption: self.model.token_counts([caption])[0], limit)

    def sample(self, prompts: Sequence[str], seeds: Sequence[int], **options: Any) -> list[Image.Image]:
        """Pictures of the model as it stands, one for each pair of prompt and seed; see `generate`."""
        return generate(self.model, list(prompts), list(seeds), **options)

    def export(self, folder: Path) -> list[Path]:
        """Write what was trained in the format that other programs read, and name the files."""
        return self.adapter.export(self.model, folder)


def trains(network: nn.Module) -> bool:
    """Whether any of its parameters is open."""
    return any(p.requires_grad for p in network.parameters())
