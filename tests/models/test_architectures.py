"""The shipped architectures have the published models' shapes. Big networks exist on the meta device only."""

import json

import pytest
import torch

from lit_sd.models.architectures import (
    ARCHITECTURES,
    architecture_folder,
    build_part,
    build_random,
    config_of,
)
from lit_sd.models.components import part_names
from lit_sd.models.families import COMPONENTS, recognise
from lit_sd.models.loading import load

PUBLISHED = {
    ("sd15", "unet"): 859_520_964,
    ("sd15", "vae"): 83_653_863,
    ("sd15", "text_encoder"): 123_060_480,
    ("sd21", "unet"): 865_910_724,
    ("sd21", "vae"): 83_653_863,
    ("sd21", "text_encoder"): 340_387_840,
    ("sdxl", "unet"): 2_567_463_684,
    ("sdxl", "vae"): 83_653_863,
    ("sdxl", "text_encoder"): 123_060_480,
    ("sdxl", "text_encoder_2"): 694_659_840,
    ("sdxl_refiner", "unet"): 2_259_526_660,
    ("sdxl_refiner", "vae"): 83_653_863,
    ("sdxl_refiner", "text_encoder_2"): 694_659_840,
}


@pytest.mark.parametrize(("name", "part"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, part):
    folder = architecture_folder(name)
    with torch.device("meta"):
        network = build_part(folder, part, config_of(folder)[part])
    assert sum(p.numel() for p in network.parameters()) == PUBLISHED[name, part]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_is_recognised_as_its_own_family(name):
    folder = architecture_folder(name)
    names = part_names(config_of(folder))
    encoders = {part for part in names if part.startswith("text")}
    assert recognise(config_of(folder, "unet"), config_of(folder, "vae"), encoders) == name
    assert {part for part in names if part in COMPONENTS} == {p for n, p in PUBLISHED if n == name}


def test_published_noise_schedules():
    predictions = {}
    for name in ARCHITECTURES:
        folder = architecture_folder(name)
        scheduler = build_part(folder, "scheduler", config_of(folder)["scheduler"])
        predictions[name] = scheduler.config.prediction_type
        # abar after 1000 steps of betas that are linear in their square root from 0.00085 to 0.012
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        assert scheduler.alphas_cumprod[-1].item() == pytest.approx((1 - betas).prod().item(), rel=1e-4)
    assert predictions == {
        "sd15": "epsilon", "sd21": "v_prediction", "sdxl": "epsilon", "sdxl_refiner": "epsilon",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "part", "pad"),
    [
        ("sd15", "tokenizer", 49407),
        ("sd21", "tokenizer", 0),
        ("sdxl", "tokenizer", 49407),
        ("sdxl", "tokenizer_2", 0),
    ],
)
def test_tokenizers_are_clips_with_the_familys_padding(name, part, pad):
    tokenizer = build_part(architecture_folder(name), part, ["transformers", "CLIPTokenizer"])
    ids = tokenizer("a cat", padding="max_length").input_ids
    assert ids[:4] == [49406, 320, 2368, 49407]
    assert ids[-1] == pad


@pytest.fixture
def tiny_configs(tiny_model_dir, tmp_path):
    """A tiny model's folder without its weights and tokenizer files."""

    def copy(family):
        source = tiny_model_dir(family)
        for path in source.rglob("*config.json"):
            if path.parent.name.startswith("tokenizer"):
                continue
            (tmp_path / path.parent.name).mkdir()
            (tmp_path / path.parent.name / path.name).write_text(path.read_text())
        (tmp_path / "model_index.json").write_text((source / "model_index.json").read_text())
        return tmp_path

    return copy


def test_random_weights_come_from_the_seed_alone(tiny_configs, family):
    folder = str(tiny_configs(family))
    before = torch.get_rng_state()
    one, same = (
        load(init="random", architecture=folder, seed=3),
        load(init="random", architecture=folder, seed=3),
    )
    other = load(init="random", architecture=folder, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, p), (_, q) in zip(one.named_parameters(), same.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert not torch.equal(one.unet.conv_in.weight, other.unet.conv_in.weight)
    assert one.identity == same.identity
    assert one.identity != other.identity
    assert one.family == family
    assert not any(p.requires_grad for p in one.parameters())
    assert one.encode_text(["a cat"]).hidden.isfinite().all()


def test_a_part_from_elsewhere_leaves_the_others_random_weights_alone(tiny_configs, tiny_model_dir):
    folder, elsewhere = str(tiny_configs("sd15")), str(tiny_model_dir("sd21"))
    whole = load(init="random", architecture=folder)
    mixed = load(
        init="random",
        architecture=folder,
        parts={"vae": elsewhere, "text_encoder": f"{elsewhere}/text_encoder"},
    )
    assert torch.equal(mixed.unet.conv_in.weight, whole.unet.conv_in.weight)
    assert not torch.equal(mixed.vae.encoder.conv_in.weight, whole.vae.encoder.conv_in.weight)
    assert mixed.identity != whole.identity


def test_random_leaves_no_seed_zero_behind(tiny_configs):
    """Two parts of one shape do not share weights by sharing a stream."""
    folder = tiny_configs("sdxl")
    config = json.loads((folder / "text_encoder" / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "text_encoder" / "config.json").write_text(json.dumps(config))
    parts = build_random(folder, seed=0)
    first, second = parts["text_encoder"].state_dict(), parts["text_encoder_2"].text_model.state_dict()
    assert not torch.equal(
        first["embeddings.token_embedding.weight"], second["embeddings.token_embedding.weight"]
    )


def test_the_embedded_bases_shape_ships_too():
    assert load(init="random", architecture="openmoji").default_size == 128


def test_unknown_architectures_and_missing_ones_are_refused():
    with pytest.raises(FileNotFoundError, match=r"architecture=sd16.*openmoji, sd15, sd21"):
        load(init="random", architecture="sd16")
    with pytest.raises(ValueError, match=r"init=random needs model\.architecture"):
        load(init="random")
