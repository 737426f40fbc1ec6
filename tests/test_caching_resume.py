"""Contract 3 with a cache on disk: a run that was cut goes on bit for bit."""

from pathlib import Path

import pytest
from cached_runs import small_pictures  # noqa: F401
from tiny_runs import Snapshots, assert_same, images, module_of, saver_of, trainer_of

from lit_sd.caching import connect


class CutError(Exception):
    pass


class Cutter(Snapshots):
    """Ends the run as a kill would, after the checkpoint of step `at`."""

    def __init__(self, at=None):
        super().__init__()
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.at:
            raise CutError

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(
            trainer, pl_module, outputs, {**batch, "pixels": batch["moments"]}, batch_idx
        )


@pytest.mark.parametrize("options", [{}, {"crop": "random", "cache_dtype": "float16"}, {"num_workers": 2}])
def test_a_run_cut_in_mid_epoch_goes_on_bit_for_bit(tmp_path, root, tiny_model, options):
    """Seven pictures in batches of two: three steps an epoch; cut after 2 and 7. Each part has a cache of its
    own, so that the last ones have to be filled with the same.
    """

    def run(name, at=None, ckpt=None):
        module = module_of(tiny_model("sd15"), caption_dropout=0.5)
        data = images(
            root,
            batch_size=2,
            cache="disk",
            cache_dir=tmp_path / f"cache-{name}",
            **{"flip": True, **options},
        )
        cutter, saver = Cutter(at), saver_of(tmp_path / name, every_n_steps=1, keep=-1)
        trainer = trainer_of(tmp_path, cutter, saver, max_steps=10, checkpointing=True)
        connect(data, module, trainer)
        if at is None:
            trainer.fit(module, data, ckpt_path=ckpt)
        else:
            with pytest.raises(CutError):
                trainer.fit(module, data, ckpt_path=ckpt)
        return cutter, str(Path(saver.folder) / "last.ckpt")

    whole, _ = run("whole")
    first, ckpt = run("first", 2)
    second, ckpt = run("second", 7, ckpt)
    third, _ = run("third", None, ckpt)
    assert_same(first.seen + second.seen + third.seen, whole.seen, "ids")
    assert_same(first.draws + second.draws + third.draws, whole.draws, "timesteps")
    assert_same(first.steps | second.steps | third.steps, whole.steps, "steps")
