"""The names that weights have in single files (the layout of CompVis' latent-diffusion), for both directions.

The table is built from a model's own structure, so one function reads and writes any depth and width.
Sources: the state dicts of github.com/CompVis/stable-diffusion, github.com/Stability-AI/generative-models and
github.com/mlfoundations/open_clip.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

UNET, VAE = "model.diffusion_model.", "first_stage_model."
TEXT_PREFIXES = {
    ("sd15", "text_encoder"): "cond_stage_model.transformer.text_model.",
    ("sd21", "text_encoder"): "cond_stage_model.model.",
    ("sdxl", "text_encoder"): "conditioner.embedders.0.transformer.text_model.",
    ("sdxl", "text_encoder_2"): "conditioner.embedders.1.model.",
    ("sdxl_refiner", "text_encoder_2"): "conditioner.embedders.0.model.",
}
"""Where each family's file keeps its text encoders. Those ending in `model.` alone are OpenCLIP's, with its
own names.
"""

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
OPEN_CLIP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.": "ln_final.",
    "encoder.layers.": "transformer.resblocks.",
    ".layer_norm1.": ".ln_1.",
    ".layer_norm2.": ".ln_2.",
    ".mlp.fc1.": ".mlp.c_fc.",
    ".mlp.fc2.": ".mlp.c_proj.",
    ".self_attn.": ".attn.",
}


def prefix_of(family: str, component: str) -> str:
    """What stands before all names of a component in a family's single file."""
    return {"unet": UNET, "vae": VAE}.get(component) or TEXT_PREFIXES[family, component]


