"""Captions to token ids, and token ids to the states that a UNet was trained on.

Shape legend: b captions, k windows per caption, s tokens per window, d features, p pooled features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def count_tokens(tokenizer: Any, captions: Sequence[str]) -> list[int]:
    """Tokens of each caption with start and end token, uncut."""
    return [len(ids) for ids in tokenizer(list(captions), truncation=False, verbose=False).input_ids]


def tokenise(tokenizer: Any, captions: Sequence[str], chunks: int = 1) -> Int[Tensor, "b k s"]:
    """Token ids, each window framed by start and end token and padded.

    With one window a longer caption is cut and keeps its end token, as diffusers' pipelines do. With more, a
    caption fills as many windows as it needs, up to `chunks`; all captions get as many windows as the longest
    one.
    """
    length = tokenizer.model_max_length
    framed = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
    if chunks == 1:
        return tokenizer(list(captions), **framed).input_ids[:, None]
    room = length - 2
    bodies = [ids[1:-1] for ids in tokenizer(list(captions), truncation=False, verbose=False).input_ids]
    used = min(chunks, max(1, *(-(-len(body) // room) for body in bodies)))
    start, end, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    windows = []
    for body in bodies:
        parts = [body[i * room : (i + 1) * room] for i in range(used)]
        windows.append([[start, *part, end] + [pad] * (room - len(part)) for part in parts])
    return torch.tensor(windows)


def hidden_states(
    encoder: nn.Module, ids: Int[Tensor, "b k s"], penultimate: bool
) -> tuple[Float[Tensor, "b ks d"], Float[Tensor, "b p"] | None]:
    """Token states of all windows in a row, and the first window's projected vector where the encoder has a
    projection.

    SD 1.x and 2.x use the last layer after its norm (SD 2's encoder ships with its last layer left out, which
    is its "clip skip"); SDXL uses the layer before the last, without the norm. Both are what diffusers'
    `encode_prompt` does.
    """
    batch, windows, length = ids.shape
    out = encoder(ids.flatten(0, 1), output_hidden_states=penultimate)
    states = out.hidden_states[-2] if penultimate else out.last_hidden_state
    pooled = getattr(out, "text_embeds", None)
    if pooled is not None:
        pooled = pooled.unflatten(0, (batch, windows))[:, 0]
    return states.reshape(batch, windows * length, -1), pooled
