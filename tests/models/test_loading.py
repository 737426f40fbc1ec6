import hashlib
import json
import shutil

import pytest
import torch

import lit_sd.models.loading as loading
from lit_sd.models.identity import weights_read
from lit_sd.models.loading import load, resolve
from lit_sd.models.saving import save_single_file


def test_weights_are_those_of_the_folder(tiny_model, tiny_model_dir, family):
    from diffusers import UNet2DConditionModel

    want = UNet2DConditionModel.from_pretrained(tiny_model_dir(family) / "unet").state_dict()
    got = tiny_model(family).unet.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_is_of_all_but_the_vae(tiny_model, dtype):
    model = tiny_model("sdxl", dtype=dtype)
    got = {name: part.dtype for name, part in model.components().items()}
    vae = torch.float32 if dtype == "float16" else getattr(torch, dtype)
    assert got == dict.fromkeys(("unet", "text_encoder", "text_encoder_2"), getattr(torch, dtype)) | {
        "vae": vae
    }


def test_channels_last_is_of_unet_and_vae(tiny_model):
    model = tiny_model("sd15", channels_last=True)
    assert model.unet.conv_in.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.vae.encoder.conv_in.weight.is_contiguous(memory_format=torch.channels_last)


def test_loading_does_not_move_the_global_random_stream(tiny_model):
    before = torch.get_rng_state()
    tiny_model("sdxl")
    assert torch.equal(torch.get_rng_state(), before)


def test_prediction_may_be_overridden(tiny_model):
    model = tiny_model("sd15", prediction="v_prediction")
    assert model.noise_schedule().prediction == "v_prediction"
    assert model.pipeline().scheduler.config.prediction_type == "v_prediction"


def test_identity_is_of_the_weights_and_not_of_the_place(tiny_model_dir, tmp_path):
    import safetensors.torch

    here = load(str(tiny_model_dir("sd15")))
    copy = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "copy")
    assert load(str(copy)).identity == here.identity
    file = copy / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["conv_in.bias"][0] += 1
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    assert load(str(copy)).identity != here.identity
    assert load(str(tiny_model_dir("sd21"))).identity != here.identity


def test_a_single_files_identity_is_its_content_and_survives_a_new_name(tiny_model, tiny_model_dir, tmp_path):
    file = save_single_file(tiny_model("sd15"), tmp_path / "base.safetensors")
    shape = str(tiny_model_dir("sd15"))
    before = load(str(file), architecture=shape).identity
    assert before == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    moved = file.rename(tmp_path / "renamed.safetensors")
    assert load(str(moved), architecture=shape).identity == before


def test_a_folders_identity_is_of_the_weights_that_are_read(tiny_model_dir, tmp_path):
    """A clone holds what a download leaves out: other formats and precisions of the same weights."""
    here = load(str(tiny_model_dir("sd15"))).identity
    copy = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "clone")
    for name in ("diffusion_pytorch_model.bin", "diffusion_pytorch_model.non_ema.safetensors", "x.ckpt"):
        (copy / "unet" / name).write_bytes(b"other weights")
    (copy / "text_encoder" / "pytorch_model.fp16.bin").write_bytes(b"other weights")
    assert load(str(copy)).identity == here


