"""The training module: what a step computes and draws, and what validation may not touch."""

from functools import partial

import lightning
import numpy as np
import pytest
import torch
from peft import LoraConfig
from tiny_runs import (
    FewWeights,
    ema_of,
    everything,
    images,
    module_of,
    samples_of,
    saver_of,
    trained,
    trainer_of,
    write_images,
)
from torch.optim import SGD

from lit_sd import schedules
from lit_sd.adapters.full import Full
from lit_sd.adapters.peft import Peft
from lit_sd.data.cache import MemoryCache
from lit_sd.objectives import Objective
from lit_sd.randomness import Draws
from lit_sd.trainable import read_checkpoint, restore


def batch_of(count: int, weight=None, size: int = 32):
    generator = torch.Generator().manual_seed(7)
    sizes = torch.tensor([[size, size]] * count)
    return {
        "ids": [f"image {i}" for i in range(count)],
        "source": ["images"] * count,
        "pixels": torch.rand(count, 3, size, size, generator=generator) * 2 - 1,
        "captions": [f"caption {i}" for i in range(count)],
        "weight": torch.full((count,), 1 / count) if weight is None else torch.tensor(weight),
        "original_size": sizes,
        "crop_top_left": torch.zeros_like(sizes),
        "target_size": sizes,
    }


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 10)


class TestStep:
    def test_loss_is_the_weighted_sum(self, tiny_model):
        module = module_of(tiny_model())
        with torch.no_grad():
            _, _, losses = module.losses(batch_of(4))
            loss = module.training_step(batch_of(4, [0.5, 0.25, 0.0, 1.0]), 0)
        assert losses.dtype == torch.float32
        a, b, _, d = losses.tolist()
        assert loss.item() == pytest.approx(0.5 * a + 0.25 * b + d, rel=1e-6)

    def test_noise_reaches_the_objective_as_drawn(self, tiny_model):
        seen = {}

        def distance(output, target):
            seen["target"] = target
            return (output - target).square()

        module = module_of(tiny_model(), objective=Objective(prediction="epsilon", distance=distance))
        _, t, _ = module.losses(batch_of(64))
        target = seen["target"]
        assert abs(target.mean().item()) < 0.1
        assert target.std().item() == pytest.approx(1, abs=0.05)
        assert t.min() >= 0
        assert t.max() < 1000
        assert t.float().mean().item() == pytest.approx(499.5, abs=150)
        assert len(set(t.tolist())) > 48

    def test_each_step_and_rank_draws_its_own_and_the_same_again(self, tiny_model):
        module, batch = module_of(tiny_model()), batch_of(4)

        def drawn(step, rank):
            module.draws = Draws(3, step, rank)
            with torch.no_grad():
                latents, t, losses = module.losses(batch)
            return (tuple(t.tolist()), latents.sum().item(), losses.sum().item())

        assert drawn(5, 0) == drawn(5, 0)
        a, b, c = drawn(5, 0), drawn(6, 0), drawn(5, 1)
        for x, y in ((a, b), (a, c), (b, c)):
            assert all(left != right for left, right in zip(x, y, strict=True))

    @pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0, 0), (0.5, 160, 240), (1.0, 400, 400)])
    def test_caption_dropout_is_drawn_for_each_use(self, tiny_model, share, low, high):
        model = tiny_model("sd15")
        seen: list[list[str]] = []
        encode = model.encode_text
        model.encode_text = lambda captions: (seen.append(list(captions)), encode(captions))[1]
        module = module_of(model, caption_dropout=share)
        batch = batch_of(4)
        for step in range(100):
            module.draws = Draws(0, step, 0)
            with torch.no_grad():
                module.losses(batch)
        assert low <= sum(text == "" for texts in seen for text in texts) <= high
        if share == 0.5:  # each caption is dropped now and then, none is dropped always
            for i in range(4):
                assert 25 < sum(texts[i] == "" for texts in seen) < 75

    def test_adapters_can_add_inputs_of_the_unet(self, tiny_model):
        class WithMask(FewWeights):
            def unet_kwargs(self, model, batch, noisy, t, cond):
                assert noisy.shape == (2, 4, 4, 4)
                assert t.shape == (2,)
                return {"encoder_attention_mask": torch.zeros(2, cond.hidden.shape[1], dtype=torch.bool)}

        plain_module, masked = module_of(tiny_model()), module_of(tiny_model(), WithMask())
        assert plain_module.losses(batch_of(2))[2].tolist() != masked.losses(batch_of(2))[2].tolist()

    def test_wrong_shares(self, tiny_model):
        with pytest.raises(ValueError, match=r"caption_dropout=1\.5"):
            module_of(tiny_model(), caption_dropout=1.5)