def to_ldm(family: str, component: str, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A component's tensors under the names and in the shapes that a single file of this family has."""
    prefix = prefix_of(family, component)
    if is_open_clip(prefix):
        named = _to_open_clip({key.removeprefix("text_model."): tensor for key, tensor in state.items()})
    elif component.startswith("text"):
        named = {
            key.removeprefix("text_model."): tensor
            for key, tensor in state.items()
            if key != "text_projection.weight"
        }
    else:
        names = ldm_names(component, model)
        named = {names[key]: _as_conv(names[key], tensor) for key, tensor in state.items()}
    return {prefix + key: tensor.contiguous() for key, tensor in named.items()}


def from_ldm(
    family: str, component: str, model: nn.Module, checkpoint: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A component's state dict, read from a single file's tensors.

    Raises:
        ValueError: a tensor that the component needs is missing or has another shape.
    """
    prefix = prefix_of(family, component)
    wanted = model.state_dict()
    if is_open_clip(prefix):
        found = _from_open_clip(
            {k.removeprefix(prefix): v for k, v in checkpoint.items() if k.startswith(prefix)}
        )
    else:
        names = ldm_names(component, model) if not component.startswith("text") else {k: k for k in wanted}
        found = {k: checkpoint[prefix + n] for k, n in names.items() if prefix + n in checkpoint}
    if any(key.startswith("text_model.") for key in wanted):
        found = {
            key if key == "text_projection.weight" else f"text_model.{key}": v for key, v in found.items()
        }
    _check(component, prefix, wanted, found)
    return {key: found[key].reshape(tensor.shape) for key, tensor in wanted.items()}


def is_open_clip(prefix: str) -> bool:
    """Whether the encoder under a prefix has OpenCLIP's names."""
    return prefix.startswith("con") and prefix.endswith(".model.")


def _check(component: str, prefix: str, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    missing = [key for key in wanted if key not in found]
    if missing:
        raise ValueError(
            f"the file lacks {len(missing)} of {len(wanted)} tensors of {component} (under {prefix}), e.g. "
            f"{missing[0]}. If it holds no {component}, name one with model.parts.{component}=FOLDER; if its "
            "shape is another one, set model.architecture"
        )
    for key, tensor in wanted.items():
        if _squeezed(found[key]) != _squeezed(tensor):
            raise ValueError(
                f"{component}: {key} has shape {tuple(found[key].shape)} in the file, expected "
                f"{tuple(tensor.shape)}; set model.architecture to the file's own"
            )


def _squeezed(tensor: Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return shape[:2] if len(shape) == 4 and shape[2:] == (1, 1) else shape


def _as_conv(name: str, tensor: Tensor) -> Tensor:
    """The VAE's attention is made of 1x1 convolutions in single files."""
    attention = ".attn_1." in name and tensor.ndim == 2
    return tensor[:, :, None, None] if attention else tensor


def ldm_names(component: str, model: Any) -> dict[str, str]:
    """Single-file name (without prefix) of each tensor of a UNet or VAE.

    Raises:
        ValueError: the model has a layer that the layout has no name for.
    """
    modules = dict(_unet_modules(model) if component == "unet" else _vae_modules(model))
    names = {}
    for key in model.state_dict():
        parts = key.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            if (head := ".".join(parts[:cut])) in modules:
                names[key] = f"{modules[head]}.{'.'.join(parts[cut:])}"
                break
        else:
            raise ValueError(f"{component}: {key} has no name in the single-file layout")
    return names


def _unet_modules(unet: Any):
    """Pairs of (diffusers' module, single file's module)."""
    yield from (("time_embedding.linear_1", "time_embed.0"), ("time_embedding.linear_2", "time_embed.2"))
    yield from (("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2"))
    yield from (("conv_in", "input_blocks.0.0"), ("conv_norm_out", "out.0"), ("conv_out", "out.2"))
    n = 1
    for i, block in enumerate(unet.down_blocks):
        for j in range(len(block.resnets)):
            yield from _layer(f"down_blocks.{i}", j, f"input_blocks.{n}")
            n += 1
        if block.downsamplers:
            yield f"down_blocks.{i}.downsamplers.0.conv", f"input_blocks.{n}.0.op"
            n += 1
    yield from _resnet("mid_block.resnets.0", "middle_block.0", RESNET)
    yield "mid_block.attentions.0", "middle_block.1"
    yield from _resnet("mid_block.resnets.1", "middle_block.2", RESNET)
    n = 0
    for i, block in enumerate(unet.up_blocks):
        for j in range(len(block.resnets)):
            yield from _layer(f"up_blocks.{i}", j, f"output_blocks.{n}")
            n += 1
        if block.upsamplers:
            slot = 2 if getattr(block, "attentions", None) else 1
            yield f"up_blocks.{i}.upsamplers.0.conv", f"output_blocks.{n - 1}.{slot}.conv"


def _layer(block: str, j: int, where: str):
    yield from _resnet(f"{block}.resnets.{j}", f"{where}.0", RESNET)
    yield f"{block}.attentions.{j}", f"{where}.1"


def _resnet(ours: str, theirs: str, names: Mapping[str, str]):
    for inner, name in names.items():
        yield f"{ours}.{inner}", f"{theirs}.{name}"


def _vae_modules(vae: Any):
    yield from (("quant_conv", "quant_conv"), ("post_quant_conv", "post_quant_conv"))
    plain = {name: name for name in ("norm1", "conv1", "norm2", "conv2")} | {"conv_shortcut": "nin_shortcut"}
    for half in ("encoder", "decoder"):
        yield from (
            (f"{half}.conv_in",) * 2,
            (f"{half}.conv_norm_out", f"{half}.norm_out"),
            (f"{half}.conv_out",) * 2,
        )
        for j in (0, 1):
            yield from _resnet(f"{half}.mid_block.resnets.{j}", f"{half}.mid.block_{j + 1}", plain)
        yield from _resnet(f"{half}.mid_block.attentions.0", f"{half}.mid.attn_1", VAE_ATTENTION)
    for i, block in enumerate(vae.encoder.down_blocks):
        for j in range(len(block.resnets)):
            yield from _resnet(f"encoder.down_blocks.{i}.resnets.{j}", f"encoder.down.{i}.block.{j}", plain)
        yield f"encoder.down_blocks.{i}.downsamplers.0.conv", f"encoder.down.{i}.downsample.conv"
    last = len(vae.decoder.up_blocks) - 1
    for i, block in enumerate(vae.decoder.up_blocks):
        for j in range(len(block.resnets)):
            yield from _resnet(
                f"decoder.up_blocks.{i}.resnets.{j}", f"decoder.up.{last - i}.block.{j}", plain
            )
        yield f"decoder.up_blocks.{i}.upsamplers.0.conv", f"decoder.up.{last - i}.upsample.conv"


def _to_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for key, tensor in state.items():
        if key == "text_projection.weight":
            named["text_projection"] = tensor.T
        elif ".k_proj." in key or ".v_proj." in key:
            continue  # stacked below, with q
        elif ".q_proj." in key:
            stack = torch.cat([state[key.replace("q_proj", name)] for name in ("q_proj", "k_proj", "v_proj")])
            named[_open_clip_name(key).replace("q_proj.", "in_proj_")] = stack
        else:
            named[_open_clip_name(key)] = tensor
    return named


def _open_clip_name(key: str) -> str:
    for ours, theirs in OPEN_CLIP.items():
        key = key.replace(ours, theirs)
    return key


def _from_open_clip(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, tensor in named.items():
        key = name
        for ours, theirs in OPEN_CLIP.items():
            key = key.replace(theirs, ours)
        if name == "text_projection":
            state["text_projection.weight"] = tensor.T
        elif ".in_proj_" in key:
            for part, chunk in zip(("q_proj.", "k_proj.", "v_proj."), tensor.chunk(3), strict=True):
                state[key.replace("in_proj_", part)] = chunk
        else:
            state[key] = tensor
    return state
