"""F11: what a cache on disk encodes anew after four kinds of edits: 1, all, all, 0."""

import os
from functools import partial

import torch
from cached_runs import fit_cached, small_pictures  # noqa: F401
from PIL import Image
from torch.optim import AdamW


class TestWhatIsEncodedAnew:
    """F11: 1, all, all, 0."""

    def counts(self, fit, **options):
        fit("disk", steps=1, **options)
        return fit.counter.pictures, fit.counter.captions

    def test_an_edited_file(self, fit, root):
        assert self.counts(fit) == (14, 8)
        Image.open(root / "03.png").transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(root / "03.png")
        assert self.counts(fit) == (2, 0), "one picture, in both flips"

    def test_another_resolution(self, fit):
        self.counts(fit)
        assert self.counts(fit, data=fit.data_of("disk", resolution=16)) == (14, 0)

    def test_another_vae(self, fit, tiny_model):
        self.counts(fit)
        model = tiny_model("sd15")
        with torch.no_grad():
            model.vae.quant_conv.bias.add_(0.1)
        assert self.counts(fit, model=model) == (14, 0)

    def test_another_text_encoder(self, fit, tiny_model):
        self.counts(fit)
        model = tiny_model("sd15")
        with torch.no_grad():
            model.text_encoder.get_input_embeddings().weight.add_(0.1)
        assert self.counts(fit, model=model) == (0, 8)

    def test_nothing_else(self, fit, root, tiny_model):
        """A touched and a renamed file, another caption, seed, UNet, learning rate, dropout and batch."""
        self.counts(fit)
        os.utime(root / "00.png", (1, 1))
        (root / "01.png").rename(root / "99.png")
        (root / "01.txt").rename(root / "99.txt")
        assert self.counts(fit) == (0, 0)
        (root / "02.txt").write_text("another caption")
        assert self.counts(fit) == (0, 1)
        model = tiny_model("sd15")
        with torch.no_grad():
            model.unet.conv_in.weight.add_(1)
        task = {"seed": 99, "optimizer": partial(AdamW, lr=1e-5), "caption_dropout": 0.1}
        data = fit.data_of("disk", seed=98, batch_size=3, num_workers=0, val_share=0.0)
        assert self.counts(fit, model=model, task=task, data=data) == (0, 0)

    def test_random_crops_stay_whatever_the_seed(self, fit):
        self.counts(fit, data=fit.data_of("disk", crop="random"))
        assert self.counts(fit, data=fit.data_of("disk", crop="random", seed=98)) == (0, 0)

    def test_another_dtype(self, fit):
        self.counts(fit)
        assert self.counts(fit, data=fit.data_of("disk", cache_dtype="float16")) == (14, 8)
