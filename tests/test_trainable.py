"""What a checkpoint of trainable tensors holds and refuses, and how gradients are clipped."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from peft import LoraConfig
from tiny_runs import (
    ema_of,
    images,
    module_of,
    saver_of,
    trained,
    trainer_of,
    write_images,
)
from torch.optim import SGD

from lit_sd.adapters.full import Full
from lit_sd.adapters.peft import Peft
from lit_sd.trainable import plain, read_checkpoint, restore, trainable_state


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 10)


class TestCheckpoint:
    @pytest.fixture
    def saved(self, tiny_model, tmp_path, root):
        """A LoRA run of two steps and its checkpoint."""
        module = module_of(tiny_model(), self.lora())
        module.config = {"model": {"path": "x"}, "sizes": [1, 2.5, None, True]}
        trainer = trainer_of(
            tmp_path, ema_of(0.5, warmup=False), saver_of(tmp_path / "c"), max_steps=2, checkpointing=True
        )
        trainer.fit(module, images(root))
        return module, tmp_path / "c" / "last.ckpt"

    @staticmethod
    def lora(rank=4, targets=("to_q", "to_v")):
        return Peft({"unet": LoraConfig(r=rank, target_modules=list(targets))})

    def test_holds_what_trains_and_reads_without_pickle(self, saved):
        module, path = saved
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["state_dict"].keys() == trained(module).keys()
        assert all("lora" in name for name in checkpoint["state_dict"])
        assert checkpoint["ema"]["average"].keys() == trained(module).keys()
        assert checkpoint["base"] == module.model.identity
        assert checkpoint["random"] == {"seed": 3, "micro_step": 2}
        assert checkpoint["config"] == module.config
        needed = {"optimizer_states", "lr_schedulers", "loops", "callbacks", "SDDataModule", "global_step"}
        assert needed <= checkpoint.keys()

    def test_is_small(self, saved):
        """F19: three times the matrices with their two moments would be too much."""
        module, path = saved
        trains = sum(p.numel() * 4 for p in trained(module).values())
        frozen = sum(p.numel() * 4 for p in module.parameters()) - trains
        names = sum(len(name) for name in trained(module))
        assert path.stat().st_size < 3 * (4 * trains) + 100 * names
        assert path.stat().st_size < frozen / 2

    def test_restores_either_weights(self, saved, tiny_model):
        module, path = saved
        checkpoint = read_checkpoint(path)
        other = module_of(tiny_model(), self.lora())
        restore(other, checkpoint, averaged=False)
        for name, value in trained(module).items():
            assert torch.equal(value, trained(other)[name])
        restore(other, checkpoint)
        for name, value in checkpoint["ema"]["average"].items():
            assert torch.equal(value, trained(other)[name])

    def test_another_base_is_refused(self, saved, tiny_model):
        other = module_of(tiny_model("sd21"), self.lora())
        with pytest.raises(ValueError, match=rf"{saved[0].model.identity}.*loaded {other.model.identity}"):
            restore(other, read_checkpoint(saved[1]))

    def test_missing_and_unexpected_names(self, saved, tiny_model):
        checkpoint = read_checkpoint(saved[1])
        gone = sorted(checkpoint["state_dict"])[0]
        checkpoint["state_dict"]["model.unet.stranger"] = checkpoint["state_dict"].pop(gone)
        with pytest.raises(
            ValueError, match=rf"1 missing \(such as {gone}\), 1 unexpected \(such as model.unet.stranger\)"
        ):
            restore(module_of(tiny_model(), self.lora()), checkpoint)

    @pytest.mark.parametrize("adapter", [Full(), Peft({"unet": LoraConfig(target_modules=["to_k"])})])
    def test_another_kind_is_refused_by_the_trainer(self, saved, tiny_model, tmp_path, root, adapter):
        with pytest.raises(ValueError, match=r"missing \(such as .*unexpected \(such as .*lora"):
            trainer_of(tmp_path, max_steps=4).fit(
                module_of(tiny_model(), adapter), images(root), ckpt_path=saved[1]
            )

    def test_another_rank_is_refused(self, saved, tiny_model):
        with pytest.raises(ValueError, match=r"shape \(4, .*\) in the checkpoint and \(8, .*adapter\.rank"):
            restore(module_of(tiny_model(), self.lora(8)), read_checkpoint(saved[1]))

    def test_only_plain_config(self):
        from omegaconf import OmegaConf

        config = OmegaConf.create({"a": {"b": [1, 2]}})
        assert plain(OmegaConf.to_container(config)) == {"a": {"b": [1, 2]}}
        with pytest.raises(TypeError, match=r"config\.a is a omegaconf.*DictConfig"):
            plain({"a": config.a})
        with pytest.raises(TypeError, match=r"config\.a\[1\] is a torch\.Tensor"):
            plain({"a": [0, torch.zeros(1)]})

    def test_running_statistics_are_kept(self):
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2))
        net[0].requires_grad_(False)
        net[2].requires_grad_(False)
        names = {"1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}
        assert trainable_state(net).keys() == names


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_of_a_fused_optimizer_are_clipped(tiny_model, tmp_path, root, precision):
    """SGD at rate 1 moves the weights by the clipped gradient itself."""
    module = module_of(tiny_model(), optimizer=partial(SGD, lr=1.0, fused=True), scheduler=None)
    before = trained(module)
    trainer_of(tmp_path, max_steps=1, gradient_clip_val=1e-3, precision=precision).fit(module, images(root))
    moved = torch.cat([(p - before[name]).flatten() for name, p in trained(module).items()])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("value", "algorithm", "moved"), [(1.0, "norm", [0.6, 0.8]), (3.5, "value", [3.0, 3.5])]
)
def test_gradients_of_a_fused_optimizer_are_clipped_after_the_loss_scaling_is_undone(
    tiny_model, value, algorithm, moved
):
    """As 16-mixed does it, which Lightning runs on GPUs alone: gradients of (3, 4), scaled by 1024."""
    module = module_of(tiny_model())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    module.trainer = SimpleNamespace(precision_plugin=MixedPrecision("16-mixed", "cpu", scaler))
    weight = torch.zeros(2, requires_grad=True)
    optimizer = SGD([weight], lr=1.0, fused=True)
    for factor in (1.0, float("inf")):  # the second update is skipped, as it overflowed
        optimizer.zero_grad()
        scaler.scale((weight * torch.tensor([3.0, 4.0]) * factor).sum()).backward()
        module.configure_gradient_clipping(optimizer, value, algorithm)
        scaler.step(optimizer)
        scaler.update()
        assert (-weight).tolist() == pytest.approx(moved, rel=1e-5)
