import pytest
import torch
from diffusers import DiffusionPipeline

from lit_sd.generate import make_scheduler
from lit_sd.models.loading import load
from lit_sd.objectives import NoiseSchedule, add_noise

CAPTIONS = ["a photo of a cat", "two dogs", ""]


def batch_of(captions, original=(40, 80), crop=(0, 8), target=(64, 64)):
    rows = [torch.tensor([pair] * len(captions)) for pair in (original, crop, target)]
    names = ("original_size", "crop_top_left", "target_size")
    return {"captions": captions, **dict(zip(names, rows, strict=True))}


def test_family_parts_and_frozenness(tiny_model, family):
    model = tiny_model(family)
    wanted = {
        "sd15": ["unet", "vae", "text_encoder"],
        "sd21": ["unet", "vae", "text_encoder"],
        "sdxl": ["unet", "vae", "text_encoder", "text_encoder_2"],
        "sdxl_refiner": ["unet", "vae", "text_encoder_2"],
    }
    assert model.family == family
    assert list(model.components()) == wanted[family]
    assert not any(p.requires_grad for p in model.parameters())
    assert not any(module.training for module in model.modules())
    assert (model.vae_scale_factor, model.default_size) == (8, 64)


def test_noise_schedule_has_the_models_prediction(tiny_model, family):
    schedule = tiny_model(family).noise_schedule()
    assert isinstance(schedule, NoiseSchedule)
    assert schedule.prediction == ("v_prediction" if family == "sd21" else "epsilon")
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    torch.testing.assert_close(schedule.abar, (1 - betas).cumprod(0), rtol=1e-4, atol=0)


def test_zero_terminal_snr_reaches_the_noise_schedule(tiny_model_dir, tmp_path):
    import json
    import shutil

    folder = shutil.copytree(tiny_model_dir("sd21"), tmp_path / "zero")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rescale_betas_zero_snr": True}))
    schedule = load(str(folder)).noise_schedule()
    assert schedule.abar[-1].item() == pytest.approx(0, abs=1e-6)
    assert (
        add_noise(schedule, torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), torch.tensor([999])).abs() < 1e-3
    )


# Text


@pytest.mark.parametrize("captions", [CAPTIONS, ["x " * 200, "a"]], ids=["short", "too_long"])
def test_text_is_what_the_pipeline_makes_of_it(tiny_model, tiny_model_dir, family, captions):
    model, pipe = tiny_model(family), DiffusionPipeline.from_pretrained(tiny_model_dir(family))
    cond = model.encode_text(captions)
    with torch.no_grad():
        made = pipe.encode_prompt(
            captions, device=torch.device("cpu"), num_images_per_prompt=1, do_classifier_free_guidance=False
        )
    assert torch.equal(cond.hidden, made[0])
    if family.startswith("sdxl"):
        assert torch.equal(cond.pooled, made[2])
    else:
        assert cond.pooled is None
    width = 32 + 40 if family == "sdxl" else 32
    assert cond.hidden.shape == (len(captions), 77, width)


def test_negative_text_is_what_the_pipeline_makes_of_no_negative_prompt(tiny_model, tiny_model_dir, family):
    model, pipe = tiny_model(family), DiffusionPipeline.from_pretrained(tiny_model_dir(family))
    drop = torch.tensor([True, True])
    empty = model.drop_captions(model.encode_text(["", ""]), drop)
    with torch.no_grad():
        made = pipe.encode_prompt(
            ["a", "b"], device=torch.device("cpu"), num_images_per_prompt=1, do_classifier_free_guidance=True
        )
    assert torch.equal(empty.hidden, made[1])
    if family.startswith("sdxl"):
        assert torch.equal(empty.pooled, made[3])
    assert (empty.hidden.abs().max() == 0) == (family == "sdxl")


