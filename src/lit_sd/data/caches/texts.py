"""Text encoders' outputs from a cache on disk.

Shape legend: s tokens, d features, p pooled features.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lit_sd.data.cache import Moments, States, joined, row_of
from lit_sd.data.caches.latents import CacheDtype
from lit_sd.data.caches.parts import Parts
from lit_sd.data.caches.progress import CacheProgress
from lit_sd.data.caches.pruning import prune_parts
from lit_sd.data.caches.writer import KEY, PartWriter
from lit_sd.data.source import Source
from lit_sd.together import Together
from lit_sd.types import Conditioning, Pixels

KIND = "texts"

_VERSION = 1
_MAGIC = b"LSDT"
_HEADER = struct.Struct("<4sBBHIII12x")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BITS = {4: torch.int32, 2: torch.int16}


class TextCache:
    """What frozen text encoders gave for captions. Those that are not in it are encoded anew each time, all
    of a batch together.

    Args:
        folder: of the cache.
        encoder: identity of text encoders and tokenizers, and how they are used.
        dtype: what is kept; "float32" keeps the encoders' own.

    Attributes:
        wanted: captions that were asked for ahead.
        encoded: those that had to be encoded, by all ranks together.
    """

    def __init__(self, folder: Path, encoder: str, dtype: CacheDtype = "float32") -> None:
        self.folder, self.encoder, self.dtype = folder / KIND, encoder, dtype
        self.parts = Parts(self.folder, KIND)
        self.wanted = self.encoded = 0
        text = repr((_VERSION, encoder, dtype))
        self._salt = hashlib.blake2b(text.encode(), digest_size=16).digest()

    def key(self, caption: str) -> bytes:
        """What a caption's states are kept under."""
        text = caption.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, digest_size=16, key=self._salt).digest()

    def moments(self, pixels: Pixels, encode: Callable[[Tensor], Moments]) -> Moments:
        """The posterior's moments of pictures, which are not kept here."""
        return encode(pixels)

    def text(self, captions: Sequence[str], encode: Callable[[list[str]], Conditioning]) -> Conditioning:
        """Text states of each caption; `encode` is called on those that are not kept."""
        unique = list(dict.fromkeys([*captions, ""]))
        values = self.parts.values([self.key(caption) for caption in unique])
        rows = {
            caption: unpack_states(value)
            for caption, value in zip(unique, values, strict=True)
            if value is not None
        }
        missing = [caption for caption in unique if caption not in rows and (caption or "" in captions)]
        if missing:
            cond = encode(missing)
            rows = {caption: row.to(cond.hidden.device) for caption, row in rows.items()}
            rows |= {caption: row_of(cond, i) for i, caption in enumerate(missing)}
        return joined(
            [rows[caption] for caption in captions], lambda: rows.get("") or row_of(encode([""]), 0)
        )

    def prune(self, captions: Iterable[str]) -> int:
        """Drops all captions but these; see `lit_sd.data.caches.pruning`. Returns how many were dropped."""
        keys = np.frombuffer(b"".join(map(self.key, captions)), KEY)
        return prune_parts(self.folder, KIND, keys)

    def fill(
        self, captions: Iterable[str], encode: Callable[[list[str]], Conditioning], together: Together
    ) -> None:
        """Encodes those captions that are not kept yet, each alone. All ranks call it, each takes a share and
        writes a part of its own.

        Raises:
            OSError: there is no room.
            RuntimeError: it failed on another rank, or ranks don't see the same folder.
        """
        what = "filling the cache of texts"
        self.parts.agree(together)
        unique = list(dict.fromkeys(captions))
        self.wanted = len(unique)
        keys = np.frombuffer(b"".join(map(self.key, unique)), KEY)
        missing = np.flatnonzero(~self.parts.has(keys)).tolist() if unique else []
        together.run(what, lambda: None)  # nobody writes before all have looked
        mine = [unique[missing[i]] for i in together.share(len(missing))]

        def work() -> int:
            with (
                PartWriter(self.folder, KIND) as writer,
                CacheProgress(
                    f"encoding captions{together.shared}", len(mine), shown=together.rank == 0
                ) as bar,
            ):
                for caption in mine:
                    try:
                        writer.write(self.key(caption), pack_states(row_of(encode([caption]), 0), self.dtype))
                    except ValueError as error:
                        raise ValueError(f"caption {caption!r}: {error}") from error
                    bar.advance()
            return len(mine)

        self.encoded = sum(together.run(what, work if mine else lambda: 0))
        self.parts.agree(together, keys)


def pack_states(states: States, dtype: CacheDtype) -> bytes:
    """One caption's states as bytes. Raises ValueError where they are not finite in the dtype."""
    own = states.hidden.dtype
    kept = own if own.itemsize == 2 else getattr(torch, dtype)
    parts = [part.to("cpu", kept) for part in (states.hidden, states.pooled) if part is not None]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise ValueError(f"its states are not finite in {kept}; set data.cache_dtype=float32")
    width = 0 if states.pooled is None else len(states.pooled)
    header = _HEADER.pack(_MAGIC, _DTYPES.index(kept), _DTYPES.index(own), 0, *states.hidden.shape, width)
    bits = _BITS[kept.itemsize]
    return b"".join([header, *(part.contiguous().view(bits).numpy().tobytes() for part in parts)])


def unpack_states(value: bytes | memoryview) -> States:
    """One caption's states, in the dtype that its encoder gave. Raises ValueError where it is damaged."""
    magic, kept, own, _, tokens, features, width = _HEADER.unpack_from(value)
    dtype = _DTYPES[kept]
    length = tokens * features
    if magic != _MAGIC or len(value) != _HEADER.size + (length + width) * dtype.itemsize:
        raise ValueError("a cached caption is damaged; delete the cache's folder of texts")
    bits = np.frombuffer(value, f"<i{dtype.itemsize}", offset=_HEADER.size).copy()
    floats = torch.from_numpy(bits).view(dtype).to(_DTYPES[own])
    pooled = floats[length:] if width else None
    return States(floats[:length].view(tokens, features), pooled)


def texts_of(sources: Iterable[Source]) -> Iterator[str]:
    """Every text that these sources may give a picture, as far as that is known ahead; and the empty one."""
    yield ""
    for source in sources:
        if source.rule.enumerable:
            for row in range(len(source)):
                yield from source.rule.texts(source.captions_of(row)) or ()