class TestCache:
    """What the module does with a cache; `test_caching.py` has whole runs."""

    def test_captions_are_not_cached_while_their_encoder_trains(self, tiny_model):
        for adapter, cached in ((Full(["text_encoder"]), False), (None, True)):
            module = module_of(tiny_model(), adapter)
            assert module._text_cache() is None
            module.cache = MemoryCache(16)
            assert (module._text_cache() is not None) == cached

    def test_moments_take_the_place_of_pixels(self, tiny_model):
        """Training and validation: the loss is the same to the bit, and the VAE is not asked."""
        module, batch = module_of(tiny_model()), batch_of(1)
        with torch.no_grad():
            shown = [module.losses(batch)[2], module.fixed_losses(batch)]
            batch["moments"] = torch.stack(module.model.moments(batch.pop("pixels")), 1)
            module.model.vae.encode = None
            assert torch.equal(module.losses(batch)[2], shown[0])
            assert torch.equal(module.fixed_losses(batch), shown[1])
            module.training_step(batch, 0)
        assert list(module.record.parts) == ["latents"]

    def test_validation_does_not_use_up_the_memory(self, tiny_model):
        module = module_of(tiny_model())
        module.cache = MemoryCache(16)
        room = module.cache.room
        module.fixed_losses(batch_of(3))
        captions = room - module.cache.room
        assert captions == 3 * 77 * 32 * 4


class TestPrediction:
    """An objective that overrides what the base predicts changes what is sampled and exported, too."""

    def test_after_training_and_after_loading(self, tiny_model, tmp_path, root, caplog):
        module = module_of(tiny_model(), objective=Objective(prediction="v_prediction"))
        before = np.asarray(module.sample(["a cat"], [0], steps=2)[0])
        assert module.model.scheduler.config.prediction_type == "epsilon"
        saver = saver_of(tmp_path / "ckpt", every_n_steps=1)
        trainer_of(tmp_path, saver, max_steps=1, checkpointing=True).fit(module, images(root))
        assert "trained, sampled and exported as v_prediction" in caplog.text
        again = module_of(tiny_model(), objective=Objective(prediction="v_prediction"))
        restore(again, read_checkpoint(tmp_path / "ckpt" / "last.ckpt"))
        for learned in (module, again):
            assert learned.model.scheduler.config.prediction_type == "v_prediction"
            assert learned.schedule.prediction == "v_prediction"
            assert learned.model.pipeline().scheduler.config.prediction_type == "v_prediction"
        after = np.asarray(again.sample(["a cat"], [0], steps=2)[0])
        assert np.abs(after.astype(int) - before).mean() > 1


