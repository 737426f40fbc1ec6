"""Single files, against diffusers' own reader and against names written down by hand from the public
files.
"""

import json
import shutil

import pytest
import safetensors.torch
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline

from lit_sd.models.architectures import architecture_folder, build_part, config_of
from lit_sd.models.components import part_names
from lit_sd.models.families import COMPONENTS
from lit_sd.models.ldm import to_ldm
from lit_sd.models.loading import load
from lit_sd.models.saving import save_single_file
from lit_sd.models.single_file import architecture_of_file, recognise_file, recognise_prediction


@pytest.fixture
def tiny_file(tiny_model, tmp_path):
    return lambda family, **kwargs: save_single_file(
        tiny_model(family, **kwargs), tmp_path / f"{family}.safetensors"
    )


def test_a_written_file_reads_back_bit_for_bit(tiny_file, tiny_model, tiny_model_dir, family):
    file = tiny_file(family)
    again, want = load(str(file), architecture=str(tiny_model_dir(family))), tiny_model(family)
    assert again.family == family
    state = want.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(again.state_dict()[key], state[key]) for key in state)
    assert again.noise_schedule().prediction == want.noise_schedule().prediction
    assert torch.equal(again.encode_text(["a cat"]).hidden, want.encode_text(["a cat"]).hidden)
    assert again.options == want.options


def test_diffusers_reads_the_same_networks_from_the_file(tiny_file, tiny_model, tiny_model_dir, family):
    """Its reader was written by others for the public files, so it judges our names."""
    cls = {"sdxl": StableDiffusionXLPipeline, "sdxl_refiner": StableDiffusionXLImg2ImgPipeline}
    pipe = cls.get(family, StableDiffusionPipeline).from_single_file(
        str(tiny_file(family)), config=str(tiny_model_dir(family)), local_files_only=True
    )
    for name, part in tiny_model(family).components().items():
        got, want = getattr(pipe, name).state_dict(), part.state_dict()
        unread = {key for key in want if key not in got or not torch.equal(got[key], want[key])}
        assert not unread, (name, sorted(unread)[:3])


NAMES_IN_PUBLIC_FILES = {
    "sd15": [
        ("model.diffusion_model.time_embed.0.weight", (1280, 320)),
        ("model.diffusion_model.input_blocks.0.0.weight", (320, 4, 3, 3)),
        ("model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", (320, 768)),
        ("model.diffusion_model.input_blocks.3.0.op.weight", (320, 320, 3, 3)),
        ("model.diffusion_model.input_blocks.4.0.skip_connection.weight", (640, 320, 1, 1)),
        ("model.diffusion_model.middle_block.1.proj_in.weight", (1280, 1280, 1, 1)),
        ("model.diffusion_model.output_blocks.2.1.conv.weight", (1280, 1280, 3, 3)),
        ("model.diffusion_model.output_blocks.5.2.conv.weight", (1280, 1280, 3, 3)),
        ("model.diffusion_model.output_blocks.11.0.skip_connection.weight", (320, 640, 1, 1)),
        ("model.diffusion_model.out.2.weight", (4, 320, 3, 3)),
        ("first_stage_model.encoder.mid.attn_1.q.weight", (512, 512, 1, 1)),
        ("first_stage_model.encoder.down.2.block.0.nin_shortcut.weight", (512, 256, 1, 1)),
        ("first_stage_model.decoder.up.3.block.2.conv2.weight", (512, 512, 3, 3)),
        ("first_stage_model.decoder.up.0.block.0.nin_shortcut.weight", (128, 256, 1, 1)),
        ("first_stage_model.post_quant_conv.weight", (4, 4, 1, 1)),
        ("cond_stage_model.transformer.text_model.encoder.layers.11.mlp.fc1.weight", (3072, 768)),
        ("cond_stage_model.transformer.text_model.embeddings.position_embedding.weight", (77, 768)),
    ],
    "sd21": [
        ("model.diffusion_model.input_blocks.2.1.transformer_blocks.0.attn2.to_k.weight", (320, 1024)),
        ("model.diffusion_model.input_blocks.1.1.proj_in.weight", (320, 320)),
        ("cond_stage_model.model.transformer.resblocks.22.attn.in_proj_weight", (3072, 1024)),
        ("cond_stage_model.model.transformer.resblocks.0.mlp.c_fc.weight", (4096, 1024)),
        ("cond_stage_model.model.token_embedding.weight", (49408, 1024)),
        ("cond_stage_model.model.positional_embedding", (77, 1024)),
        ("cond_stage_model.model.ln_final.weight", (1024,)),
    ],
    "sdxl": [
        ("model.diffusion_model.label_emb.0.0.weight", (1280, 2816)),
        ("model.diffusion_model.input_blocks.4.1.transformer_blocks.1.attn2.to_k.weight", (640, 2048)),
        ("model.diffusion_model.output_blocks.5.2.conv.weight", (640, 640, 3, 3)),
        ("model.diffusion_model.middle_block.1.transformer_blocks.9.norm1.weight", (1280,)),
        ("conditioner.embedders.0.transformer.text_model.embeddings.position_embedding.weight", (77, 768)),
        ("conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias", (1280,)),
        ("conditioner.embedders.1.model.text_projection", (1280, 1280)),
    ],
    "sdxl_refiner": [
        ("model.diffusion_model.label_emb.0.0.weight", (1536, 2560)),
        ("model.diffusion_model.output_blocks.8.2.conv.weight", (768, 768, 3, 3)),
        ("conditioner.embedders.0.model.transformer.resblocks.31.ln_2.weight", (1280,)),
        ("conditioner.embedders.0.model.text_projection", (1280, 1280)),
    ],
}
TENSORS_IN_PUBLIC_FILES = {"sd15": 686 + 248 + 196, "sdxl": 1680 + 248 + 196}


