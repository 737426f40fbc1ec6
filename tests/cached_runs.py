"""Tiny runs with and without a cache."""

import lightning
import pytest
from PIL import Image
from tiny_runs import images, module_of, trainer_of, write_images

from lit_sd.caching import connect

MODES = ("off", "memory", "disk")


class Watch(lightning.Callback):
    """Losses, draws and conditioning of each step."""

    def __init__(self):
        self.losses, self.timesteps, self.ids, self.sizes = [], [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(pl_module.record.losses.tolist())
        self.timesteps.append(pl_module.record.timesteps.tolist())
        self.ids.append(batch["ids"])
        self.sizes.append([batch[k].tolist() for k in ("original_size", "crop_top_left", "target_size")])


class Counter:
    """How many pictures and captions a model has encoded."""

    def __init__(self, model):
        self.pictures = self.captions = 0
        vae, text = model.vae.encode, model.encode_text

        def encode(pixels):
            self.pictures += len(pixels)
            return vae(pixels)

        def encode_text(captions):
            self.captions += len(captions)
            return text(captions)

        model.vae.encode, model.encode_text = encode, encode_text


@pytest.fixture(name="root")
def small_pictures(tmp_path):
    """Seven pictures of 32 x 48, each with a caption."""
    folder = write_images(tmp_path / "images", 7, 48)
    for path in folder.glob("*.png"):
        Image.open(path).crop((0, 0, 48, 32)).save(path)
    return folder


@pytest.fixture(name="fit")
def fit_cached(tmp_path, root, tiny_model):
    """`fit("disk", steps=3)` trains a tiny model; the last one made is `fit.module`, its data `fit.data`."""

    def fit(mode, *, model=None, steps=3, task=None, trainer=None, adapter=None, data=None, callbacks=()):
        fit.module = module_of(model or tiny_model("sd15"), adapter, **(task or {}))
        fit.data = data or fit.data_of(mode)
        fit.counter = Counter(fit.module.model)
        watch = Watch()
        fit.trainer = trainer_of(tmp_path, watch, *callbacks, max_steps=steps, **(trainer or {}))
        connect(fit.data, fit.module, fit.trainer)
        fit.trainer.fit(fit.module, fit.data)
        return watch

    kept = {"cache_mb": 16, "cache_dir": tmp_path / "cache", "crop": "center", "flip": True}
    fit.data_of = lambda mode, **options: images(root, **{**kept, "cache": mode, **options})
    return fit
