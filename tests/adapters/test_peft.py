import json

import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline
from peft import LoHaConfig, LoraConfig

from lit_sd.adapters.base import trainable_tensors
from lit_sd.adapters.peft import FILE, Peft, lora


def components_of(model):
    return [name for name in model.components() if name != "vae"]


def test_matrices_train_and_nothing_else(tiny_model):
    model = tiny_model("sd15", dtype="bfloat16")
    lora(rank=4).attach(model)
    opened = trainable_tensors(model)
    assert opened
    assert all(".lora_A." in name or ".lora_B." in name for name in opened)
    assert all(name.startswith("unet.") for name in opened)
    assert {p.dtype for p in opened.values()} == {torch.float32}
    assert model.unet.training
    assert not model.text_encoder.training
    # 3 transformer blocks (down, mid, 2 up), 2 attentions each, 4 projections, A and B
    assert len(opened) == 4 * 2 * 4 * 2


def test_a_new_adapter_changes_nothing(tiny_model, family, draw):
    model = tiny_model(family)
    before = draw(model.pipeline())
    lora(rank=4, components=components_of(model)).attach(model)
    model.eval()
    torch.testing.assert_close(draw(model.pipeline()), before, rtol=0, atol=1e-6)


RANKS = {
    "plain": {},
    "alpha_1": {"alpha": 1.0},
    "alpha_8": {"alpha": 8.0},
    "mixed": {
        "components": ["unet", "text_encoder"],
        "ranks": {"to_k": 2, "q_proj": 1},
        "alphas": {"to_k": 5.0, r"layers\.1\..*\.v_proj": 7.0},
    },
    "rslora": {"alpha": 2.0, "use_rslora": True},
    "dora": {"alpha": 2.0, "use_dora": True},
    "conv_and_ff": {"targets": {"unet": ["to_q", "conv1", "ff.net.0.proj"]}, "alpha": 3.0},
}


@pytest.mark.parametrize("kind", RANKS)
def test_diffusers_draws_the_same_with_the_exported_file(
    tiny_model, tiny_model_dir, tmp_path, draw, disturb, kind
):
    """F25, F26 and contract 4: in memory == loaded by diffusers == merged by diffusers."""
    model = tiny_model("sd15")
    _same_picture(model, lora(rank=4, **RANKS[kind]), tiny_model_dir("sd15"), tmp_path, draw, disturb)


def test_diffusers_draws_the_same_for_every_family_with_text_encoders(
    tiny_model, tiny_model_dir, tmp_path, family, draw, disturb
):
    model = tiny_model(family)
    adapter = lora(rank=3, alpha=1.5, components=components_of(model))
    _same_picture(model, adapter, tiny_model_dir(family), tmp_path, draw, disturb)


def _same_picture(model, adapter, base, tmp_path, draw, disturb):
    plain = draw(model.pipeline())
    adapter.attach(model)
    disturb(model, 1.0)
    model.eval()
    live = draw(model.pipeline())
    assert not torch.allclose(live, plain, atol=1e-2)
    assert adapter.export(model, tmp_path) == [tmp_path / FILE]
    pipe = DiffusionPipeline.from_pretrained(base)
    pipe.load_lora_weights(tmp_path)
    torch.testing.assert_close(draw(pipe), live, rtol=0, atol=1e-5)
    _every_key_arrived(pipe, tmp_path / FILE)
    pipe.fuse_lora(components=list(adapter.configs))
    pipe.unload_lora_weights()
    torch.testing.assert_close(draw(pipe), live, rtol=0, atol=1e-4)


def _every_key_arrived(pipe, file):
    saved = safetensors.torch.load_file(file)
    loaded = [
        p
        for name in ("unet", "text_encoder", "text_encoder_2")
        if getattr(pipe, name, None) is not None
        for key, p in getattr(pipe, name).named_parameters()
        if ".lora_" in key
    ]
    assert len(loaded) == len(saved)
    assert sum(p.double().sum().item() for p in loaded) == pytest.approx(
        sum(t.double().sum().item() for t in saved.values()), rel=1e-6
    )


