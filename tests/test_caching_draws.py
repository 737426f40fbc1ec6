"""What is drawn with a cache: latents anew each time, dropped captions, and SDXL's sizes."""

import numpy as np
import pytest
import torch
from cached_runs import MODES, fit_cached, small_pictures  # noqa: F401
from PIL import Image
from tiny_runs import images

from lit_sd.randomness import Draws


class TestDraws:
    def test_latents_are_drawn_anew_from_what_is_kept(self, fit):
        """Mean and spread of 300 draws are the picture's own moments."""
        fit("disk", steps=1)
        module = fit.module
        batch = fit.data.on_after_batch_transfer(next(iter(fit.data.train_dataloader())), 0)
        assert "pixels" not in batch
        drawn = []
        for step in range(300):
            module.draws = Draws(0, step, 0)
            with torch.no_grad():
                drawn.append(module.losses(batch)[0][0])
        drawn = torch.stack(drawn) / module.model.vae.config.scaling_factor
        mean, std = batch["moments"][0]
        assert not torch.equal(drawn[0], drawn[1])
        assert ((drawn.mean(0) - mean).abs() < 5 * std / 300**0.5).all()
        assert (drawn.std(0) / std).mean().item() == pytest.approx(1, abs=0.02)

    @pytest.mark.parametrize("family", ["sd15", "sdxl"])
    def test_caption_dropout_is_the_same_with_and_without(self, fit, family, tiny_model, monkeypatch):
        """F09: 400 draws at 0.5; both encoders and the pooled vector are dropped together."""
        dropped = {}
        for mode in MODES:
            model = tiny_model(family)
            fit(mode, model=model, steps=1, task={"caption_dropout": 0.5})
            module = fit.module
            batch = fit.data.on_after_batch_transfer(next(iter(fit.data.train_dataloader())), 0)
            batch = {
                k: v * 4 if isinstance(v, list) else v.repeat(4, *[1] * (v.ndim - 1))
                for k, v in batch.items()
            }
            conds = []
            monkeypatch.setattr(
                model, "predict", lambda noisy, t, cond, conds=conds: (conds.append(cond), noisy)[1]
            )
            module.objective = lambda schedule, predict, x0, eps, t, mask: predict(x0, t).flatten(1).mean(1)
            with torch.no_grad():
                for step in range(100):
                    module.draws = Draws(0, step, 0)
                    module.losses(batch)
            kept = model.condition(batch)
            none = model.drop_captions(model.encode_text([""] * 4), torch.ones(4, dtype=torch.bool))
            hidden = torch.cat([cond.hidden for cond in conds])
            is_none = [torch.allclose(row, none.hidden[0], atol=1e-6) for row in hidden]
            is_kept = [torch.allclose(row, kept.hidden[0], atol=1e-5) for row in hidden]
            assert [a != b for a, b in zip(is_none, is_kept, strict=True)] == [True] * 400
            if family == "sdxl":
                pooled = torch.cat([cond.pooled for cond in conds])
                assert [bool((row == 0).all()) for row in pooled] == is_none
                assert [bool((row == 0).all()) for row in hidden] == is_none
            dropped[mode] = is_none
        assert dropped["memory"] == dropped["disk"] == dropped["off"]
        assert 160 < sum(dropped["off"]) < 240

    def test_six_numbers(self, fit, tmp_path, tiny_model):
        """F08: 40 x 80 covers 32 x 32 as 32 x 64; the centred crop begins at 16, flipped or not."""
        rng = np.random.default_rng(0)
        folder = tmp_path / "one"
        folder.mkdir()
        Image.fromarray(rng.integers(0, 255, (40, 80, 3), np.uint8)).save(folder / "a.png")
        (folder / "a.txt").write_text("a")
        for flip in (0.0, 1.0):
            ids = []
            model = tiny_model("sdxl")
            real = model.time_ids
            model.time_ids = lambda *sizes, ids=ids, real=real: (ids.append(real(*sizes)), ids[-1])[1]
            data = images(folder, cache="disk", cache_dir=tmp_path / "cache", crop="center", flip=flip)
            fit("disk", model=model, data=data, steps=2)
            assert [row.tolist() for row in ids] == [[[40, 80, 0, 16, 32, 32]]] * 2

    def test_six_numbers_of_random_crops_tell_where_the_crop_is(self, fit, tmp_path, tiny_model):
        """The VAE's input is compared with the flipped and cropped picture."""
        picture = np.random.default_rng(0).integers(0, 255, (32, 64, 3), np.uint8)
        folder = tmp_path / "one"
        folder.mkdir()
        Image.fromarray(picture).save(folder / "a.png")
        (folder / "a.txt").write_text("a")
        model, given = tiny_model("sdxl"), []
        real = model.moments
        model.moments = lambda pixels: (given.append(pixels), real(pixels))[1]
        data = images(folder, cache="disk", cache_dir=tmp_path / "cache", crop="random", flip=True)
        watch = fit("disk", model=model, data=data, steps=6)
        (corner,) = {tuple(crop[0]) for _, crop, _ in watch.sizes}
        for pixels, seen in zip(given, (picture, picture[:, ::-1]), strict=True):
            window = seen[:, corner[1] : corner[1] + 32]
            shown = ((pixels[0].permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
            assert (shown == window).all()
