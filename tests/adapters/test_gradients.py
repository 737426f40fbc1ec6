"""F27: whatever trains gets a gradient, with and without checkpointing, though all inputs are frozen."""

from contextlib import contextmanager

import pytest
import torch

from lit_sd.adapters.base import trainable_tensors
from lit_sd.adapters.full import Full
from lit_sd.adapters.peft import lora

CELLS = [
    ("sd15", "unet"),
    ("sd15", "text_encoder"),
    ("sd21", "text_encoder"),
    ("sdxl", "unet"),
    ("sdxl", "text_encoder"),
    ("sdxl", "text_encoder_2"),
    ("sdxl_refiner", "text_encoder_2"),
]


def gradients(model):
    batch = {
        "captions": ["a cat", "two dogs"],
        "original_size": torch.tensor([[64, 64]] * 2),
        "crop_top_left": torch.zeros(2, 2, dtype=torch.long),
        "target_size": torch.tensor([[64, 64]] * 2),
    }
    noisy = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    output = model.predict(noisy, torch.tensor([10, 500]), model.condition(batch))
    output.square().mean().backward()
    return {name: p.grad for name, p in trainable_tensors(model).items()}


def inner_layer(model, name):
    """A layer inside a block that checkpointing runs again."""
    part = getattr(model, name)
    if name == "unet":
        return part.up_blocks[-1].resnets[-1].conv1
    return getattr(part, "text_model", part).encoder.layers[0].mlp.fc1


@contextmanager
def passes(layer):
    """Counts a layer's forward passes."""
    count = []
    handle = layer.register_forward_hook(lambda *_: count.append(1))
    yield count
    handle.remove()


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(("family", "name"), CELLS)
def test_all_that_trains_gets_the_gradient_that_it_gets_without_checkpointing(
    tiny_model, family, name, method
):
    found = []
    for checkpointing in (False, True):
        model = tiny_model(family, gradient_checkpointing=checkpointing)
        adapter = lora(rank=2, components=[name]) if method == "lora" else Full([name])
        torch.manual_seed(0)
        adapter.attach(model)
        with torch.no_grad():
            for key, p in trainable_tensors(model).items():
                if ".lora_" in key:  # B starts at zero, and A has no gradient then
                    p.copy_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(key))))
        with passes(inner_layer(model, name)) as count:
            found.append(gradients(model))
        assert len(count) == (2 if checkpointing else 1)  # once more on the way back
    plain, checkpointed = found
    assert plain.keys() == checkpointed.keys()
    for key, grad in plain.items():
        assert grad is not None, key
        assert grad.isfinite().all(), key
        torch.testing.assert_close(checkpointed[key], grad, rtol=1e-4, atol=1e-7)
    # a key's bias shifts all attention scores of a row alike, so its gradient is zero by nature
    dead = [key for key, grad in plain.items() if not grad.any() and "k_proj.bias" not in key]
    assert not dead, dead
