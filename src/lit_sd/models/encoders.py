"""What a frozen VAE's and text encoders' outputs depend on, told by content, for caches of them.

Only what is encoded with counts: another UNet, or the same weights in another file, changes nothing.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lit_sd.models.stable_diffusion import StableDiffusion

_NOTES = ("transformers_version", "architectures", "dtype", "torch_dtype")
"""What configs say of where weights come from and how they are stored; the weights tell that themselves."""
_digests: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def vae_identity(model: StableDiffusion) -> str:
    """Tells the VAE's weights, config and precision; the same for the same ones, wherever they come from."""
    return _joined(_network(model.vae), _precision(model.vae, without_half=True))


def text_identity(model: StableDiffusion) -> str:
    """Tells the text encoders and tokenizers, how captions are cut, which layer counts, and the precision."""
    parts: list[Any] = [model.family.startswith("sdxl"), model.caption_chunks]
    for encoder, tokenizer in (
        (model.text_encoder, model.tokenizer),
        (model.text_encoder_2, model.tokenizer_2),
    ):
        if encoder is not None:
            parts += [_network(encoder), _tokenizer(tokenizer), _precision(encoder)]
    return _joined(*map(str, parts))


def _joined(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _precision(network: Any, without_half: bool = False) -> str:
    """What matrix products are rounded to. The VAE never runs in float16."""
    kind = network.device.type
    if not torch.is_autocast_enabled(kind):
        return "as stored"
    dtype = torch.get_autocast_dtype(kind)
    return "as stored" if without_half and dtype == torch.float16 else str(dtype)


def _network(network: Any) -> str:
    """Of weights and config. Found once for each network, as it is frozen: about a second per 4 GB."""
    if network not in _digests:
        config = network.config if isinstance(network.config, dict) else network.config.to_dict()
        kept = {k: v for k, v in config.items() if not k.startswith("_") and k not in _NOTES}
        with ThreadPoolExecutor(4) as pool:  # hashlib lets go of the GIL
            weights = list(pool.map(_tensor, *zip(*sorted(network.state_dict().items()), strict=True)))
        _digests[network] = _joined(json.dumps(kept, sort_keys=True, default=str), *weights)
    return _digests[network]


def _tensor(name: str, tensor: Tensor) -> str:
    content = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    content.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def _tokenizer(tokenizer: Any) -> str:
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    for passing in ("truncation", "padding"):  # as the last call left them
        settings.pop(passing, None)
    special = [
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.model_max_length,
    ]
    return _joined(json.dumps(settings, sort_keys=True), str(special))
