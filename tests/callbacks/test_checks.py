"""F24 and F27: a run that goes wrong stops, says where, and leaves the last good checkpoint."""

from functools import partial

import pytest
import torch
from tiny_runs import FewWeights, images, module_of, saver_of, trainer_of, write_images
from torch.optim import SGD, AdamW

from lit_sd.callbacks import GradientCheck, NonFiniteCheck, NonFiniteError, checks
from lit_sd.trainable import StepRecord


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 5)


def with_inf(data, name, at_step, trainer_step):
    """A datamodule whose image `name` has an infinite pixel from a step on."""
    transfer = data.on_after_batch_transfer

    def transferred(batch, dataloader_idx):
        batch = transfer(batch, dataloader_idx)
        if name in batch["ids"] and trainer_step() >= at_step:
            batch["pixels"][batch["ids"].index(name), 0, 0, 0] = float("inf")
        return batch

    data.on_after_batch_transfer = transferred
    return data


@pytest.mark.parametrize("deferred", [False, True])
def test_names_the_example_and_keeps_the_last_good_file(tiny_model, tmp_path, root, monkeypatch, deferred):
    """inf in image 3 of 5, all in one batch."""
    monkeypatch.setattr(checks, "must_wait", lambda loss: deferred)
    saver = saver_of(tmp_path / "c", every_n_steps=2)
    trainer = trainer_of(tmp_path, NonFiniteCheck(every_n_steps=3), saver, max_steps=9, checkpointing=True)
    probe = images(root, batch_size=5)
    probe.setup()
    bad = next(iter(probe.train_dataloader()))["ids"][2]
    data = with_inf(images(root, batch_size=5), bad, 4, lambda: trainer.global_step)
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(module_of(tiny_model()), data)
    message = str(caught.value)
    assert "the loss is nan after 4 updates, from 1 of 5 examples" in message
    assert f"{bad} at timestep " in message
    assert "its pixels are not finite" in message
    good = torch.load(saver.last, weights_only=True)
    assert good["global_step"] == 4
    assert all(value.isfinite().all() for value in good["state_dict"].values())


def test_a_rate_that_is_too_high(tiny_model, tmp_path, root):
    saver = saver_of(tmp_path / "c", every_n_steps=1)
    module = module_of(tiny_model(), optimizer=partial(SGD, lr=1e30), scheduler=None)
    with pytest.raises(NonFiniteError, match=r"lower optimizer\.lr|Lower optimizer\.lr"):
        trainer_of(tmp_path, NonFiniteCheck(20), saver, max_steps=9, checkpointing=True).fit(
            module, images(root)
        )
    for path in saver.folder.glob("*.ckpt"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for value in state.values()), path


def test_lr_1e9_stops(tiny_model, tmp_path, root):
    module = module_of(tiny_model(), optimizer=partial(AdamW, lr=1e9), scheduler=None)
    saver = saver_of(tmp_path / "c", every_n_steps=1)
    with pytest.raises(NonFiniteError):
        trainer_of(tmp_path, NonFiniteCheck(20), saver, max_steps=50, checkpointing=True).fit(
            module, images(root)
        )


def test_no_checkpoint_of_broken_weights(tiny_model, tmp_path, root):
    """Finite losses so far, but the last update broke the weights."""

    class Breaks(FewWeights):
        pass

    module, saver = module_of(tiny_model(), Breaks()), saver_of(tmp_path / "c", every_n_steps=1)

    class Poison(checks.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 3:
                with torch.no_grad():
                    pl_module.model.unet.conv_out.bias[1] = float("nan")

    trainer = trainer_of(tmp_path, Poison(), NonFiniteCheck(20), saver, max_steps=9, checkpointing=True)
    with pytest.raises(NonFiniteError, match=r"at step 3 model\.unet\.conv_out\.bias holds NaN"):
        trainer.fit(module, images(root))
    assert torch.load(saver.last, weights_only=True)["global_step"] == 2


def record(losses, **parts):
    return StepRecord(["a", "b"], torch.tensor(losses), torch.tensor([10, 20]), parts)


def test_describe():
    inf, fine = float("inf"), torch.tensor([True, True])
    latents = torch.tensor([True, False])
    message = checks.describe(7, torch.tensor(inf), record([1.0, inf], pixels=fine, latents=latents))
    assert message.splitlines()[0] == "the loss is inf after 7 updates, from 1 of 2 examples:"
    assert message.splitlines()[1].startswith(
        "  b at timestep 20: loss inf, its latents are not finite (the VAE overflowed"
    )
    message = checks.describe(7, torch.tensor(inf), record([inf, 1.0], pixels=fine))
    assert "a at timestep 10: loss inf, its pixels are finite, so the network overflowed" in message
    assert "a weight of the batch is not" in checks.describe(7, torch.tensor(inf), record([1.0, 1.0]))
    assert "the loss is inf after 7 updates. Lower" in checks.describe(7, torch.tensor(inf), None)


def test_losses_are_looked_at_together_where_looking_waits(monkeypatch):
    monkeypatch.setattr(checks, "must_wait", lambda loss: True)
    check = NonFiniteCheck(every_n_steps=3)
    check.keep(0, torch.tensor(1.0), None)
    check.keep(1, torch.tensor(float("nan")), None)
    with pytest.raises(NonFiniteError, match="nan after 1 updates"):
        check.keep(2, torch.tensor(1.0), None)


class TestGradients:
    def test_names_what_the_forward_pass_does_not_use(self, tiny_model, tmp_path, root):
        class Unused(FewWeights):
            def attach(self, model):
                super().attach(model)
                model.unet.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(3)))

        with pytest.raises(
            RuntimeError, match=r"1 trainable tensors got no gradient, such as model\.unet\.forgotten"
        ):
            trainer_of(tmp_path, GradientCheck(), max_steps=3).fit(
                module_of(tiny_model(), Unused()), images(root)
            )

    def test_warns_of_a_component_without_any(self, tiny_model, tmp_path, root):
        class Zero(FewWeights):
            def attach(self, model):
                super().attach(model)
                model.unet.conv_out.register_forward_hook(lambda module, args, output: output * 0)

        with pytest.warns(UserWarning, match="all gradients of unet are zero"):
            trainer_of(tmp_path, GradientCheck(), max_steps=1).fit(
                module_of(tiny_model(), Zero()), images(root)
            )

    def test_looks_once(self, tiny_model, tmp_path, root):
        check = GradientCheck()
        trainer_of(tmp_path, check, max_steps=2).fit(module_of(tiny_model()), images(root))
        assert check._done
