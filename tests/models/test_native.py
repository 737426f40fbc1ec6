"""A model's own picture size, from its configs alone."""

import pytest

from lit_sd.models.native import native_size
from lit_sd.models.saving import save_single_file


def test_shipped_shapes() -> None:
    sizes = {name: native_size(None, "random", name) for name in ("sd15", "sd21", "sdxl", "sdxl_refiner")}
    assert sizes == {"sd15": 512, "sd21": 768, "sdxl": 1024, "sdxl_refiner": 1024}


def test_a_folder_needs_no_weights(tiny_model_dir, tmp_path) -> None:
    import shutil

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
