"""A cache's latents as tar shards in webdataset's layout, to be carried elsewhere; and such shards read back
into a cache.

An example is `KEY.latents.safetensors`, `KEY.txt` and `KEY.json`. Tensors are called
`HxW/CROP/FLIP/TOP_LEFT/PART`: the shape in pixels, how the crop was chosen, `flipped` or `plain`, the crop's
corner in the scaled (and flipped) picture, and `mean`, `std` or `mask`.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latents import KIND, VERSION, Recipe, Variant, pack_moments, unpack_moments
from lit_sd.data.caches.writer import KEY, PartWriter
from lit_sd.data.shards.texts import packed_json
from lit_sd.data.source import Source
from lit_sd.together import Together

MEMBER = "latents.safetensors"
PLAN, IMPORTED = "latents.json", ".imported.json"
NAME = "latents-{:05d}.tar"


def write_latent_shards(
    cache: LatentCache,
    requests: Sequence[Request],
    out: str | os.PathLike,
    *,
    shard_size: int = 1000,
    together: Together | None = None,
) -> Path:
    """Writes everything that requests may ask for, from a filled cache. All ranks call it, each writes some.
    Equal latents give equal bytes; what a killed run left in `OUT.partial` is not written again.

    Args:
        cache: filled for these requests.
        requests: what a run may ask for.
        out: the folder to come.
        shard_size: examples of a shard.
        together: the ranks.

    Raises:
        FileExistsError: `out` is there already, or part of one of other latents.
        OSError: the cache isn't filled.
        ModuleNotFoundError: webdataset is not installed.
    """
    together, path = together or Together(), Path(out).expanduser().absolute()
    partial = path.with_name(f"{path.name}.partial")
    sources = list({id(request.source): request.source for request in requests}.values())
    examples = [(source, row) for source in sources for row in range(len(source))]
    plan = _plan(cache, requests, sources, shard_size)

    def begin() -> None:
        if path.exists():
            raise FileExistsError(f"{path} is there already; delete it, or write to another folder")
        there = partial / PLAN
        if there.is_file() and json.loads(there.read_text(encoding="utf-8")) != plan:
            raise FileExistsError(f"{partial} is there, a part of other latents; delete it")
        partial.mkdir(parents=True, exist_ok=True)
        for torn in partial.glob(".*"):  # of a run that was killed while writing
            torn.unlink()
        there.write_text(json.dumps(plan), encoding="utf-8")

    def write() -> None:
        for number in together.share(-(-len(examples) // shard_size)):
            shard = partial / NAME.format(number)
            if not shard.is_file():
                some = range(number * shard_size, min((number + 1) * shard_size, len(examples)))
                _write_shard(shard, ((i, *examples[i]) for i in some), cache, requests)

    what = "writing shards of latents"
    together.run(what, lambda: begin() if together.rank == 0 else None)
    together.run(what, write)
    together.run(what, lambda: partial.rename(path) if together.rank == 0 else None)
    return path


def _plan(
    cache: LatentCache, requests: Sequence[Request], sources: Sequence[Source], shard_size: int
) -> dict[str, Any]:
    """What the shards' bytes depend on."""
    content = hashlib.sha256()
    for request in requests:
        recipe = cache.recipe_of(request)
        for _, forms in cache.forms(request):
            content.update(recipe.keys(forms).tobytes())
    for source in sources:
        content.update(source.identity().encode())
    return {"content": content.hexdigest(), "shard_size": shard_size, **_about(cache.recipe)}


def _about(recipe: Recipe) -> dict[str, Any]:
    return {"version": VERSION, "vae": recipe.encoder, "dtype": recipe.dtype}


