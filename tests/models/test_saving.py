import json
from importlib.resources import files
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers import DiffusionPipeline

from lit_sd.models.loading import load
from lit_sd.models.saving import forget_origin, save_folder


def absolute_paths(node) -> list[str]:
    """Every text in nested JSON that is a path from the root of a file system."""
    if isinstance(node, dict | list):
        below = node.values() if isinstance(node, dict) else node
        return [path for value in below for path in absolute_paths(value)]
    return [node] if isinstance(node, str) and Path(node).is_absolute() else []


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


def test_no_file_tells_where_the_model_was_loaded_from(tiny_model, tiny_model_dir, tmp_path, family):
    model, source = tiny_model(family), str(tiny_model_dir(family))
    assert model.vae.config["_name_or_path"] == source, "else this test shows nothing"
    written = sorted(save_folder(model, tmp_path / "export").rglob("*.json"))
    assert {"unet", "vae", "scheduler"} <= {path.parent.name for path in written}
    for path in written:
        assert source not in path.read_text(), path
        if path.name != "tokenizer.json":  # its tokens may well look like paths
            assert absolute_paths(json.loads(path.read_text())) == [], path
    assert model.vae.config["_name_or_path"] == source


def test_shipped_configs_hold_no_path_of_a_machine():
    configs = list(Path(str(files("lit_sd").joinpath("assets"))).rglob("*config.json"))
    assert len(configs) > 20
    for path in configs:
        assert absolute_paths(json.loads(path.read_text())) == [], path


def test_forgetting_leaves_other_files_as_they_are(tmp_path):
    (tmp_path / "vae").mkdir()
    texts = {"a": '{"z":1,"a":2}', "b": '{"_name_or_path": "/home/x", "z": 1}'}
    (tmp_path / "config.json").write_text(texts["a"])
    (tmp_path / "vae" / "config.json").write_text(texts["b"])
    forget_origin(tmp_path)
    assert (tmp_path / "config.json").read_text() == texts["a"]
    assert json.loads((tmp_path / "vae" / "config.json").read_text()) == {"z": 1}