@pytest.mark.parametrize(
    ("variant", "there", "wanted"),
    [
        (None, ["model.safetensors", "model.fp16.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        ("fp16", ["model.safetensors", "model.fp16.safetensors"], ["model.fp16.safetensors"]),
        ("fp16", ["model.safetensors", "flax_model.msgpack"], ["model.safetensors"]),
        (None, ["openvino_model.bin", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (None, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None),
        ("fp16", ["model.fp16-00001-of-00001.safetensors", "model.safetensors"], 1),
        ("fp16", ["model-00001-of-00001.fp16.safetensors", "model.safetensors"], 1),
    ],
)
def test_weights_that_are_read_by_name(tmp_path, variant, there, wanted):
    for name in there:
        (tmp_path / name).touch()
    wanted = there[:wanted] if wanted is None or isinstance(wanted, int) else wanted
    assert [path.name for path in weights_read(tmp_path, variant)] == wanted


def test_a_part_from_a_clone_has_the_same_identity(tiny_model_dir, tmp_path):
    base, other = str(tiny_model_dir("sd15")), tiny_model_dir("sd21") / "vae"
    plain = load(base, parts={"vae": str(other)}).identity
    copy = shutil.copytree(other, tmp_path / "vae")
    (copy / "diffusion_pytorch_model.bin").write_bytes(b"other weights")
    (copy / "README.md").touch()
    assert load(base, parts={"vae": str(copy)}).identity == plain


def test_parts_come_from_elsewhere_and_change_the_identity(tiny_model_dir):
    base, other = tiny_model_dir("sd15"), tiny_model_dir("sd21")
    plain = load(str(base))
    whole = load(str(base), parts={"vae": str(other), "scheduler": None})
    single = load(str(base), parts={"vae": str(other / "vae")})
    other_weight = load(str(other)).vae.encoder.conv_in.weight
    assert torch.equal(whole.vae.encoder.conv_in.weight, other_weight)
    assert torch.equal(single.vae.encoder.conv_in.weight, other_weight)
    assert plain.identity != whole.identity == single.identity


def test_a_scheduler_from_elsewhere_keeps_its_class(tiny_model_dir):
    model = load(str(tiny_model_dir("sdxl")), parts={"scheduler": str(tiny_model_dir("sd21"))})
    assert model.noise_schedule().prediction == "v_prediction"
    assert type(model.pipeline().scheduler).__name__ == "DDIMScheduler"


def test_a_hub_name_is_left_to_the_hub():
    assert resolve("stabilityai/stable-diffusion-2-1") == "stabilityai/stable-diffusion-2-1"


def test_the_hub_out_of_reach_is_said(monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"model\.path=nobody/nothing.*hub"):
        load("nobody/nothing")


@pytest.mark.parametrize("path", ["./nothing", "/nothing/here", "model.safetensors", "a/b/c", "nothing"])
def test_a_local_path_with_nothing_there_is_said_at_once(path):
    with pytest.raises(FileNotFoundError, match="nothing lies there"):
        load(path)


def test_no_path_is_said():
    with pytest.raises(ValueError, match=r"model\.path is not set"):
        load()


def test_a_folder_that_is_no_model_names_what_it_holds(tmp_path):
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(FileNotFoundError, match=r"no model_index\.json.*holiday\.jpg"):
        load(str(tmp_path))


def test_a_missing_part_is_named(tiny_model_dir, tmp_path):
    copy = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "copy")
    shutil.rmtree(copy / "vae")
    with pytest.raises(FileNotFoundError, match="vae"):
        load(str(copy))


def test_another_kind_of_pipeline_is_refused(tiny_model_dir, tmp_path):
    copy = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "copy")
    index = json.loads((copy / "model_index.json").read_text())
    (copy / "model_index.json").write_text(
        json.dumps(index | {"unet": ["diffusers", "FluxTransformer2DModel"]})
    )
    with pytest.raises(ValueError, match=r"FluxTransformer2DModel.*UNet2DConditionModel"):
        load(str(copy))
    del index["unet"]
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="has no unet"):
        load(str(copy))


def test_an_inpainting_model_is_refused(tiny_model_dir, tmp_path):
    from diffusers import UNet2DConditionModel

    copy = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "copy")
    config = json.loads((copy / "unet" / "config.json").read_text()) | {"in_channels": 9}
    UNet2DConditionModel.from_config(config).save_pretrained(copy / "unet")
    with pytest.raises(ValueError, match="inpainting"):
        load(str(copy))


@pytest.mark.parametrize(
    "wrong",
    [
        {"init": "scratch"},
        {"dtype": "float8"},
        {"prediction": "v"},
        {"caption_chunks": 0},
        {"parts": {"vea": "x"}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_choices_name_the_right_ones(tiny_model_dir, wrong):
    unchecked = getattr(load, "__wrapped__", load)  # past the tests' own type checks
    while hasattr(unchecked, "__wrapped__"):
        unchecked = unchecked.__wrapped__
    with pytest.raises(ValueError, match=r"model\.\w+.*expected"):
        unchecked(str(tiny_model_dir("sd15")), **wrong)


def test_openmoji_is_the_packages_own_folder(monkeypatch, tiny_model_dir, tmp_path):
    monkeypatch.setattr(loading, "files", lambda package: tmp_path)
    with pytest.raises(FileNotFoundError, match="embedded base is not in this checkout"):
        resolve("openmoji")
    shutil.copytree(tiny_model_dir("sd21"), tmp_path / "assets" / "openmoji")
    assert load("openmoji").family == "sd21"


def test_the_shipped_name_wins_over_a_folder_of_that_name_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openmoji").mkdir()
    assert resolve("openmoji").endswith("assets/openmoji")
    assert resolve("./openmoji") == "openmoji"


def test_pickled_weights_are_read_as_tensors_only(tiny_model_dir, tmp_path):
    """A folder with `.bin` files, as old models have them; one that would run code is refused."""
    import safetensors.torch

    copy = shutil.copytree(tiny_model_dir("sd15"), tmp_path / "copy")
    file = copy / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    file.unlink()
    torch.save(tensors, copy / "unet" / "diffusion_pytorch_model.bin")
    assert torch.equal(load(str(copy)).unet.conv_in.bias, tensors["conv_in.bias"])
    torch.save({"conv_in.bias": RunsCode()}, copy / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"unet of .* could not be read"):
        load(str(copy))
    assert not RunsCode.ran


class RunsCode:
    ran = False

    def __reduce__(self):
        return (run_code, ())


def run_code():
    RunsCode.ran = True
    return torch.zeros(1)
