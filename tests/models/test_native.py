"""A model's own picture size, from its configs alone."""

import json
import shutil

import pytest
from diffusers import ConfigMixin

from lit_sd.models.native import native_size
from lit_sd.models.saving import save_single_file


def test_shipped_shapes() -> None:
    sizes = {name: native_size(None, "random", name) for name in ("sd15", "sd21", "sdxl", "sdxl_refiner")}
    assert sizes == {"sd15": 512, "sd21": 768, "sdxl": 1024, "sdxl_refiner": 1024}


def test_a_folder_needs_no_weights(tiny_model_dir, tmp_path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(tiny_model_dir("sd15"), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    assert native_size(str(copy)) == 8 * 8  # sample_size x the VAE's factor


def test_nothing_tells_the_size_of_random_weights_alone() -> None:
    with pytest.raises(ValueError, match=r"model\.architecture"):
        native_size(None, "random")


@pytest.mark.parametrize(("family", "size"), [("sd15", 512), ("sd21", 768), ("sdxl", 1024)])
def test_a_single_file_tells_its_family_whatever_the_config_group_says(
    family, size, tiny_model, tiny_model_dir, tmp_path
) -> None:
    file = save_single_file(tiny_model(family), tmp_path / "model.safetensors")
    assert native_size(str(file)) == size
    assert native_size(str(file), architecture="sd15") == size
    assert native_size(str(file), architecture=str(tiny_model_dir(family))) == 64


def test_networks_from_elsewhere_are_asked(tiny_model_dir, tmp_path) -> None:
    base = str(tiny_model_dir("sd15"))
    unet = tmp_path / "unet"
    unet.mkdir()
    config = json.loads((tiny_model_dir("sd15") / "unet" / "config.json").read_text())
    (unet / "config.json").write_text(json.dumps(config | {"sample_size": 5}))
    assert native_size(base, parts={"unet": str(unet), "vae": None}) == 5 * 8
    whole = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "whole")
    (whole / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [8, 8, 8]}))
    assert native_size(base, parts={"vae": str(whole)}) == 8 * 2 ** (3 - 1)


def test_the_hub_out_of_reach_is_said() -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.path=nobody/nothing.*hub"):
        native_size("nobody/nothing")


def test_a_missing_config_names_its_network(tiny_model_dir, tmp_path) -> None:
    copy = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "copy")
    (copy / "vae" / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"vae of .*copy: its config could not be read"):
        native_size(str(copy))


def test_the_revision_is_what_the_hub_is_asked_for(monkeypatch) -> None:
    asked = []

    def config(cls, where, subfolder=None, revision=None):
        asked.append((where, subfolder, revision))
        return {"sample_size": 8, "block_out_channels": [1, 1, 1]}

    monkeypatch.setattr(ConfigMixin, "load_config", classmethod(config))
    assert native_size("owner/name", revision="v1") == 32
    assert asked == [("owner/name", part, "v1") for part in (None, "unet", "vae")]