class TestOptimizer:
    def test_groups_by_component_with_their_own_rates(self, tiny_model, tmp_path):
        lora = Peft(
            {
                "unet": LoraConfig(target_modules=["to_q"]),
                "text_encoder": LoraConfig(target_modules=["q_proj"]),
            }
        )
        module = module_of(tiny_model(), lora, component_lr={"text_encoder": 5e-6})
        trainer = trainer_of(tmp_path, max_steps=1)
        trainer.fit(module, images(write_images(tmp_path / "i", 2)))
        groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
        assert list(groups) == ["unet", "text_encoder"]
        assert groups["unet"]["initial_lr"] == 1e-3
        assert groups["text_encoder"]["initial_lr"] == 5e-6
        names = {id(p): name for name, p in module.named_parameters()}
        grouped = [names[id(p)] for group in groups.values() for p in group["params"]]
        assert sorted(grouped) == sorted(trained(module))
        assert all("text_encoder" in names[id(p)] for p in groups["text_encoder"]["params"])

    def test_rates_for_what_does_not_train(self, tiny_model):
        with pytest.raises(ValueError, match=r"a rate for text_encoder, vea, where unet trains"):
            module_of(tiny_model(), component_lr={"text_encoder": 1e-5, "vea": 1.0})

    def test_nothing_trains(self, tiny_model, tmp_path, root):
        class Idle(FewWeights):
            def attach(self, model):
                pass

        with pytest.raises(ValueError, match="nothing trains"):
            trainer_of(tmp_path, max_steps=1).fit(module_of(tiny_model(), Idle()), images(root))

    @pytest.mark.parametrize(
        ("limits", "updates"),
        [({"max_epochs": 2}, 6), ({"max_steps": 5}, 5), ({"max_epochs": 2, "max_steps": 4}, 4)],
    )
    def test_schedule_counts_updates(self, tiny_model, tmp_path, root, limits, updates):
        """F17: 10 images, batch 1, 4 accumulated: 3 updates in an epoch, the last of them from 2 batches."""
        module = module_of(tiny_model(), optimizer=partial(SGD, lr=1.0), scheduler=schedules.linear)
        rates = []

        class Watch(lightning.Callback):
            def on_before_optimizer_step(self, trainer, pl_module, optimizer):
                rates.append(optimizer.param_groups[0]["lr"])

        trainer = trainer_of(tmp_path, Watch(), accumulate_grad_batches=4, **limits)
        trainer.fit(module, images(root))
        assert trainer.global_step == updates
        assert rates == pytest.approx([1 - u / updates for u in range(updates)])
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0

    def test_modes(self, tiny_model, tmp_path, root):
        """What trains is in training mode with its dropout, what is frozen is not, also after validation and
        sampling.
        """
        module = module_of(
            tiny_model(), Peft({"unet": LoraConfig(target_modules=["to_q"], lora_dropout=0.5)})
        )
        trainer = trainer_of(
            tmp_path,
            samples_of(tmp_path, ["a"], [0], every_n_steps=1, steps=1),
            max_steps=2,
            val_check_interval=1,
        )
        trainer.fit(module, images(root, val_share=0.2))
        assert all(part.training for part in module.model.unet.modules())
        assert not any(
            m.training for name in ("vae", "text_encoder") for m in getattr(module.model, name).modules()
        )


