import pytest
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline


@pytest.fixture
def draw():
    """Latents that a pipeline draws for one prompt with its own loop, in fp32."""

    def make(pipe):
        pipe.set_progress_bar_config(disable=True)
        more = {"height": 64, "width": 64}
        if isinstance(pipe, StableDiffusionXLImg2ImgPipeline):
            image = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
            more = {"image": image, "strength": 1.0}
        generator = torch.Generator().manual_seed(0)
        return pipe(
            "a photo of a cat",
            generator=generator,
            num_inference_steps=3,
            guidance_scale=3.0,
            output_type="latent",
            **more,
        ).images

    return make


@pytest.fixture
def disturb():
    """Change all that trains, by enough to be seen in a picture; as training would, but at once."""

    def change(model, scale=0.3):
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p += (
                        scale
                        * (p.std() if p.numel() > 1 and p.std() > 0 else 0.1)
                        * torch.randn(p.shape, generator=generator)
                    )

    return change
