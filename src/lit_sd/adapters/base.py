"""What an adapter is: it opens what trains, and it writes what other programs read."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lit_sd.models.stable_diffusion import StableDiffusion
from lit_sd.types import Batch, Conditioning, Latents, Timesteps


class Adapter:
    """What is trainable and how it is exported. Everything else follows from `requires_grad`.

    An adapter comes to a model that is frozen throughout. What it opens is float32 and in train mode
    afterwards.
    """

    def attach(self, model: StableDiffusion) -> None:
        """Add or open what trains. Called once, before an optimizer exists."""
        raise NotImplementedError

    def unet_kwargs(
        self, model: StableDiffusion, batch: Batch, noisy: Latents, t: Timesteps, cond: Conditioning
    ) -> dict[str, Any]:
        """More keyword arguments for the UNet's forward, for adapters with an input of their own."""
        return {}

    def export(self, model: StableDiffusion, folder: Path) -> list[Path]:
        """Write what was trained in the form that diffusers reads. Returns what to name to a user: files or a
        folder.
        """
        raise NotImplementedError


def component(model: StableDiffusion, name: str) -> nn.Module:
    """A model's network by diffusers' name.

    Raises:
        ValueError: this family has no such network, or it is the VAE, which no adapter trains.
    """
    trainable = {key: part for key, part in model.components().items() if key != "vae"}
    if name not in trainable:
        raise ValueError(
            f"adapter.components names {name!r}, but a model of family {model.family} can train "
            f"{', '.join(trainable)}"
        )
    return trainable[name]


def trainable_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that train, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
