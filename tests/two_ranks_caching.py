"""One rank of `test_caching_ranks.py`: two processes fill a cache on disk, read it, fail to fill it."""

import hashlib
import sys
from pathlib import Path

import torch
from tiny_runs import images, module_of, trainer_of

from lit_sd.caching import connect
from lit_sd.models.loading import load


def run(model_dir: str, root: str, out: Path, name: str, resolution: int = 32, breaks: bool = False) -> None:
    model, encoded, captions = load(model_dir), [], []
    vae, text = model.vae.encode, model.encode_text

    def encode(pixels):
        if breaks and trainer.global_rank == 1:
            raise ValueError("this rank's VAE broke")
        encoded.extend(hashlib.md5(picture.numpy().tobytes()).hexdigest() for picture in pixels)
        return vae(pixels)

    def encode_text(given):
        captions.extend(given)
        return text(given)

    model.vae.encode, model.encode_text = encode, encode_text
    module = module_of(model)
    options = {"cache": "disk", "cache_dir": out / "cache", "flip": True, "resolution": resolution}
    data = images(Path(root), **options)
    trainer = trainer_of(out, devices=2, strategy="ddp", max_steps=2)
    connect(data, module, trainer)
    error, entries = "", 0
    try:
        trainer.fit(module, data)
        entries = len(data.latents.parts)
    except (ValueError, RuntimeError) as stop:
        error = f"{type(stop).__name__}: {stop}"
    said = {"encoded": encoded, "captions": captions, "error": error, "entries": entries}
    torch.save(said | {"steps": trainer.global_step}, out / f"{name}{trainer.global_rank}.pt")


if __name__ == "__main__":
    model_dir, root, out = sys.argv[1:]
    torch.set_num_threads(1)
    for name, options in {"first": {}, "second": {}, "broken": {"resolution": 16, "breaks": True}}.items():
        run(model_dir, root, Path(out), name, **options)
