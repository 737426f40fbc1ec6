"""CLIP's tokenizer, built from the merges that this package ships: no hub and no file beside a model is
needed.
"""

import gzip
from importlib.resources import files
from typing import Any

from transformers import CLIPTokenizer

MERGES = 48_894
"""Merges of OpenAI's CLIP; with 2 x 256 bytes and 2 special tokens they make 49,408 ids."""
START, END = "<|startoftext|>", "<|endoftext|>"


def clip_tokenizer(merges: int = MERGES, pad_token: str = END) -> CLIPTokenizer:
    """The tokenizer of Stable Diffusion's text encoders, or a smaller one of the same kind.

    Ids are CLIP's own: 0-255 bytes, 256-511 bytes at the end of a word, then the merges, then start and end
    token. Fewer merges give a smaller vocabulary that still spells any text; `merges=0` is byte level with
    514 ids, for tiny models.

    Args:
        merges: how many of the byte-pair merges to keep, most frequent first.
        pad_token: SD 1.x pads with the end token; SD 2.x and SDXL's second encoder pad with "!", which is id
            0.

    Raises:
        ValueError: `merges` lies outside 0 to 48,894.

    Source: Radford et al. 2021, arXiv:2103.00020; github.com/openai/CLIP, clip/simple_tokenizer.py
    (vocabulary layout).
    """
    if not 0 <= merges <= MERGES:
        raise ValueError(f"merges={merges}; CLIP's tokenizer has 0 to {MERGES} of them")
    pairs: Any = [tuple(line.split(" ")) for line in _merge_lines()[:merges]]
    symbols = _byte_symbols()
    tokens = [*symbols, *(s + "</w>" for s in symbols), *("".join(pair) for pair in pairs), START, END]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=pairs,
        pad_token=pad_token,
        model_max_length=77,
    )


def _merge_lines() -> list[str]:
    packed = files("lit_sd").joinpath("assets/clip_tokenizer/merges.txt.gz").read_bytes()
    return gzip.decompress(packed).decode().splitlines()


def _byte_symbols() -> list[str]:
    """A printable character for each byte, in CLIP's order: those that print stand for themselves, the rest
    follow from 256.
    """
    printing = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = 256 - len(printing)
    return [chr(c) for c in [*printing, *range(256, 256 + hidden)]]