def test_dropped_captions_drop_in_all_encoders_and_the_pooled_vector(tiny_model, family):
    model = tiny_model(family)
    drop = torch.tensor([False, True, False])
    cond = model.condition(batch_of(CAPTIONS), drop)
    kept = model.encode_text(CAPTIONS)
    none = model.drop_captions(model.encode_text([""]), torch.tensor([True]))
    torch.testing.assert_close(cond.hidden[[0, 2]], kept.hidden[[0, 2]])
    torch.testing.assert_close(cond.hidden[1], none.hidden[0])
    if cond.pooled is not None:
        torch.testing.assert_close(cond.pooled[1], none.pooled[0])
        torch.testing.assert_close(cond.pooled[0], kept.pooled[0])


def test_token_counts_are_before_the_cut(tiny_model):
    assert tiny_model("sd15").token_counts(["", "ab", "a " * 100]) == [2, 4, 102]


def test_long_captions_may_use_more_windows(tiny_model, family):
    model = tiny_model(family, caption_chunks=3)
    long = "a " * 75 + "b " * 75  # two full windows at byte level
    cond = model.encode_text([long, "c"])
    first, second = (tiny_model(family).encode_text([letter * 75]) for letter in ("a ", "b "))
    assert cond.hidden.shape[1] == 2 * 77
    torch.testing.assert_close(cond.hidden[0, :77], first.hidden[0])
    torch.testing.assert_close(cond.hidden[0, 77:], second.hidden[0])
    if cond.pooled is not None:
        torch.testing.assert_close(cond.pooled[0], first.pooled[0])


def test_windows_are_no_more_than_allowed_nor_than_needed(tiny_model):
    model = tiny_model("sd15", caption_chunks=2)
    assert model.encode_text(["a " * 400]).hidden.shape[1] == 2 * 77
    assert model.encode_text(["a", ""]).hidden.shape[1] == 77
    assert torch.equal(model.encode_text(["a b"]).hidden, tiny_model("sd15").encode_text(["a b"]).hidden)


# Sizes (F08)


def test_size_ids_are_original_then_crop_then_target_each_height_first(tiny_model):
    cond = tiny_model("sdxl").condition(batch_of(["a"], original=(40, 80), crop=(3, 8), target=(64, 32)))
    assert cond.time_ids.tolist() == [[40, 80, 3, 8, 64, 32]]


def test_the_refiner_takes_an_aesthetic_score_for_the_target_size(tiny_model):
    cond = tiny_model("sdxl_refiner").condition(batch_of(["a"], original=(40, 80), crop=(3, 8)))
    assert cond.time_ids.tolist() == [[40, 80, 3, 8, 6]]


def test_other_families_have_no_size_ids(tiny_model):
    assert tiny_model("sd15").condition(batch_of(["a"])).time_ids is None


# Latents


