import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from PIL import Image

from lit_sd.adapters.full import Full
from lit_sd.generate import SCHEDULERS, generate, make_scheduler, to_pictures


def pixels(pictures):
    return [np.asarray(picture) for picture in pictures]


def test_pictures_have_the_models_size(tiny_model, family):
    pictures = generate(tiny_model(family), ["a cat"], [0], steps=2)
    assert [(p.size, p.mode) for p in pictures] == [((64, 64), "RGB")]
    assert np.asarray(pictures[0]).std() > 5


def test_sizes_may_be_others_and_are_height_by_width(tiny_model):
    (picture,) = generate(tiny_model("sdxl"), ["a cat"], [0], steps=2, height=48, width=80)
    assert picture.size == (80, 48)
    with pytest.raises(ValueError, match="multiples of 16"):
        generate(tiny_model("sdxl"), ["a cat"], [0], steps=2, height=56)


@pytest.mark.parametrize(("batch_size", "threads", "levels"), [(1, 2, 0), (3, 1, 0), (3, 2, 1)])
def test_a_seed_is_a_picture_whatever_is_drawn_beside_it(
    tiny_model, family, cpu_threads, batch_size, threads, levels
):
    """F33: the same pixels, however prompts are shared over ranks.

    Where several threads share a batch, how they cut it moves a sum's last bit, and with it a pixel in
    thousands by one level.
    """
    cpu_threads(threads)
    model = tiny_model(family)
    prompts, seeds = ["a cat", "two dogs", "a cat", "sks"], [1, 2, 3, 2]
    together = pixels(generate(model, prompts, seeds, steps=2, batch_size=batch_size))
    apart = [
        pixels(generate(model, [prompt], [seed], steps=2, batch_size=batch_size))[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    for one, other in zip(together, apart, strict=True):
        assert np.abs(one.astype(int) - other).max() <= levels
        assert (one != other).mean() <= 1e-3 * levels
    assert not np.array_equal(together[0], together[2])


def test_the_global_streams_and_the_models_state_stay(tiny_model):
    """F36."""
    model = tiny_model("sd15")
    Full().attach(model)
    modes = {name: module.training for name, module in model.named_modules()}
    torch.manual_seed(0)
    np.random.seed(0)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    generate(model, ["a cat"], [0], steps=2, scheduler="euler_a")
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], before_numpy)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert any(modes.values())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["sd15", "sd21", "sdxl"])
@pytest.mark.parametrize("negative", ["", "blurry"])
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_pictures_are_those_of_the_diffusers_pipeline(tiny_model, family, negative, guidance):
    model = tiny_model(family)
    (ours,) = pixels(generate(model, ["a cat"], [3], negative, steps=4, guidance=guidance))
    pipe = model.pipeline(make_scheduler(model, "ddim"))
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe(
        "a cat",
        negative_prompt=negative or None,
        generator=torch.Generator().manual_seed(3),
        num_inference_steps=4,
        guidance_scale=guidance,
        height=64,
        width=64,
        output_type="np",
    ).images[0]
    assert np.abs(ours - theirs * 255).max() < 0.51  # rounding to whole numbers


@pytest.mark.parametrize("name", [*SCHEDULERS, "HeunDiscreteScheduler"])
def test_every_scheduler_draws(tiny_model, name):
    (picture,) = generate(tiny_model("sd21"), ["a cat"], [0], steps=4, scheduler=name)
    assert np.asarray(picture).std() > 1


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("name", ["ddim", "euler", "dpmpp_2m", "unipc"])
def test_an_oracle_is_sampled_back_to_the_picture(tiny_model, name, prediction):
    """A network that knows the clean latents must lead every scheduler to them, whatever it is trained to
    tell of them.
    """
    model = tiny_model("sd15")
    model.train_as(prediction)
    clean = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(9))
    abar = model.noise_schedule().abar

    def oracle(noisy, t, cond, **extra):
        a = abar[t.long()].view(-1, 1, 1, 1).float()
        eps = (noisy - a.sqrt() * clean) / (1 - a).sqrt()
        v = a.sqrt() * eps - (1 - a).sqrt() * clean
        return {"epsilon": eps, "v_prediction": v, "sample": clean.expand_as(noisy)}[prediction]

    model.predict = oracle
    (got,) = pixels(generate(model, ["x"], [0], steps=20, guidance=1, scheduler=name))
    (want,) = pixels(to_pictures(model.decode_latents(clean)))
    assert np.abs(got.astype(int) - want).mean() < 3


def test_no_prompt_draws_nothing(tiny_model):
    assert generate(tiny_model("sd15"), [], []) == []


def test_progress_is_told_in_pictures(tiny_model):
    seen = []
    generate(tiny_model("sd15"), ["a"] * 3, [0, 1, 2], steps=1, batch_size=2, progress=seen.append)
    assert seen == [2, 1]


def test_negatives_may_differ(tiny_model):
    model = tiny_model("sd15")
    both = pixels(generate(model, ["a"] * 2, [0, 0], ["x", "y"], steps=2))
    assert not np.array_equal(*both)
    assert np.array_equal(both[1], pixels(generate(model, ["a"], [0], "y", steps=2))[0])


def test_chunked_captions_and_short_negatives_fit_together(tiny_model, family):
    generate(tiny_model(family, caption_chunks=3), ["a " * 150], [0], "bad", steps=1)


@pytest.mark.parametrize(
    "wrong",
    [{"seeds": [1]}, {"negative": ["a"]}, {"steps": 0}, {"batch_size": 0}, {"scheduler": "eular"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_arguments_are_named(tiny_model, wrong):
    arguments = {"prompts": ["a", "b"], "seeds": [1, 2], "steps": 1} | wrong
    with pytest.raises(ValueError, match=r"expected"):
        generate(tiny_model("sd15"), **arguments)


def test_a_schedule_with_zero_terminal_snr_starts_at_its_end(tiny_model):
    model = tiny_model("sd21")
    model.sampling_config["rescale_betas_zero_snr"] = True
    sampler = make_scheduler(model)
    assert isinstance(sampler, DDIMScheduler)
    sampler.set_timesteps(5)
    assert sampler.timesteps[0] == 999
    assert sampler.config.prediction_type == "v_prediction"


def test_pixels_outside_are_clipped():
    (picture,) = to_pictures(torch.tensor([-3.0, 0.0, 3.0]).view(1, 3, 1, 1))
    assert isinstance(picture, Image.Image)
    assert picture.getpixel((0, 0)) == (0, 128, 255)