@pytest.fixture(scope="module")
def published():
    """The whole list of names and shapes of a real single file, made on the meta device."""

    def shapes(family):
        folder = architecture_folder(family)
        named = {}
        for part in part_names(config_of(folder)):
            if part in COMPONENTS:
                with torch.device("meta"):
                    network = build_part(folder, part, config_of(folder)[part])
                named |= to_ldm(family, part, network, network.state_dict())
        return {name: tuple(tensor.shape) for name, tensor in named.items()}

    return shapes


def test_names_and_shapes_are_those_of_the_public_files(published, family):
    shapes = published(family)
    for name, shape in NAMES_IN_PUBLIC_FILES[family]:
        assert shapes.get(name) == shape, name


def test_number_of_tensors_is_that_of_the_public_files(published):
    assert len(published("sd15")) == TENSORS_IN_PUBLIC_FILES["sd15"]
    unet = [name for name in published("sdxl") if name.startswith("model.diffusion_model.")]
    assert len(unet) == 1680


def test_a_ckpt_of_tensors_loads(tiny_file, tiny_model, tiny_model_dir, tmp_path):
    tensors = safetensors.torch.load_file(tiny_file("sd15"))
    clutter = {
        "model_ema.decay": torch.zeros(()),
        "betas": torch.zeros(1000),
        "cond_stage_model.logit_scale": torch.ones(()),
    }
    torch.save({"global_step": 7, "state_dict": tensors | clutter}, tmp_path / "old.ckpt")
    model = load(str(tmp_path / "old.ckpt"), architecture=str(tiny_model_dir("sd15")))
    assert torch.equal(model.unet.conv_in.weight, tiny_model("sd15").unet.conv_in.weight)


def test_names_from_before_text_model_load(tiny_file, tiny_model, tiny_model_dir, tmp_path):
    tensors = safetensors.torch.load_file(tiny_file("sd15"))
    old = {k.replace("transformer.text_model.", "transformer."): v for k, v in tensors.items()}
    safetensors.torch.save_file(old, tmp_path / "old.safetensors")
    model = load(str(tmp_path / "old.safetensors"), architecture=str(tiny_model_dir("sd15")))
    want = tiny_model("sd15").encode_text(["a cat"]).hidden
    assert torch.equal(model.encode_text(["a cat"]).hidden, want)


class Callback:
    """Any object beside the tensors, as Lightning's old checkpoints hold them."""


def test_a_ckpt_with_objects_is_refused(tmp_path):
    torch.save({"state_dict": {}, "callbacks": Callback()}, tmp_path / "old.ckpt")
    with pytest.raises(ValueError, match=r"old\.ckpt.*run code.*\.safetensors"):
        load(str(tmp_path / "old.ckpt"))