def test_keys_carry_no_wrappers_and_the_file_says_its_alpha(tiny_model, tmp_path):
    model = tiny_model("sdxl")
    adapter = lora(rank=4, alpha=1.0, components=components_of(model))
    adapter.attach(model)
    adapter.export(model, tmp_path)
    keys = set(safetensors.torch.load_file(tmp_path / FILE))
    assert {key.split(".")[0] for key in keys} == {"unet", "text_encoder", "text_encoder_2"}
    for wrapper in ("base_model", "module", "_orig_mod", "default", "base_layer"):
        assert not any(wrapper in key.split(".") for key in keys)
    assert "text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight" in keys
    # SDXL never reads the first encoder's last layer
    assert not any(key.startswith("text_encoder.text_model.encoder.layers.1.") for key in keys)
    with safetensors.safe_open(tmp_path / FILE, "pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    for name in components_of(model):
        assert (metadata[f"{name}.r"], metadata[f"{name}.lora_alpha"]) == (4, 1.0)
    assert not list(tmp_path.glob("*.part"))


def test_ranks_may_differ_by_pattern(tiny_model):
    model = tiny_model("sd15")
    lora(rank=4, ranks={"to_k": 2, "to_out.0": 1}).attach(model)
    ranks = {
        name.split(".lora_A")[0].split("attn")[1][2:]: len(p)
        for name, p in trainable_tensors(model).items()
        if "lora_A" in name
    }
    assert ranks == {"to_q": 4, "to_k": 2, "to_v": 4, "to_out.0": 1}


def test_targets_may_be_named_or_one_expression(tiny_model):
    named, expression = tiny_model("sd15"), tiny_model("sd15")
    lora(rank=4, targets={"unet": ["to_q"], "text_encoder": None}).attach(named)
    lora(rank=4, targets={"unet": r".*attn\d\.to_q"}).attach(expression)
    assert trainable_tensors(named).keys() == trainable_tensors(expression).keys()
    assert len(trainable_tensors(named)) == 4 * 2 * 2


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ({"targets": {"unet": ["to_q", "to_kk"]}}, r"'to_kk' match no layer of unet.*to_k"),
        ({"targets": {"unet": r".*nowhere"}}, r"nowhere"),
        ({"ranks": {"to_qq": 2}}, r"'to_qq'.*to_q"),
        (
            {"components": ["text_encoder"], "targets": {"text_encoder": ["to_q"]}},
            r"'to_q' match no layer of text_encoder",
        ),
    ],
)
def test_a_target_that_matches_nothing_is_named_with_the_nearest(tiny_model, options, lost):
    with pytest.raises(ValueError, match=lost):
        lora(rank=4, **options).attach(tiny_model("sd15"))


def test_wrong_arguments_are_refused(tiny_model):
    with pytest.raises(ValueError, match=r"adapter\.rank=0"):
        lora(rank=0)
    with pytest.raises(ValueError, match="nothing would train"):
        lora(rank=4, components=[])
    with pytest.raises(ValueError, match=r"targets is set for text_encoder, which does not train"):
        lora(rank=4, targets={"text_encoder": ["q_proj"]})
    with pytest.raises(ValueError, match=r"text_encoder_2.*family sd15"):
        lora(rank=4, components=["text_encoder_2"]).attach(tiny_model("sd15"))
    unchecked = Peft.__init__
    while hasattr(unchecked, "__wrapped__"):
        unchecked = unchecked.__wrapped__
    with pytest.raises(TypeError, match=r"LoraConfig.*LoHaConfig"):
        unchecked(object.__new__(Peft), {"unet": LoHaConfig(target_modules=["to_q"])})
    model = tiny_model("sd15")
    lora(rank=4).attach(model)
    with pytest.raises(ValueError, match="already"):
        lora(rank=4).attach(model)


def test_what_another_adapter_opened_stays_open(tiny_model):
    model = tiny_model("sd15")
    model.unet.conv_in.weight.requires_grad_(True)
    Peft({"unet": LoraConfig(target_modules=["to_q"])}).attach(model)
    assert model.unet.conv_in.weight.requires_grad
