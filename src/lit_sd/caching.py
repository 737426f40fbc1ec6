"""What `data.cache` asks for, between the data and the model: the module's cache, and a cache on disk that is
filled before the first step.
"""

from functools import partial
from typing import Any

import torch
from jaxtyping import UInt8
from lightning import Trainer
from torch import Tensor

from lit_sd.data.cache import MemoryCache, Moments
from lit_sd.data.caches.filling import fill_latents
from lit_sd.data.caches.latent_cache import LatentCache, Request
from lit_sd.data.caches.latent_shards import import_latent_shards
from lit_sd.data.caches.latents import Recipe
from lit_sd.data.caches.texts import TextCache, texts_of
from lit_sd.data.datamodule import SDDataModule
from lit_sd.data.loading import to_floats
from lit_sd.data.source import Source
from lit_sd.models.encoders import text_identity, vae_identity
from lit_sd.models.families import TEXT_ENCODERS
from lit_sd.models.stable_diffusion import StableDiffusion
from lit_sd.module import trains
from lit_sd.together import Together


def connect(datamodule: Any, module: Any, trainer: Trainer) -> None:
    """Gives module and DataModule the cache that `data.cache` chooses.

    Args:
        datamodule: what has no `cache` has no cache.
        module: gets one for what it encodes itself.
        trainer: of the run.

    Raises:
        ValueError: it can't be had with what trains here.
    """
    choice = getattr(datamodule, "cache", None)
    if choice is None or choice.mode == "off":
        return
    if not hasattr(module, "cache"):
        raise ValueError(
            f"data.cache={choice.mode} keeps what a frozen VAE and text encoders gave, and "
            f"{type(module).__name__} has none; set data.cache=off"
        )
    if choice.mode == "memory":
        module.cache = MemoryCache(choice.megabytes)
        return
    if trains(module.model.vae):
        raise ValueError(
            "data.cache=disk keeps what the VAE gave, but the VAE trains here; set data.cache=off"
        )
    for name, source in datamodule.sources.items():
        if "control" in getattr(source, "partner_roots", ()):
            raise ValueError(
                f"{name} has control images, which have to be cropped with the pictures each time; set "
                "data.cache=memory or off"
            )
    datamodule.fill_cache = partial(fill_caches, datamodule, module, trainer)


def fill_caches(datamodule: SDDataModule, module: Any, trainer: Trainer) -> LatentCache:
    """Encodes what the cache on disk lacks, on all ranks. The module gets the texts; returns the latents.

    Raises:
        OSError: an image can't be read, or there is no room.
        ValueError: the cache is damaged, or something can't be cached.
        RuntimeError: another rank failed, or sees another folder.
    """
    choice, model = datamodule.cache, module.model
    together = Together(trainer.global_rank, trainer.world_size)
    for frozen in (model.vae, *text_encoders(model)):
        frozen.to(trainer.strategy.root_device)
    with trainer.precision_plugin.forward_context(), torch.no_grad():
        latents = LatentCache(choice.path, Recipe(vae_identity(model), choice.dtype))
        import_latent_shards(latents, together)
        fill_latents(
            latents,
            requests_of(datamodule, trainer.world_size),
            partial(_encode, model),
            together,
            batch=choice.batch,
            num_workers=datamodule.num_workers,
        )
        texts = None
        if choice.texts and not any(trains(encoder) for encoder in text_encoders(model)):
            texts = TextCache(choice.path, text_identity(model), choice.dtype)
            texts.fill(texts_of(_sources(datamodule)), model.encode_text, together)
    module.cache = texts
    latents.notes = report(datamodule, latents, texts)
    return latents


def _encode(model: StableDiffusion, pictures: UInt8[Tensor, "b h w 3"]) -> Moments:
    return model.moments(to_floats({"pixels": pictures.to(model.vae.device)})["pixels"])


def _sources(datamodule: SDDataModule) -> list[Source]:
    return [*datamodule.sources.values(), *([] if datamodule.val is None else [datamodule.val])]


def text_encoders(model: StableDiffusion) -> list[Any]:
    """Those that its family has."""
    return [part for name, part in model.components().items() if name in TEXT_ENCODERS]


def requests_of(datamodule: SDDataModule, world_size: int) -> list[Request]:
    """Every variant of every picture that training and validation may ask for."""
    square, held = [(datamodule.resolution, datamodule.resolution)], datamodule.val_indexes()
    flips = tuple(
        flip for flip, asked in ((False, datamodule.flip < 1), (True, datamodule.flip > 0)) if asked
    )
    lead, *others = datamodule.batch_sampler(0, world_size).pools
    requests = [
        Request(
            member.source,
            datamodule.buckets or square,
            datamodule.crop,
            flips,
            aside=held if member.number == 0 else (),
        )
        for member in lead.members
    ]
    # Images of the other pools are cropped to whatever shape their batch has.
    requests += [
        Request(member.source, lead.shapes, datamodule.crop, flips)
        for pool in others
        for member in pool.members
    ]
    if datamodule.val is not None:
        requests.append(Request(datamodule.val, square, "center", (False,)))
    elif held:
        requests.append(Request(lead.members[0].source, square, "center", (False,), rows=held))
    return requests


def prune_caches(datamodule: SDDataModule, module: Any, latents: LatentCache, together: Together) -> str:
    """Drops from the cache on disk what this run doesn't ask for: latents and texts of other images,
    captions, options or encoders. All ranks call it, one does it; nothing else may use the cache meanwhile.
    Texts stay where the run keeps none.

    Returns:
        A line on what was dropped.

    Raises:
        ValueError: a part is damaged.
        OSError: there is no room for what stays.
    """
    texts: TextCache | None = module.cache

    def work() -> tuple[int, int]:
        if together.rank > 0:
            return 0, 0
        dropped = 0 if texts is None else texts.prune(texts_of(_sources(datamodule)))
        return latents.prune(requests_of(datamodule, together.world_size)), dropped

    dropped = together.run("pruning the cache", work)[0]
    for cache in (latents, texts):
        if cache is not None:
            cache.parts.agree(together)
    return f"dropped {dropped[0]} latents and {dropped[1]} captions that this config doesn't ask for"


def report(datamodule: SDDataModule, latents: LatentCache, texts: TextCache | None) -> list[str]:
    """Lines on what the cache holds, what was new, and what it fixes."""
    choice = datamodule.cache
    lines = [
        f"cache: {latents.wanted} latents in {choice.path}, {latents.encoded} of them encoded now, "
        f"{latents.parts.nbytes / 2**20:.1f} MiB in all"
    ]
    if texts is not None:
        size = texts.parts.nbytes / 2**20
        lines.append(
            f"cache: {texts.wanted} captions, {texts.encoded} of them encoded now, {size:.1f} MiB in all"
        )
    if datamodule.crop != "center":
        lines.append("crops are fixed: each picture has one for each shape (data.cache=disk)")
    return lines
