"""Training with a cache is training without one, to the bit; and what `data.cache` chooses."""

from functools import partial

import lightning
import pytest
import torch
from cached_runs import MODES, fit_cached, small_pictures  # noqa: F401
from picture_source import PictureSource
from PIL import Image
from tiny_runs import assert_same, module_of, trained, trainer_of

from lit_sd.adapters.full import Full
from lit_sd.caching import connect, requests_of
from lit_sd.data.cache import MemoryCache
from lit_sd.data.caches.texts import TextCache
from lit_sd.data.caption_rules import CaptionRule
from lit_sd.data.datamodule import SDDataModule


class TestEqual:
    def test_losses_of_each_family_bit_for_bit(self, fit, family, tiny_model):
        """With dropped captions, of which SDXL makes zeros."""
        found = {
            mode: fit(mode, model=tiny_model(family), steps=4, task={"caption_dropout": 0.5})
            for mode in MODES
        }
        assert found["memory"].losses == found["disk"].losses == found["off"].losses
        assert found["memory"].sizes == found["disk"].sizes == found["off"].sizes
        assert found["memory"].ids == found["disk"].ids == found["off"].ids

    def test_only_the_first_run_encodes(self, fit):
        fit("off", steps=3)
        assert fit.counter.pictures == 3
        fit("disk", steps=3)
        assert (fit.counter.pictures, fit.counter.captions) == (2 * 7, 7 + 1)
        fit("disk", steps=9)
        assert (fit.counter.pictures, fit.counter.captions) == (0, 0)

    @pytest.mark.parametrize("workers", [0, 2])
    def test_weights_with_batches_and_workers(self, fit, workers):
        """Several pictures at once round otherwise than each alone."""
        ends = {}
        for mode in MODES:
            watch = fit(mode, data=fit.data_of(mode, batch_size=3, num_workers=workers), steps=4)
            ends[mode] = (trained(fit.module), watch.ids, watch.timesteps)
        assert_same(ends["memory"], ends["disk"])
        assert ends["off"][1:] == ends["disk"][1:]
        for name, weight in ends["off"][0].items():
            torch.testing.assert_close(ends["disk"][0][name], weight, atol=1e-5, rtol=1e-4)

    def test_buckets(self, fit, root):
        for i in range(7, 12):
            Image.open(root / "00.png").resize((32, 64)).save(root / f"{i:02d}.png")
            (root / f"{i:02d}.txt").write_text(f"tall picture {i}")
        buckets = {"buckets": True, "bucket_step": 8, "batch_size": 1}
        found = {mode: fit(mode, data=fit.data_of(mode, **buckets), steps=8) for mode in MODES}
        assert found["disk"].losses == found["off"].losses == found["memory"].losses
        assert found["disk"].sizes == found["off"].sizes
        assert len({str(target) for _, _, target in found["disk"].sizes}) > 1

    def test_validation(self, fit):
        losses = {}
        for mode in MODES:
            data = fit.data_of(mode, val_share=0.3, batch_size=2)
            fit(mode, data=data, steps=2, trainer={"val_check_interval": 1})
            losses[mode] = float(fit.trainer.callback_metrics["val/loss"])
        assert losses["memory"] == losses["disk"] == pytest.approx(losses["off"], rel=1e-5)
        assert fit.counter.pictures == 2 * 5 + 2  # both flips of five, and two as they are

    def test_captions_of_several_windows(self, fit, root, tiny_model):
        (root / "03.txt").write_text("a very long caption " * 9)
        load = partial(tiny_model, "sd15", caption_chunks=3)
        found = {mode: fit(mode, model=load(), steps=8) for mode in MODES}
        assert found["disk"].losses == found["off"].losses == found["memory"].losses
        both = {
            mode: fit(mode, model=load(), data=fit.data_of(mode, batch_size=7), steps=1).losses[0]
            for mode in MODES
        }
        for mode in ("memory", "disk"):
            assert both[mode] == pytest.approx(both["off"], rel=1e-5)

    def test_shuffled_tags_are_encoded_when_they_are_drawn(self, fit, root):
        for path in root.glob("*.txt"):
            path.write_text("a, b, c, d, e")
        found = {}
        for mode in ("off", "disk"):
            found[mode] = fit(mode, data=fit.data_of(mode, rule=CaptionRule(shuffle_tags=True)), steps=5)
        assert found["disk"].losses == found["off"].losses
        assert fit.counter.captions == 1 + 5  # the empty one ahead, then one each step

    def test_half_precision_does_not_round_what_was_kept(self, fit):
        """A trainer of bf16-true rounds the floats of a batch before they reach the step."""
        seen = []

        class See(lightning.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                seen.append(batch["moments"])

        fit("disk", steps=1, callbacks=[See()])
        fit("disk", steps=1, callbacks=[See()], trainer={"precision": "bf16-true"})
        assert seen[1].dtype == torch.float32
        assert not torch.equal(seen[1], seen[1].bfloat16().float())


class TestMemory:
    def test_each_picture_is_encoded_once_and_the_same_is_learned(self, fit, tmp_path):
        def run(mode):
            fit(mode, data=fit.data_of(mode, flip=False, batch_size=2), steps=9)
            return trained(fit.module), fit.counter.pictures

        (plain, often), (cached, once) = run("off"), run("memory")
        assert (often, once) == (18, 7)
        for name in plain:
            torch.testing.assert_close(cached[name], plain[name], atol=1e-5, rtol=1e-4)

    def test_random_crops_are_still_drawn(self, fit):
        found = {
            mode: fit(mode, data=fit.data_of(mode, crop="random"), steps=12) for mode in ("off", "memory")
        }
        assert found["memory"].losses == found["off"].losses
        assert len({str(crop) for _, crop, _ in found["memory"].sizes}) > 4


class TestChoice:
    def test_what_trains_is_not_kept(self, fit):
        """The text encoder trains: latents alone are kept."""
        fit("disk", adapter=Full(["text_encoder"]), steps=2)
        assert fit.module.cache is None
        assert fit.counter.pictures == 14
        assert not (fit.data.cache.path / "texts").exists()

    def test_a_vae_that_trains_is_refused(self, tiny_model, fit, tmp_path):
        module = module_of(tiny_model())
        module.model.vae.quant_conv.requires_grad_(True)
        with pytest.raises(
            ValueError, match=r"data\.cache=disk .* but the VAE trains here; set data\.cache=off"
        ):
            connect(fit.data_of("disk"), module, trainer_of(tmp_path))

    def test_control_images_are_refused_before_anything_is_read(self, tiny_model, fit, root, tmp_path):
        data = fit.data_of("disk", control_root=str(root))
        with pytest.raises(ValueError, match=r"images has control images, .*set data\.cache=memory or off"):
            connect(data, module_of(tiny_model()), trainer_of(tmp_path))

    def test_a_module_without_encoders_is_refused(self, fit, tmp_path):
        with pytest.raises(ValueError, match=r"data\.cache=memory .* LightningModule has none"):
            connect(fit.data_of("memory"), lightning.LightningModule(), trainer_of(tmp_path))

    def test_other_data_has_none(self, tiny_model, tmp_path):
        module = module_of(tiny_model())
        connect(lightning.LightningDataModule(), module, trainer_of(tmp_path))
        assert module.cache is None

    def test_each_mode_gives_its_own(self, fit):
        kinds = {}
        for mode in MODES:
            fit(mode, steps=1)
            kinds[mode] = type(fit.module.cache)
        assert kinds == {"off": type(None), "memory": MemoryCache, "disk": TextCache}

    def test_captions_can_be_left_out(self, fit):
        fit("disk", data=fit.data_of("disk", cache_texts=False), steps=2)
        assert fit.module.cache is None
        assert fit.counter.captions == 2

    def test_the_report_says_what_is_fixed(self, fit):
        fit("disk", steps=1)
        assert not any("crops are fixed" in line for line in fit.data.report())
        fit("disk", data=fit.data_of("disk", crop="random"), steps=1)
        lines = fit.data.report()
        assert "crops are fixed: each picture has one for each shape (data.cache=disk)" in lines
        assert any(
            line.startswith("cache: 14 latents in ") and "14 of them encoded now" in line for line in lines
        )


def test_images_of_other_pools_come_in_every_shape(tmp_path):
    sources = {
        "images": PictureSource([(32, 32), (48, 24)]),
        "prior": PictureSource([(40, 40)]),
    }
    val = PictureSource([(16, 16)])
    data = SDDataModule(
        sources,
        batch_size=2,
        resolution=32,
        flip=False,
        num_workers=0,
        decoded_mb=0,
        seed=0,
        shares={"images": 1, "prior": 1},
        buckets=True,
        bucket_max_ratio=2,
        val=val,
    )
    lead, prior, validation = requests_of(data, 1)
    shapes = [tuple(shape) for shape in data.buckets.assign(sources["images"].sizes()).tolist()]
    assert (lead.source, lead.shapes) == (sources["images"], data.buckets)
    assert (prior.source, sorted(prior.shapes)) == (sources["prior"], sorted(set(shapes)))
    assert (validation.source, validation.shapes, validation.crop) == (val, [(32, 32)], "center")