def test_a_lora_or_a_text_file_is_no_base_model(tmp_path):
    safetensors.torch.save_file(
        {"lora_unet_x.lora_up.weight": torch.zeros(1)}, tmp_path / "style.safetensors"
    )
    with pytest.raises(ValueError, match=r"style\.safetensors is a LoRA"):
        load(str(tmp_path / "style.safetensors"))
    safetensors.torch.save_file({"conv.weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="no Stable Diffusion base model"):
        load(str(tmp_path / "x.safetensors"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"expected a \.safetensors or \.ckpt"):
        load(str(tmp_path / "notes.txt"))


def test_a_missing_tensor_and_a_wrong_shape_are_named(tiny_file, tiny_model_dir, tmp_path):
    tensors = safetensors.torch.load_file(tiny_file("sd15"))
    key = "model.diffusion_model.out.2.bias"
    safetensors.torch.save_file({k: v for k, v in tensors.items() if k != key}, tmp_path / "less.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 of \d+ tensors of unet.*conv_out\.bias"):
        load(str(tmp_path / "less.safetensors"), architecture=str(tiny_model_dir("sd15")))
    safetensors.torch.save_file(tensors | {key: torch.zeros(5)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"conv_out\.bias has shape \(5,\).*expected \(4,\)"):
        load(str(tmp_path / "other.safetensors"), architecture=str(tiny_model_dir("sd15")))


def test_a_file_without_its_vae_takes_one_from_elsewhere(tiny_file, tiny_model_dir, tmp_path):
    tensors = safetensors.torch.load_file(tiny_file("sd15"))
    rest = {k: v for k, v in tensors.items() if not k.startswith("first_stage_model.")}
    safetensors.torch.save_file(rest, tmp_path / "no_vae.safetensors")
    folder = str(tiny_model_dir("sd15"))
    with pytest.raises(ValueError, match=r"model\.parts\.vae=FOLDER"):
        load(str(tmp_path / "no_vae.safetensors"), architecture=folder)
    assert (
        load(str(tmp_path / "no_vae.safetensors"), architecture=folder, parts={"vae": folder}).family
        == "sd15"
    )


def test_a_config_group_of_another_family_does_not_matter(tiny_file):
    """`model=sd15 model.path=some_sdxl.safetensors`: the file's own family is found, and then its real shape
    is missed.
    """
    with pytest.raises(ValueError, match=r"lacks \d+ of \d+ tensors of unet"):
        load(str(tiny_file("sdxl")), architecture="sd15")


@pytest.mark.parametrize(
    ("width", "family"), [(768, "sd15"), (1024, "sd21"), (2048, "sdxl"), (1280, "sdxl_refiner")]
)
def test_a_file_with_a_unet_alone_is_told_by_its_width(width, family, tmp_path):
    key = "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight"
    assert (
        recognise_file({key: torch.zeros(2, width, device="meta")}, tmp_path / "unet.safetensors") == family
    )


def test_prediction_is_found_in_metadata_markers_and_weights():
    norm = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
    wide, narrow = {norm: torch.tensor([-0.2, 0.2])}, {norm: torch.tensor([-0.01, 0.01])}
    v, epsilon = "v_prediction", "epsilon"
    assert recognise_prediction("sd21", wide, {}) == v
    assert recognise_prediction("sd21", narrow, {}) == epsilon
    assert recognise_prediction("sd15", wide, {}) == epsilon
    assert recognise_prediction("sdxl", {"v_pred": torch.zeros(0)}, {}) == v
    assert recognise_prediction("sd15", {}, {"modelspec.prediction_type": "v"}) == v
    assert recognise_prediction("sd21", wide, {"modelspec.prediction_type": "epsilon"}) == epsilon


@pytest.mark.parametrize("given", [True, False], ids=["given", "as in the shipped configs"])
def test_zero_terminal_snr_is_found_in_its_marker(tiny_file, tiny_model_dir, tmp_path, given):
    shape = shutil.copytree(tiny_model_dir("sdxl"), tmp_path / "shape")
    config = shape / "scheduler" / "scheduler_config.json"
    if not given:
        config.write_text((architecture_folder("sdxl") / "scheduler" / "scheduler_config.json").read_text())
    assert ("rescale_betas_zero_snr" in json.loads(config.read_text())) == given
    tensors = safetensors.torch.load_file(tiny_file("sdxl"))
    markers = {"v_pred": torch.zeros(0), "ztsnr": torch.zeros(0)}
    safetensors.torch.save_file(tensors | markers, tmp_path / "v.safetensors")
    model = load(str(tmp_path / "v.safetensors"), architecture=str(shape))
    schedule = model.noise_schedule()
    assert model.sampling_scheduler().config.timestep_spacing == "trailing"
    assert schedule.prediction == "v_prediction"
    assert schedule.abar[-1].item() == pytest.approx(0, abs=1e-6)


def test_what_is_written_says_what_it_predicts(tiny_file):
    with tiny_file("sd21").open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        assert json.loads(file.read(length))["__metadata__"]["modelspec.prediction_type"] == "v"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before torch 1.6"])
def test_the_shape_of_a_ckpt_is_told_without_its_weights(tiny_file, tmp_path, monkeypatch, zipped):
    tensors = safetensors.torch.load_file(tiny_file("sd21"))
    path = tmp_path / "old.ckpt"
    torch.save({"state_dict": tensors}, path, _use_new_zipfile_serialization=zipped)
    mapped, read = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: mapped.append(k["mmap"]) or read(*a, **k))
    assert architecture_of_file(path) == "sd21"
    assert mapped == [zipped]  # the old format can only be read whole