class TestValidation:
    def test_twice_is_equal_and_the_global_stream_is_left(self, tiny_model):
        module = module_of(tiny_model())
        before = torch.get_rng_state()
        first = module.fixed_losses(batch_of(3))
        module.draws = Draws(9, 9, 9)
        assert torch.equal(first, module.fixed_losses(batch_of(3)))
        assert torch.equal(before, torch.get_rng_state())
        assert first.shape == (4, 2)
        assert first[:, 1].tolist() == [3, 3, 3, 3]

    def test_belongs_to_the_example_and_not_to_the_batch(self, tiny_model):
        module, batch = module_of(tiny_model()).eval(), batch_of(3)
        alone = [{k: v[i : i + 1] for k, v in batch.items()} for i in range(3)]
        total = sum(module.fixed_losses(one) for one in reversed(alone))
        torch.testing.assert_close(total, module.fixed_losses(batch), rtol=1e-5, atol=1e-6)

    def test_timesteps_are_stratified(self, tiny_model):
        seen = []

        class Spy(FewWeights):
            def unet_kwargs(self, model, batch, noisy, t, cond):
                seen.append(t.tolist())
                return {}

        module_of(tiny_model(), Spy(), val_strata=5).fixed_losses(batch_of(6))
        assert [(200 * k <= min(t), max(t) < 200 * (k + 1), len(t)) for k, t in enumerate(seen)] == [
            (True, True, 6)
        ] * 5
        assert all(len(set(t)) > 1 for t in seen)

    def test_padding_counts_nothing(self, tiny_model):
        module = module_of(tiny_model()).eval()
        batch = batch_of(3, [0.5, 0.5, 0.0])
        two = {k: v[:2] for k, v in batch.items()}
        torch.testing.assert_close(module.fixed_losses(batch), module.fixed_losses(two), rtol=1e-5, atol=1e-6)

    def test_logged_loss_is_the_mean_over_examples(self, tiny_model, tmp_path, root):
        module = module_of(tiny_model())
        trainer = trainer_of(tmp_path)
        twice = [
            trainer.validate(module, images(root, val_share=0.3, batch_size=size), verbose=False)[0]
            for size in (2, 2, 3)
        ]
        assert twice[0] == twice[1]
        assert twice[0] == pytest.approx(twice[2], rel=1e-5)
        assert set(twice[0]) == {
            "val/loss",
            "val/loss_t0-250",
            "val/loss_t250-500",
            "val/loss_t500-750",
            "val/loss_t750-1000",
        }
        assert twice[0]["val/loss"] == pytest.approx(
            sum(v for k, v in twice[0].items() if k != "val/loss") / 4, rel=1e-6
        )

    def test_testing_names_its_own(self, tiny_model, tmp_path, root):
        result = trainer_of(tmp_path).test(
            module_of(tiny_model()), images(root, val_share=0.3), verbose=False
        )[0]
        assert "test/loss" in result


SIDE_EFFECTS = {
    "never": ({}, []),
    "validating every step": ({"val_check_interval": 1}, []),
    "validating every third": ({"val_check_interval": 3, "num_sanity_val_steps": 2}, []),
    "sampling": ({"limit_val_batches": 0}, ["samples"]),
    "averaging": ({"val_check_interval": 2}, ["ema", "samples"]),
    "logging rarely": ({"log_every_n_steps": 50, "limit_val_batches": 0}, []),
}


def test_watching_does_not_change_training(tiny_model, tmp_path, root):
    """Contract 8, F36: equal weights, whatever is evaluated, drawn or logged meanwhile."""
    ends = {}
    for name, (options, extra) in SIDE_EFFECTS.items():
        callbacks = [ema_of(0.9)] if "ema" in extra else []
        if "samples" in extra:
            callbacks.append(
                samples_of(
                    tmp_path / name, ["a cat"], [1], every_n_steps=1, at_start=True, steps=1, guidance=2.0
                )
            )
        module = module_of(tiny_model())
        trainer_of(tmp_path, *callbacks, max_steps=6, **{"val_check_interval": 100, **options}).fit(
            module, images(root, val_share=0.2, batch_size=2)
        )
        ends[name] = trained(module)
    for name, weights in ends.items():
        for key, value in weights.items():
            assert torch.equal(value, ends["never"][key]), f"{name} moved {key}"


def test_bf16_keeps_losses_and_weights_in_fp32(tiny_model, tmp_path, root):
    module = module_of(tiny_model(), Full())
    trainer_of(tmp_path, max_steps=2, precision="bf16-mixed").fit(module, images(root))
    assert module.record.losses.dtype == torch.float32
    assert {p.dtype for p in trained(module).values()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in everything(module).values())


def test_the_record_of_a_step_holds_no_pictures(tiny_model):
    """Up to twenty wait on an accelerator; a flag for each example tells where a NaN began."""
    module, batch = module_of(tiny_model()), batch_of(3)
    batch["pixels"][1, 0, 5, 5] = float("nan")
    with torch.no_grad():
        module.training_step(batch, 0)
    assert module.record.parts["pixels"].tolist() == [True, False, True]
    assert module.record.parts["latents"].tolist() == [True, False, True]
    assert module.record.losses.isfinite().tolist() == [True, False, True]
