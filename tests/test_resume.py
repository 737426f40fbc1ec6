"""Contract 3 and F17, F18, F21: a run that was cut anywhere goes on as if it had not been."""

import pytest
import torch
from tiny_runs import Snapshots, assert_same, ema_of, images, module_of, saver_of, trainer_of, write_images

from lit_sd.caching import connect


class CutError(Exception):
    pass


class Cutter(Snapshots):
    """Ends the run as a kill would: right after the checkpoint of step `at` was written."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.at is not None and trainer.global_step >= self.at:
            raise CutError


@pytest.fixture
def run(tmp_path, tiny_model):
    root = write_images(tmp_path / "images", 7)

    def run(name, cut=None, ckpt=None, *, ema=True, data=None, every=1, task=None, **options):
        module = module_of(tiny_model("sd15"), **(task or {}))
        cutter = Cutter(cut)
        saver = saver_of(tmp_path / name, every_n_steps=every, keep=-1)
        trainer = trainer_of(
            tmp_path,
            *([ema_of(0.9)] if ema else []),
            cutter,
            saver,
            **{"max_steps": 10, "checkpointing": True, **options},
        )
        datamodule = images(root, batch_size=2, flip=True, cache_dir=tmp_path / "cache", **(data or {}))
        connect(datamodule, module, trainer)
        if cut is None:
            trainer.fit(module, datamodule, ckpt_path=ckpt)
        else:
            with pytest.raises(CutError):
                trainer.fit(module, datamodule, ckpt_path=ckpt)
        return cutter, saver.folder

    return run


def load(folder, step):
    return torch.load(folder / f"step_{step:06d}.ckpt", weights_only=True)


CASES = {
    "plain": {},
    "accumulating": {"accumulate_grad_batches": 2},
    "validating": {"data": {"val_share": 0.2}, "val_check_interval": 2},
    "epochs": {"max_steps": -1, "max_epochs": 4},
    "cached": {"data": {"cache": "memory", "cache_mb": 16}, "task": {"caption_dropout": 0.5}},
    "on disk": {"data": {"cache": "disk"}, "task": {"caption_dropout": 0.5}},
    "clipped": {"gradient_clip_val": 0.01, "accumulate_grad_batches": 3},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cuts", [(5,), (3, 6), (1, 4, 9)], ids=str)
def test_resumed_equals_uninterrupted(run, case, cuts):
    options = CASES[case]
    whole, whole_folder = run("whole", **options)
    last = max(whole.steps)
    cuts = [cut for cut in cuts if cut < last]
    ckpt, seen, draws, steps = None, [], [], {}
    for i, cut in enumerate([*cuts, None]):
        part, folder = run(f"part{i}", cut, ckpt, **options)
        seen, draws, steps = seen + part.seen, draws + part.draws, steps | part.steps
        ckpt = str(folder / "last.ckpt")
    assert_same(seen, whole.seen, "ids")
    assert_same(draws, whole.draws, "timesteps")
    assert_same(steps, whole.steps, "steps")
    a, b = load(whole_folder, last), load(folder, last)
    for key in (
        "state_dict",
        "optimizer_states",
        "lr_schedulers",
        "ema",
        "random",
        "SDDataModule",
        "global_step",
    ):
        assert_same(a[key], b[key], key)


@pytest.mark.parametrize("cut", range(1, 10))
def test_every_step_is_a_good_place_to_cut(run, cut):
    whole, _ = run("whole")
    _, folder = run("first", cut)
    rest, _ = run("rest", None, str(folder / "last.ckpt"))
    assert_same(rest.steps, {step: state for step, state in whole.steps.items() if step > cut})
