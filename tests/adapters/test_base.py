import pytest

from lit_sd.adapters.base import component
from lit_sd.kinds import faults_of
from lit_sd.signatures import signature_of


def test_no_adapter_gets_the_vae(tiny_model):
    with pytest.raises(ValueError, match=r"vae.*family sdxl can train unet, text_encoder, text_encoder_2"):
        component(tiny_model("sdxl"), "vae")


@pytest.mark.parametrize("target", ["lit_sd.adapters.full.Full", "lit_sd.adapters.peft.lora"])
def test_a_misspelt_component_is_told_before_anything_heavy_is_imported(target):
    signature = signature_of(target)
    assert signature is not None
    kind = signature.parameters["components"].kind
    assert faults_of("adapter.components", ["unet", "text_encoder", "text_encoder_2"], kind) == []
    (fault,) = faults_of("adapter.components", ["unet", "text_encodr"], kind)
    assert fault.startswith("adapter.components[1]: expected one of text_encoder, text_encoder_2, unet")
    assert fault.endswith("nearest: text_encoder")
    assert len(faults_of("adapter.components", ["vae"], kind)) == 1


def test_so_are_misspelt_keys_of_mappings():
    targets = signature_of("lit_sd.adapters.peft.lora").parameters["targets"].kind
    assert faults_of("adapter.targets", {"unet": ["to_q"], "text_encoder": None}, targets) == []
    (fault,) = faults_of("adapter.targets", {"text_encodr": None}, targets)
    assert "adapter.targets.text_encoder" in fault
    parts = signature_of("lit_sd.models.loading.load").parameters["parts"].kind
    assert faults_of("model.parts", {"vae": "x", "tokenizer_2": None}, parts) == []
    (fault,) = faults_of("model.parts", {"vea": "x"}, parts)
    assert "model.parts.vae" in fault
