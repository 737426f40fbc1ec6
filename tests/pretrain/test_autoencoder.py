import math

import pytest
import torch

from lit_sd.pretrain.autoencoder import (
    AutoencoderModule,
    new_autoencoder,
    psnr,
    reconstruction_losses,
    standardise,
)


def tiny(seed=0):
    torch.manual_seed(seed)
    return new_autoencoder(channels=[4, 8], layers=1, latent_channels=3, groups=2, size=16)


def test_psnr_by_hand():
    target = torch.zeros(3, 3, 2, 2)
    output = target + torch.tensor([0.2, 1.0, 3.0]).view(3, 1, 1, 1)  # the last is clamped to 1
    torch.testing.assert_close(
        psnr(output, target), torch.tensor([20.0, 10 * math.log10(4), 10 * math.log10(4)])
    )


def test_losses_by_hand():
    target = torch.zeros(1, 3, 8, 8)
    column = target.clone()
    column[..., 3] = 1.0
    parts = reconstruction_losses(column, target)
    assert parts["pixel"].item() == pytest.approx(1 / 8)
    assert parts["edge"].item() == pytest.approx(2 / 7)  # two of seven steps across, none down
    assert parts["colour"].item() == pytest.approx(1 / 8)
    balanced = column.clone()
    balanced[..., 4] = -1.0
    assert reconstruction_losses(balanced, target)["colour"].item() == 0


def test_standardising_changes_the_latents_scale_and_not_the_pictures():
    vae, pictures = tiny().double(), torch.rand(6, 3, 16, 16).double() * 2 - 1
    vae.quant_conv.bias.data += torch.tensor([3.0, -2, 1, 0, 0, 0])
    with torch.no_grad():
        before = vae.encode(pictures).latent_dist
        picture = vae.decode(before.mean).sample
        spread = before.std / before.mean.std((0, 2, 3), correction=0)[None, :, None, None]
        standardise(vae, [pictures[:4], pictures[4:]])
        after = vae.encode(pictures).latent_dist
    torch.testing.assert_close(after.mean.mean((0, 2, 3)), torch.zeros(3).double(), atol=1e-9, rtol=0)
    torch.testing.assert_close(after.mean.std((0, 2, 3), correction=0), torch.ones(3).double())
    torch.testing.assert_close(after.std, spread)
    torch.testing.assert_close(vae.decode(after.mean).sample, picture)
    assert vae.config.scaling_factor == 1.0


def test_standardising_on_nothing_is_refused():
    with pytest.raises(ValueError, match="no pictures"):
        standardise(tiny(), [])


def module(**options):
    settings = {
        "seed": 0,
        "edge_weight": 1.0,
        "colour_weight": 1.0,
        "kl_weight": 1e-3,
        "recolour": 0.0,
        **options,
    }
    return AutoencoderModule(tiny(), lambda groups: torch.optim.AdamW(groups, lr=1e-3), **settings)


def test_recolouring_permutes_channels_of_whole_pictures():
    pixels = torch.rand(64, 3, 4, 4)
    changed = module(recolour=1.0)._recoloured(pixels)
    torch.testing.assert_close(changed.sort(1).values, pixels.sort(1).values)
    differ = (changed != pixels).flatten(1).any(1).float().mean().item()
    assert 0.6 < differ < 1  # five of the six orders are new ones
    torch.testing.assert_close(module()._recoloured(pixels), pixels)


def test_crops_are_windows_of_their_picture():
    pixels = torch.arange(2 * 3 * 6 * 6.0).view(2, 3, 6, 6)
    crops = module(crop=4)._cropped(pixels)
    assert crops.shape == (2, 3, 4, 4)
    for picture, crop in zip(pixels, crops, strict=True):
        windows = picture.unfold(1, 4, 1).unfold(2, 4, 1).permute(1, 2, 0, 3, 4).reshape(-1, 3, 4, 4)
        assert any(torch.equal(crop, window) for window in windows)
    assert module(crop=6)._cropped(pixels) is pixels
    assert module()._cropped(pixels) is pixels


def test_steps_lower_the_loss():
    task, pixels = module(), torch.rand(4, 3, 16, 16) * 2 - 1
    task.log = lambda *a, **k: None
    batch = {"pixels": pixels, "ids": list("abcd"), "source": ["x"] * 4, "weight": torch.full((4,), 0.25)}
    optimizer = task.make_optimizer(task.parameter_groups())
    losses = []
    for step in range(30):
        optimizer.zero_grad()
        loss = task.training_step(batch, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
