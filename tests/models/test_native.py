"""A model's own picture size, from its configs alone."""

import pytest

from lit_sd.models.native import native_size


def test_shipped_shapes() -> None:
    sizes = {name: native_size(None, "random", name) for name in ("sd15", "sd21", "sdxl", "sdxl_refiner")}
    assert sizes == {"sd15": 512, "sd21": 768, "sdxl": 1024, "sdxl_refiner": 1024}


def test_a_folder_needs_no_weights(tiny_model_dir, tmp_path) -> None:
    import shutil

    copy = tmp_path / "model"
    shutil.copytree(tiny_model_dir("sd15"), copy, ignore=shutil.ignore_patterns("*.safetensors"))
    assert native_size(str(copy)) == 8 * 8  # sample_size x the VAE's factor


def test_nothing_tells_the_size_of_a_single_file_alone(tmp_path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ValueError, match="model.architecture"):
        native_size(str(file))
    assert native_size(str(file), architecture="sdxl") == 1024
