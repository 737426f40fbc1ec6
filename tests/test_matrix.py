"""Contract 7: methods × objectives × families on tiny models; contract 1 in every cell."""

from functools import partial
from typing import get_args

import pytest
import torch
from peft import LoraConfig
from tiny_runs import everything, images, module_of, saver_of, trained, trainer_of, write_images

from lit_sd.adapters.full import Full
from lit_sd.adapters.peft import Peft
from lit_sd.callbacks import GradientCheck, NonFiniteCheck
from lit_sd.models.families import Family
from lit_sd.objectives import Objective, min_snr_weighting

ENCODERS = {
    "sd15": ["text_encoder"],
    "sd21": ["text_encoder"],
    "sdxl": ["text_encoder", "text_encoder_2"],
    "sdxl_refiner": ["text_encoder_2"],
}
OBJECTIVES = {
    "epsilon": partial(Objective, prediction="epsilon"),
    "v": partial(Objective, prediction="v_prediction"),
    "min_snr": lambda: Objective(weighting=min_snr_weighting(5.0)),
}


def lora(components):
    targets = {"unet": ["to_q", "to_k", "to_v", "to_out.0"]}
    return Peft({c: LoraConfig(r=2, target_modules=targets.get(c, ["q_proj", "v_proj"])) for c in components})


ADAPTERS = {"full": Full, "lora": lora}

REFUSED = {
    ("full", "sd15", "text_encoder_2"): r"sd15 can train unet, text_encoder$",
    ("lora", "sd21", "text_encoder_2"): r"sd21 can train unet, text_encoder$",
    ("full", "sdxl_refiner", "text_encoder"): r"sdxl_refiner can train unet, text_encoder_2$",
    ("lora", "sdxl_refiner", "text_encoder"): r"sdxl_refiner can train unet, text_encoder_2$",
}


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 4)


def changed(module, before):
    return {name for name, value in everything(module).items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", get_args(Family))
def test_two_steps(tiny_model, tmp_path, root, name, adapter, objective):
    module = module_of(tiny_model(name), ADAPTERS[adapter](["unet"]), objective=OBJECTIVES[objective]())
    before = everything(module)
    saver = saver_of(tmp_path / "checkpoints")
    checks = [GradientCheck(), NonFiniteCheck(20)]
    trainer = trainer_of(tmp_path, *checks, saver, max_steps=2, gradient_clip_val=1.0, checkpointing=True)
    trainer.fit(module, images(root, batch_size=2))
    assert changed(module, before) == set(trained(module))
    assert all("lora" in n for n in trained(module)) == (adapter == "lora")
    saved = torch.load(saver.last, weights_only=True)["state_dict"]
    assert saved.keys() == trained(module).keys()
    assert all(torch.equal(value, trained(module)[n]) for n, value in saved.items())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", get_args(Family))
def test_text_encoders_train_too(tiny_model, tmp_path, root, name, adapter, checkpointing):
    """F27: every tensor gets a gradient, with and without gradient checkpointing."""
    model = tiny_model(name, gradient_checkpointing=checkpointing)
    module = module_of(model, ADAPTERS[adapter](["unet", *ENCODERS[name]]))
    before = everything(module)
    trainer_of(tmp_path, GradientCheck(), max_steps=2).fit(module, images(root, batch_size=2))
    # Rows of an embedding that no caption named keep their values, but the tensor as a whole moves.
    assert changed(module, before) == set(trained(module))
    for encoder in ENCODERS[name]:
        assert any(n.startswith(f"model.{encoder}.") for n in trained(module))


@pytest.mark.parametrize(("adapter", "name", "component"), REFUSED, ids="-".join)
def test_refused_with_a_reason(tiny_model, adapter, name, component):
    with pytest.raises(ValueError, match=REFUSED[adapter, name, component]):
        module_of(tiny_model(name), ADAPTERS[adapter]([component]))