def _write_shard(
    path: Path, examples: Iterable[tuple[int, Source, int]], cache: LatentCache, requests: Sequence[Request]
) -> None:
    try:
        from webdataset import TarWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("shards are written with webdataset: pip install 'lit-sd[data]'") from error
    aside = path.with_name(f".{path.name}.{uuid4().hex}")
    with aside.open("wb") as file:
        tar = TarWriter(
            file, user="lit-sd", group="lit-sd", mode=0o644, compress=False, encoder=False, mtime=0
        )
        for number, source, row in examples:
            record, (digest, size) = source.record(row), cache.facts(source)[row]
            about = {"source": source.name, "alpha_mask": source.alpha_mask, **_about(cache.recipe)}
            content = json.loads(packed_json(record, size)) | {"digest": digest.hex(), "latents": about}
            files = {
                MEMBER: save(_tensors(source, row, cache, requests)),
                "json": json.dumps(content).encode(),
            }
            if record.captions:
                files["txt"] = record.captions[0].text.encode("utf-8", "replace")
            tar.write({"__key__": f"{number:09d}", **files})
        tar.close()
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _tensors(source: Source, row: int, cache: LatentCache, requests: Sequence[Request]) -> dict[str, Tensor]:
    """All variants of a picture, by name."""
    tensors: dict[str, Tensor] = {}
    for request in requests:
        if request.source is not source or not request.covers(row):
            continue
        recipe = cache.recipe_of(request)
        for variant in cache.variants_of(request, row):
            value = cache.parts.values([recipe.key(variant)])[0]
            if value is None:
                raise OSError(f"{source.name}: image {row} isn't in {cache.folder}; fill the cache first")
            kept = unpack_moments(value)
            height, width = variant.target
            flip = "flipped" if variant.flip else "plain"
            stem = f"{height}x{width}/{recipe.crop}/{flip}/{kept.corner[0]}_{kept.corner[1]}"
            tensors |= {f"{stem}/mean": kept.mean, f"{stem}/std": kept.std}
            if kept.mask is not None:
                tensors[f"{stem}/mask"] = kept.mask
    return tensors


def import_latent_shards(cache: LatentCache, together: Together | None = None) -> int:
    """Takes over what shards of latents in a cache's folder hold, once. All ranks call it, each reads some.
    Returns how many variants were new, of all ranks together.

    Raises:
        ValueError: a shard is damaged, or not of this kind.
    """
    together, note = together or Together(), cache.folder / KIND / IMPORTED
    what = "importing shards of latents"

    def look() -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        known = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
        found = {
            path.name: [stat.st_size, stat.st_mtime_ns, *_about(cache.recipe).values()]
            for path in sorted(cache.folder.glob(NAME.format(0).replace("00000", "*")))
            if (stat := path.stat())
        }
        return known, {name: state for name, state in found.items() if known.get(name) != state}

    known, new = together.run(what, look)[0]
    if not new:
        return 0
    cache.parts.agree(together)

    def work() -> int:
        count = 0
        with PartWriter(cache.folder / KIND, KIND) as writer:
            for i in together.share(len(new)):
                for key, value in _entries(cache.folder / list(new)[i], cache.recipe):
                    if not cache.parts.has(np.frombuffer(key, KEY)).any():
                        writer.write(key, value)
                        count += 1
        return count

    def remember() -> None:
        aside = note.with_suffix(".tmp")
        aside.write_text(json.dumps(known | new), encoding="utf-8")
        aside.replace(note)

    count = sum(together.run(what, work))
    together.run(what, lambda: remember() if together.rank == 0 else None)
    cache.parts.agree(together)
    return count


def _entries(path: Path, recipe: Recipe) -> Iterator[tuple[bytes, bytes]]:
    """What a shard holds that a recipe asks for, as the cache keeps it."""
    try:
        with tarfile.open(path) as tar:
            files: dict[str, tuple[str, bytes]] = {}
            for member in tar:
                key, _, kind = member.name.partition(".")
                file = tar.extractfile(member)
                if file is None or kind not in (MEMBER, "json"):
                    continue
                files[kind] = key, file.read()
                if {found for found, _ in files.values()} == {key} and len(files) == 2:
                    yield from _packed(json.loads(files["json"][1]), load(files[MEMBER][1]), recipe)
    except (tarfile.TarError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} can't be read as a shard of latents: {error!r}; write it again") from error


def _packed(
    content: dict[str, Any], tensors: dict[str, Tensor], recipe: Recipe
) -> Iterator[tuple[bytes, bytes]]:
    about = content["latents"]
    if {name: about[name] for name in _about(recipe)} != _about(recipe):
        return
    digest, size = bytes.fromhex(content["digest"]), (content["height"], content["width"])
    for name in tensors:
        stem, _, part = name.rpartition("/")
        if part != "mean":
            continue
        shape, crop, flip, corner = stem.split("/")
        height, width = map(int, shape.split("x"))
        top, left = map(int, corner.split("_"))
        own = Recipe(recipe.encoder, recipe.dtype, crop)  # type: ignore[arg-type]  # judged by what follows
        variant = Variant(digest, size, (height, width), flip == "flipped", about["alpha_mask"])
        if own.corner(variant) not in (None, (top, left)):
            raise ValueError(f"{content['id']}: {name} is not where this version crops")
        mean, std, mask = tensors[name], tensors[f"{stem}/std"], tensors.get(f"{stem}/mask")
        yield own.key(variant), pack_moments(mean, std, (top, left), mask, recipe.dtype)
