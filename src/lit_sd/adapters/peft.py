"""LoRA through PEFT: small matrices beside frozen layers, exported with all that is needed to load them
elsewhere.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import safetensors.torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lit_sd.adapters.base import Adapter, component, trainable_tensors
from lit_sd.models.families import TEXT_ENCODERS, TrainedComponent
from lit_sd.models.stable_diffusion import StableDiffusion

UNET_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
TEXT_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")
FILE = "pytorch_lora_weights.safetensors"
ADAPTER = "default"
PORTABLE = (
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "bias",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
)
"""What of a LoRA config goes into the file: enough to rebuild it, and known to every PEFT version that
diffusers works with.
"""


class Peft(Adapter):
    """LoRA matrices in the networks that have a config; DoRA is `LoraConfig(use_dora=True)`.

    Args:
        configs: `{component: LoraConfig}` by diffusers' names.

    Raises:
        ValueError: no component has a config.
        TypeError: a config is of another PEFT method.
    """

    def __init__(self, configs: Mapping[str, LoraConfig]) -> None:
        if not configs:
            raise ValueError(
                "adapter.components is empty, so nothing would train; expected e.g. [unet] or "
                "[unet,text_encoder]"
            )
        for name, config in configs.items():
            if not isinstance(config, LoraConfig):
                raise TypeError(f"{name}: expected a peft.LoraConfig, got {type(config).__name__}")
        self.configs = dict(configs)

    def attach(self, model: StableDiffusion) -> None:
        """Inject the matrices.

        Raises:
            ValueError: a target name matches no layer, or the family has no such component.
        """
        parts = {name: component(model, name) for name in self.configs}
        for name, part in parts.items():
            if (idle := model.idle_modules(name)) and not self.configs[name].exclude_modules:
                self.configs[name].exclude_modules = _regex_of(idle)
            check_targets(name, part, self.configs[name])
        check_patterns(self.configs, parts)
        for name, part in parts.items():
            open_before = trainable_tensors(part)  # injection freezes all that is not its own
            inject_adapter_in_model(self.configs[name], part, adapter_name=ADAPTER)
            for key, parameter in part.named_parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
                elif key in open_before:
                    parameter.requires_grad_(True)
            part.train()

    def export(self, model: StableDiffusion, folder: Path) -> list[Path]:
        """Write `pytorch_lora_weights.safetensors`, for `pipe.load_lora_weights(folder)`.

        Alpha, ranks and targets stand in the file's metadata; without it readers assume alpha = rank.
        """
        tensors: dict[str, Tensor] = {}
        metadata: dict[str, Any] = {}
        for name in self.configs:
            part = getattr(model, name)
            for key, tensor in get_peft_model_state_dict(part, adapter_name=ADAPTER).items():
                tensors[f"{name}.{_portable_key(name, key)}"] = tensor.detach().float().cpu().contiguous()
            metadata |= {
                f"{name}.{key}": value for key, value in _portable_config(self.configs[name]).items()
            }
        folder.mkdir(parents=True, exist_ok=True)
        path, aside = folder / FILE, folder / f".{FILE}.part"
        packed = json.dumps(metadata, indent=2, sort_keys=True)
        safetensors.torch.save_file(tensors, aside, {"format": "pt", "lora_adapter_metadata": packed})
        os.replace(aside, path)
        return [path]


def lora(
    *,
    rank: int,
    alpha: float | None = None,
    dropout: float = 0.0,
    components: Sequence[TrainedComponent] = ("unet",),
    targets: Mapping[TrainedComponent, Sequence[str] | str | None] | None = None,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    use_rslora: bool = False,
    use_dora: bool = False,
) -> Peft:
    """LoRA for the named networks, with the same rank everywhere or by pattern.

    Args:
        rank: of the matrices.
        alpha: the update is scaled by alpha / rank; None is alpha = rank, a scale of 1.
        dropout: on the matrices' input.
        components: which networks; text encoders train only when they are named.
        targets: per component, the layers' names (their ends) or one regular expression; None is attention's
            projections.
        ranks: other ranks, by regular expression or end of a layer's name.
        alphas: other alphas, in the same way.
        use_rslora: scale by alpha / sqrt(rank) (arXiv:2312.03732).
        use_dora: train a magnitude beside each direction (arXiv:2402.09353).

    Raises:
        ValueError: the rank is not positive, or `targets` names a component that does not train.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """
    if rank < 1:
        raise ValueError(f"adapter.rank={rank}; expected 1 or more")
    chosen = {name: value for name, value in (targets or {}).items() if value}
    if idle := sorted(set(chosen) - set(components)):
        raise ValueError(
            f"adapter.targets is set for {', '.join(idle)}, which does not train; expected it "
            "in adapter.components"
        )
    configs: dict[str, LoraConfig] = {}
    for name in dict.fromkeys(components):
        default = TEXT_TARGETS if name in TEXT_ENCODERS else UNET_TARGETS
        where = chosen.get(name, default)
        configs[name] = LoraConfig(
            r=rank,
            lora_alpha=rank if alpha is None else alpha,  # type: ignore[arg-type]
            lora_dropout=dropout,
            target_modules=where if isinstance(where, str) else list(where),
            rank_pattern=dict(ranks or {}),
            alpha_pattern=dict(alphas or {}),
            use_rslora=use_rslora,
            use_dora=use_dora,
        )
    return Peft(configs)


def check_targets(name: str, part: nn.Module, config: LoraConfig) -> None:
    """Every target must match a layer; PEFT is content when one of them does.

    Raises:
        ValueError: one does not, or the network has matrices already.
    """
    if any(isinstance(module, BaseTunerLayer) for module in part.modules()):
        raise ValueError(f"{name} has LoRA matrices already; attach one LoRA adapter per component")
    targets = config.target_modules or ()
    whole = isinstance(targets, str)
    wanted = [targets] if isinstance(targets, str) else sorted(targets)
    layers = _layers(part)
    if lost := [target for target in wanted if not _matches(target, layers, whole)]:
        raise ValueError(_unmatched(lost, name, layers))


def check_patterns(configs: Mapping[str, LoraConfig], parts: Mapping[str, nn.Module]) -> None:
    """Every pattern of a rank or alpha must match a layer of a network that has it; PEFT ignores the others.

    Raises:
        ValueError: one does not.
    """
    layers = {name: _layers(part) for name, part in parts.items()}
    seen: dict[str, bool] = {}
    for name, config in configs.items():
        for pattern in (*(config.rank_pattern or {}), *(config.alpha_pattern or {})):
            found = any(re.match(rf"(.*\.)?({pattern})$", key) for key in layers[name])
            seen[pattern] = seen.get(pattern, False) or found
    if lost := [pattern for pattern, found in seen.items() if not found]:
        raise ValueError(
            _unmatched(lost, " or ".join(layers), [key for keys in layers.values() for key in keys])
        )


def _layers(part: nn.Module) -> list[str]:
    return [
        k for k, module in part.named_modules() if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding)
    ]


def _unmatched(lost: Sequence[str], where: str, layers: Sequence[str]) -> str:
    ends = sorted({_end(key) for key in layers})
    near = get_close_matches(lost[0], ends, 3)
    hint = f"did you mean {', '.join(near)}" if near else f"its layers end in {', '.join(ends[:20])}"
    return f"adapter: {', '.join(map(repr, lost))} match no layer of {where}; {hint}"


def _matches(target: str, layers: Sequence[str], whole: bool) -> bool:
    if whole:
        return any(re.fullmatch(target, key) for key in layers)
    return any(key == target or key.endswith(f".{target}") for key in layers)


def _end(key: str) -> str:
    """The last name of a layer that is not a number, with the number that follows: `to_out.0`."""
    return re.sub(r"^.*?([A-Za-z_]\w*(\.\d+)?)$", r"\1", key)


def _regex_of(prefixes: Sequence[str]) -> str:
    names = "|".join(re.escape(prefix.rstrip(".").removeprefix("text_model.")) for prefix in prefixes)
    return rf"(text_model\.)?({names})(\..*)?"


def _portable_key(component_name: str, key: str) -> str:
    """Text encoders' keys carry `text_model.`, which newer transformers drop; readers of both kinds know the
    long form.
    """
    if component_name in TEXT_ENCODERS and not key.startswith("text_model."):
        return f"text_model.{key}"
    return key


def _portable_config(config: LoraConfig) -> dict[str, Any]:
    whole = config.to_dict()
    kept = {key: whole[key] for key in PORTABLE if whole.get(key) is not None}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in kept.items()}
