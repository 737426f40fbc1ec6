"""Full fine-tuning: every weight of the named networks trains."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from lit_sd.adapters.base import Adapter, component
from lit_sd.models.families import TrainedComponent
from lit_sd.models.saving import save_folder, save_single_file
from lit_sd.models.stable_diffusion import StableDiffusion


class Full(Adapter):
    """Open all weights of some networks.

    Args:
        components: which, by diffusers' names; text encoders train only when they are named.
        export_dtype: of the exported weights; None keeps what is in memory.
        single_file: write `model.safetensors` beside the folder's parts, for programs that read single files.

    Raises:
        ValueError: no component is named.
    """

    def __init__(
        self,
        components: Sequence[TrainedComponent] = ("unet",),
        export_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        single_file: bool = False,
    ) -> None:
        if not components:
            raise ValueError(
                "adapter.components is empty, so nothing would train; expected e.g. [unet] or "
                "[unet,text_encoder]"
            )
        self.components = list(dict.fromkeys(components))
        self.dtype = getattr(torch, export_dtype) if export_dtype else None
        self.single_file = single_file

    def attach(self, model: StableDiffusion) -> None:
        """Open the networks, but for layers whose output the family never uses: they would get no
        gradient.
        """
        for name in self.components:
            part = component(model, name)
            part.float().train()
            idle = model.idle_modules(name)
            for key, parameter in part.named_parameters():
                parameter.requires_grad_(not key.startswith(idle))

    def export(self, model: StableDiffusion, folder: Path) -> list[Path]:
        """The whole pipeline as a diffusers folder: `StableDiffusionPipeline.from_pretrained(folder)` reads
        it.
        """
        written = [save_folder(model, folder, self.dtype)]
        if self.single_file:
            written.append(save_single_file(model, folder / "model.safetensors", self.dtype))
        return written
