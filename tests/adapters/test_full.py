import pytest
import torch
from diffusers import DiffusionPipeline

from lit_sd.adapters.base import trainable_tensors
from lit_sd.adapters.full import Full
from lit_sd.models.loading import load


def test_exactly_the_named_networks_open(tiny_model):
    model = tiny_model("sd15", dtype="bfloat16")
    Full().attach(model)
    assert {p.dtype for p in model.unet.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.unet.parameters())
    assert model.unet.training
    assert not model.text_encoder.training
    assert not trainable_tensors(model.text_encoder) | trainable_tensors(model.vae)
    assert {p.dtype for p in model.text_encoder.parameters()} == {torch.bfloat16}


def test_layers_that_sdxl_never_reads_stay_frozen(tiny_model):
    model = tiny_model("sdxl")
    Full(["text_encoder", "text_encoder_2"]).attach(model)
    frozen = {name for name, p in model.text_encoder.named_parameters() if not p.requires_grad}
    assert frozen
    assert all("encoder.layers.1." in name or "final_layer_norm" in name for name in frozen)
    assert all(p.requires_grad for p in model.text_encoder_2.parameters())
    assert not trainable_tensors(model.unet)


@pytest.mark.parametrize(("family", "name"), [("sd15", "text_encoder_2"), ("sdxl_refiner", "text_encoder")])
def test_networks_that_the_family_has_not_are_refused(tiny_model, family, name):
    with pytest.raises(ValueError, match=rf"{name}.*family {family} can train unet"):
        Full([name]).attach(tiny_model(family))


def test_nothing_to_train_is_refused():
    with pytest.raises(ValueError, match="nothing would train"):
        Full([])


def test_the_export_is_a_pipeline_that_draws_the_same(tiny_model, tmp_path, family, draw, disturb):
    """Contract 4: in memory == exported folder == exported single file."""
    model = tiny_model(family)
    adapter = Full([name for name in model.components() if name != "vae"], single_file=True)
    adapter.attach(model)
    disturb(model)
    paths = adapter.export(model, tmp_path / "export")
    assert [path.name for path in paths] == ["export", "model.safetensors"]
    live = draw(model.pipeline())
    folder = draw(DiffusionPipeline.from_pretrained(tmp_path / "export"))
    single = draw(
        type(model.pipeline()).from_single_file(str(paths[1]), config=str(paths[0]), local_files_only=True)
    )
    torch.testing.assert_close(folder, live, rtol=0, atol=1e-5)
    torch.testing.assert_close(single, live, rtol=0, atol=1e-5)
    assert not torch.allclose(draw(tiny_model(family).pipeline()), live, atol=1e-2)


def test_the_export_may_be_half_precision(tiny_model, tmp_path):
    model = tiny_model("sd15")
    adapter = Full(export_dtype="float16")
    adapter.attach(model)
    adapter.export(model, tmp_path / "export")
    pipe = DiffusionPipeline.from_pretrained(tmp_path / "export", torch_dtype="auto")
    assert {p.dtype for p in model.unet.parameters()} == {torch.float32}
    import safetensors.torch

    file = tmp_path / "export" / "unet" / "diffusion_pytorch_model.safetensors"
    assert {t.dtype for t in safetensors.torch.load_file(file).values()} == {torch.float16}
    assert pipe.unet is not None


def test_what_was_trained_as_another_prediction_is_exported_as_that(
    tiny_model, tiny_model_dir, tmp_path, draw
):
    model = tiny_model("sd15")
    adapter = Full(single_file=True)
    adapter.attach(model)
    as_before = draw(model.pipeline())
    model.train_as("v_prediction")
    folder, single = adapter.export(model, tmp_path / "export")
    pipe = DiffusionPipeline.from_pretrained(folder)
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    torch.testing.assert_close(draw(pipe), draw(model.pipeline()), rtol=0, atol=1e-5)
    assert not torch.allclose(draw(pipe), as_before, atol=1e-2)
    for again in (load(str(folder)), load(str(single), architecture=str(tiny_model_dir("sd15")))):
        assert again.noise_schedule().prediction == "v_prediction"