def test_latents_are_the_posteriors_draw_in_the_unets_scale(tiny_model, family):
    model = tiny_model(family)
    pixels = torch.rand(2, 3, 64, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = model.encode_images(pixels, torch.Generator().manual_seed(5))
    noise = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        mean, logvar = model.vae.quant_conv(model.vae.encoder(pixels)).chunk(2, dim=1)
    scale = 0.13025 if family.startswith("sdxl") else 0.18215
    torch.testing.assert_close(latents, (mean + (logvar / 2).exp() * noise) * scale)


def test_a_shift_in_the_vaes_config_is_undone_by_decoding(tiny_model):
    model = tiny_model("sd15")
    pixels = torch.zeros(1, 3, 64, 64)
    plain = model.encode_images(pixels, torch.Generator().manual_seed(0))
    seen = model.decode_latents(plain)
    model.vae.register_to_config(shift_factor=0.5)
    shifted = model.encode_images(pixels, torch.Generator().manual_seed(0))
    torch.testing.assert_close(shifted, plain - 0.5 * 0.18215)
    torch.testing.assert_close(model.decode_latents(shifted), seen)


def test_encoding_draws_from_its_generator_alone(tiny_model):
    model, pixels = tiny_model("sd15"), torch.zeros(1, 3, 64, 64)
    before = torch.get_rng_state()
    model.encode_images(pixels, torch.Generator().manual_seed(0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("how", ["loaded", "cast"])
def test_the_vae_is_never_float16(tiny_model, how, caplog):
    model = tiny_model("sdxl", dtype="float16" if how == "loaded" else "float32")
    if how == "cast":
        model.half()
    latents = model.encode_images(torch.zeros(1, 3, 64, 64))
    assert model.vae.dtype == torch.float32
    assert latents.dtype == torch.float32
    assert ("float16" in caplog.text) == (how == "cast")


def test_the_vae_leaves_float16_autocast(tiny_model):
    model, pixels = tiny_model("sdxl"), torch.zeros(1, 3, 64, 64)
    plain = model.encode_images(pixels, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.float16):
        cast = model.encode_images(pixels, torch.Generator().manual_seed(0))
    assert torch.equal(plain, cast)


# The network


def test_prediction_is_the_unets_own(tiny_model):
    model = tiny_model("sdxl")
    cond = model.condition(batch_of(["a", "b"]))
    noisy, t = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 700])
    more = {"text_embeds": cond.pooled, "time_ids": cond.time_ids}
    want = model.unet(noisy, t, cond.hidden, added_cond_kwargs=more).sample
    assert torch.equal(model.predict(noisy, t, cond), want)


def test_extra_arguments_reach_the_unet(tiny_model):
    model = tiny_model("sd15")
    cond = model.condition(batch_of(["a"]))
    noisy, t = torch.zeros(1, 4, 8, 8), torch.tensor([3])
    plain = model.predict(noisy, t, cond)
    skips = [torch.ones(1, c, side, side) for c, side in ((16, 8), (16, 8), (16, 4), (32, 4))]
    more = {
        "down_block_additional_residuals": skips,
        "mid_block_additional_residual": torch.ones(1, 32, 4, 4),
    }
    pushed = model.predict(noisy, t, cond, **more)
    assert not torch.equal(plain, pushed)


def test_the_pipeline_shares_the_live_networks(tiny_model, family):
    model = tiny_model(family)
    pipe = model.pipeline()
    for name, part in model.components().items():
        assert getattr(pipe, name) is part
    assert type(pipe.scheduler).__name__ == ("DDIMScheduler" if family < "sdxl" else "EulerDiscreteScheduler")
    assert pipe.config.get("requires_aesthetics_score", False) == (family == "sdxl_refiner")


def test_a_model_can_be_pickled(tiny_model):
    """Launchers that spawn processes do that."""
    import pickle

    model = tiny_model("sd15")
    again = pickle.loads(pickle.dumps(model))
    assert again.identity == model.identity


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_what_it_is_trained_as_is_what_every_scheduler_says(tiny_model, family, prediction):
    model = tiny_model(family)
    before, kind = model.noise_schedule(), type(model.sampling_scheduler())
    model.train_as(prediction)
    after = model.noise_schedule()
    assert after.prediction == prediction
    assert torch.equal(after.abar, before.abar)
    made = [model.scheduler, model.sampling_scheduler(), model.pipeline().scheduler, make_scheduler(model)]
    assert [scheduler.config.prediction_type for scheduler in made] == [prediction] * 4
    assert type(made[1]) is type(made[2]) is kind


def test_what_the_schedulers_file_leaves_open_can_be_set_too(tiny_model_dir, tmp_path):
    """SD 1.5's published config has no prediction_type, and diffusers forgets what stands for such a key."""
    import json
    import shutil

    folder = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "published")
    config = folder / "scheduler" / "scheduler_config.json"
    published = json.loads(config.read_text())
    del published["prediction_type"]
    config.write_text(json.dumps(published))
    model = load(str(folder), prediction="v_prediction")
    made = [
        model.scheduler,
        model.sampling_scheduler(),
        make_scheduler(model),
        make_scheduler(model, "euler"),
    ]
    assert [scheduler.config.prediction_type for scheduler in made] == ["v_prediction"] * 4
