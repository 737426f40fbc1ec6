import json

import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline

from lit_sd.models.loading import load
from lit_sd.models.saving import save_folder


def test_a_saved_folder_loads_here_and_in_diffusers(tiny_model, tmp_path, family):
    model = tiny_model(family)
    with torch.no_grad():
        model.unet.conv_in.weight.mul_(1.5)
    folder = save_folder(model, tmp_path / "export")
    pipe, again = DiffusionPipeline.from_pretrained(folder), load(str(folder))
    for name, part in model.components().items():
        for key, tensor in part.state_dict().items():
            assert torch.equal(getattr(pipe, name).state_dict()[key], tensor), (name, key)
            assert torch.equal(getattr(again, name).state_dict()[key], tensor), (name, key)
    assert again.family == family
    assert again.noise_schedule().prediction == model.noise_schedule().prediction


def test_text_encoders_carry_the_names_that_older_readers_know(tiny_model, tmp_path, family):
    folder = save_folder(tiny_model(family), tmp_path / "export")
    for file in folder.glob("text_encoder*/model.safetensors"):
        keys = set(safetensors.torch.load_file(file))
        assert {key.split(".")[0] for key in keys} <= {"text_model", "text_projection"}
        assert "text_model.embeddings.token_embedding.weight" in keys


def test_half_precision_exports_leave_the_live_model_alone(tiny_model, tmp_path):
    model = tiny_model("sdxl")
    folder = save_folder(model, tmp_path / "export", torch.float16)
    for file in folder.glob("*/*.safetensors"):
        assert {t.dtype for t in safetensors.torch.load_file(file).values() if t.is_floating_point()} == {
            torch.float16
        }
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert json.loads((folder / "text_encoder" / "config.json").read_text())["dtype"] == "float16"
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float16)
    assert pipe.text_encoder.dtype == torch.float16


def test_an_older_export_is_replaced_and_other_folders_are_not(tiny_model, tmp_path):
    model = tiny_model("sd15")
    folder = save_folder(model, tmp_path / "export")
    (folder / "unet" / "stale.safetensors").touch()
    assert not (save_folder(model, folder) / "unet" / "stale.safetensors").exists()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(FileExistsError, match="not overwritten"):
        save_folder(model, tmp_path / "photos")
    assert not list(tmp_path.glob(".*.part"))
