"""What caches of encoders' outputs depend on: their content, and nothing else of the model."""

import pytest
import torch

from lit_sd.models.encoders import text_identity, vae_identity


def both(model):
    return vae_identity(model), text_identity(model)


def test_equal_weights_are_one_whoever_loads_them(tiny_model, family):
    a, b = tiny_model(family), tiny_model(family)
    assert both(a) == both(b)
    assert len(set(both(a))) == 2


def test_other_networks_change_nothing(tiny_model):
    model = tiny_model("sdxl")
    with torch.no_grad():
        next(model.unet.parameters()).add_(1)
    model.train_as("v_prediction")
    assert both(model) == both(tiny_model("sdxl"))


@pytest.mark.parametrize("part", ["vae", "text_encoder", "text_encoder_2"])
def test_a_changed_weight_changes_its_own(tiny_model, part):
    model, before = tiny_model("sdxl"), both(tiny_model("sdxl"))
    with torch.no_grad():
        list(getattr(model, part).parameters())[-1].view(-1)[0].add_(1e-3)
    changed = [a != b for a, b in zip(both(model), before, strict=True)]
    assert changed == [part == "vae", part != "vae"]


def test_how_they_are_used_counts(tiny_model):
    before = both(tiny_model("sd15"))
    chunked = tiny_model("sd15", caption_chunks=3)
    assert both(chunked) == (before[0], text_identity(chunked))
    assert text_identity(chunked) != before[1]
    half = tiny_model("sd15", dtype="bfloat16")
    assert all(a != b for a, b in zip(both(half), before, strict=True))


def test_precision_counts_where_it_changes_what_comes_out(tiny_model):
    model = tiny_model("sd15")
    before = both(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(a != b for a, b in zip(both(model), before, strict=True))
    with torch.autocast("cpu", torch.float16):  # in which the VAE never runs
        assert vae_identity(model) == before[0]
        assert text_identity(model) != before[1]


def test_what_the_tokenizer_did_last_does_not_count(tiny_model):
    model = tiny_model("sd15")
    before = text_identity(model)
    model.tokenizer(["a cat"], padding="max_length", max_length=20, truncation=True)
    assert text_identity(model) == before


def test_another_padding_token_counts(tiny_model):
    model = tiny_model("sd15")
    before = text_identity(model)
    model.tokenizer.pad_token = "!"
    assert text_identity(model) != before
