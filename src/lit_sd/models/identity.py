"""What a base model is, told by the content of its weights and never by where they lie."""

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHTS = {"diffusion_pytorch_model", "model", "pytorch_model"}
"""How diffusers and transformers call files of weights, up to the first dot."""
FORMATS = (".safetensors", ".bin")
"""Formats of weights, the one that is read where both are there first."""


def hash_file(path: Path) -> str:
    """SHA-256 over a file's content, 16 hex digits. About a second per GB."""
    return _file_digest(path)[:16]


def hash_files(root: Path, paths: Iterable[Path]) -> str:
    """SHA-256 over names (relative to `root`, with parent folder) and contents, 16 hex digits."""
    ordered = sorted(paths)
    with ThreadPoolExecutor(4) as pool:  # hashlib lets go of the GIL
        digests = list(pool.map(_file_digest, ordered))
    return hash_text(*(f"{p.relative_to(root)}:{d}" for p, d in zip(ordered, digests, strict=True)))


def hash_text(*texts: str) -> str:
    """SHA-256 over texts, 16 hex digits."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def weights_read(folder: Path, variant: str | None = None) -> list[Path]:
    """Of a component's folder, the files of weights that loading it reads.

    A full clone holds the same weights in several formats and precisions; what was downloaded holds one.
    """
    for wanted in dict.fromkeys([variant, None]):
        for suffix in FORMATS:
            found = [path for path in sorted(folder.glob(f"*{suffix}")) if _is_variant(path, wanted)]
            if found:
                return found
    return []


def _is_variant(path: Path, variant: str | None) -> bool:
    """`model.safetensors` is of no variant, `model.fp16.safetensors` and its shards are of fp16."""
    stem, *tags = re.sub(r"-\d{5}-of-\d{5}", "", path.stem).split(".")
    return stem in WEIGHTS and tags == ([variant] if variant else [])


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
