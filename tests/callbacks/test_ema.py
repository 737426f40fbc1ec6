"""The moving average: its arithmetic, and that the raw weights always come back."""

import pytest
import torch
from peft import LoraConfig
from tiny_runs import (
    Snapshots,
    assert_same,
    ema_of,
    images,
    module_of,
    samples_of,
    saver_of,
    trained,
    trainer_of,
    write_images,
)

from lit_sd.adapters.peft import Peft
from lit_sd.callbacks import averaged_weights


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 7)


@pytest.mark.parametrize(("warmup", "every"), [(False, 1), (True, 1), (False, 2)])
def test_arithmetic(tiny_model, tmp_path, root, warmup, every):
    ema, watch = ema_of(0.8, warmup=warmup, every_n_updates=every), Snapshots()
    module = module_of(tiny_model())
    expected = trained(module)
    # accumulation: the average counts updates, not batches
    trainer_of(tmp_path, ema, watch, max_steps=5, accumulate_grad_batches=2).fit(module, images(root))
    for n in range(1, 6):
        if n % every:
            continue
        keep = (min(0.8, (1 + n) / (10 + n)) if warmup else 0.8) ** every
        for name, weight in watch.steps[n]["weights"].items():
            expected[name] = keep * expected[name] + (1 - keep) * weight
    assert ema.average.keys() == trained(module).keys()
    for name, value in expected.items():
        torch.testing.assert_close(ema.average[name], value, rtol=1e-5, atol=1e-7)


def test_only_what_trains(tiny_model, tmp_path, root):
    ema = ema_of(0.9)
    module = module_of(tiny_model(), Peft({"unet": LoraConfig(target_modules=["to_q"])}))
    trainer_of(tmp_path, ema, max_steps=1).fit(module, images(root))
    assert ema.average
    assert all("lora" in name for name in ema.average)


def test_swapping_nests_and_gives_back_every_bit(tiny_model):
    module, ema = module_of(tiny_model()), ema_of(0.9)
    raw = trained(module)
    ema.average = {name: value + 1 for name, value in raw.items()}
    ema.swap_in(module)
    ema.swap_in(module)
    ema.swap_out(module)
    assert_same(trained(module), {name: value + 1 for name, value in raw.items()})
    ema.swap_out(module)
    assert_same(trained(module), raw)
    ema.swap_out(module)
    assert_same(trained(module), raw)


def test_raw_weights_survive_an_exception_in_validation(tiny_model, tmp_path, root):
    class BrokenError(RuntimeError):
        pass

    class Breaks(Snapshots):
        def on_validation_batch_end(self, trainer, pl_module, *args):
            raise BrokenError

    module, watch = module_of(tiny_model()), Breaks()
    with pytest.raises(BrokenError):
        trainer_of(tmp_path, ema_of(0.5), watch, max_steps=4, val_check_interval=2).fit(
            module, images(root, val_share=0.2)
        )
    assert_same(trained(module), watch.steps[2]["weights"])


def test_who_sees_the_average(tiny_model, tmp_path, root):
    """Validation, samples and whoever asks; never the training step."""
    seen = {}

    class Watch(Snapshots):
        def on_validation_batch_start(self, trainer, pl_module, *args):
            seen["validation"] = (trained(pl_module), dict(ema.average))

        def on_train_end(self, trainer, pl_module):
            with averaged_weights(trainer, pl_module):
                seen["asked"] = (trained(pl_module), dict(ema.average))

    module, ema, watch = module_of(tiny_model()), ema_of(0.5), Watch()
    module.sample = lambda prompts, seeds, **options: (
        seen.update(samples=(trained(module), dict(ema.average))),
        [__import__("PIL.Image").Image.new("RGB", (8, 8))] * len(seeds),
    )[1]
    samples = samples_of(tmp_path / "s", ["a"], [0], every_n_steps=3)
    trainer_of(tmp_path, samples, watch, ema, max_steps=3, val_check_interval=3).fit(
        module, images(root, val_share=0.2)
    )
    assert seen.keys() == {"validation", "samples", "asked"}
    for weights, average in seen.values():
        assert_same(weights, average)
    assert_same(trained(module), watch.steps[3]["weights"])
    name = next(iter(trained(module)))
    assert not torch.equal(trained(module)[name], ema.average[name])


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"])
def test_checkpoint_while_swapped_in(tiny_model, tmp_path, root, sanity, hook):
    """F21: a checkpoint that is written inside validation resumes as the uninterrupted run, whatever was
    swapped in.
    """

    class SavesInside(Snapshots):
        path = None

    def save(self, trainer, *args):
        if self.path is None and trainer.global_step == 2 and not trainer.sanity_checking:
            self.path = tmp_path / "inside.ckpt"
            trainer.save_checkpoint(self.path)

    setattr(SavesInside, hook, save)

    def run(ckpt=None):
        module, ema, watch = module_of(tiny_model()), ema_of(0.9), SavesInside()
        watch.path = ckpt
        trainer = trainer_of(
            tmp_path, watch, ema, max_steps=6, val_check_interval=2, num_sanity_val_steps=sanity
        )
        trainer.fit(module, images(root, val_share=0.3), ckpt_path=ckpt)
        return watch, ema

    whole, whole_ema = run()
    saved = torch.load(whole.path, weights_only=True)
    assert_same(saved["state_dict"], whole.steps[2]["weights"])
    rest, rest_ema = run(whole.path)
    assert_same(rest.steps, {n: state for n, state in whole.steps.items() if n > 2})
    assert_same(rest_ema.average, whole_ema.average)


def test_a_run_without_average_can_go_on_with_one(tiny_model, tmp_path, root):
    saver = saver_of(tmp_path / "c")
    trainer_of(tmp_path, saver, max_steps=1, checkpointing=True).fit(module_of(tiny_model()), images(root))
    module, ema = module_of(tiny_model()), ema_of(0.0, warmup=False)
    with pytest.warns(UserWarning, match="holds no average"):
        trainer_of(tmp_path, ema, max_steps=2).fit(module, images(root), ckpt_path=saver.last)
    assert_same(ema.average, trained(module))


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_wrong_decays(decay):
    with pytest.raises(ValueError, match=f"decay={decay}"):
        ema_of(decay)
