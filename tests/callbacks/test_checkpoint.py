"""Checkpoints on disk: when, which stay, and that none is ever half a file or a dangling name."""

import os

import lightning
import pytest
import torch
from tiny_runs import images, module_of, saver_of, trainer_of, write_images

from lit_sd.callbacks.checkpoint import AsideCheckpointIO, replace_by_link


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 6)


@pytest.fixture
def fit(tiny_model, tmp_path, root):
    def fit(saver, *callbacks, max_steps=5, **options):
        trainer = trainer_of(tmp_path, *callbacks, saver, max_steps=max_steps, checkpointing=True, **options)
        trainer.fit(module_of(tiny_model()), images(root, val_share=0.2))
        return {
            path.name: torch.load(path, weights_only=True)["global_step"] for path in saver.folder.glob("*")
        }

    return fit


def test_every_n_steps_and_the_end(fit, tmp_path):
    files = fit(saver_of(tmp_path / "c", every_n_steps=2, keep=-1, monitor=None))
    assert files == {"step_000002.ckpt": 2, "step_000004.ckpt": 4, "step_000005.ckpt": 5, "last.ckpt": 5}


@pytest.mark.parametrize(("keep", "stay"), [(0, set()), (1, {5}), (2, {4, 5})])
def test_how_many_stay(fit, tmp_path, keep, stay):
    files = fit(saver_of(tmp_path / "c", every_n_steps=1, keep=keep, monitor=None))
    assert files == {"last.ckpt": 5, **{f"step_{n:06d}.ckpt": n for n in stay}}


def test_counts_updates_and_not_batches(fit, tmp_path):
    writes = []

    class Count(lightning.Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            writes.append(trainer.global_step)

    saver = saver_of(tmp_path / "c", every_n_steps=1, monitor=None)
    fit(saver, Count(), max_steps=3, accumulate_grad_batches=2)
    assert writes == [1, 2, 3]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_best(fit, tmp_path, mode, best):
    class Scores(lightning.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            self.log("score", {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.2}[trainer.global_step])

    saver = saver_of(tmp_path / "c", every_n_steps=0, keep=0, monitor="score", mode=mode)
    files = fit(saver, Scores(), max_steps=4, val_check_interval=1)
    assert files == {"best.ckpt": best, "last.ckpt": 4}
    assert saver.best_model_path == str(tmp_path / "c" / "best.ckpt")


@pytest.mark.parametrize(("folder", "best"), [("c", 1), ("elsewhere", 3)])
def test_best_after_a_resume(tiny_model, tmp_path, root, folder, best):
    """In its folder the best so far stays, another folder gets one of its own."""

    class Scores(lightning.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            self.log("score", {1: 0.1, 2: 0.5, 3: 0.4, 4: 0.6}[trainer.global_step])

    for name, steps, ckpt in (("c", 2, None), (folder, 4, tmp_path / "c" / "last.ckpt")):
        saver = saver_of(tmp_path / name, every_n_steps=0, keep=0, monitor="score")
        options = {"max_steps": steps, "checkpointing": True, "val_check_interval": 1}
        trainer = trainer_of(tmp_path, Scores(), saver, **options)
        trainer.fit(module_of(tiny_model()), images(root, val_share=0.2), ckpt_path=ckpt)
    assert torch.load(saver.best, weights_only=True)["global_step"] == best


def test_the_newest_stay_and_not_those_of_an_earlier_run(fit, tmp_path):
    stale = tmp_path / "c" / "step_000500.ckpt"
    stale.parent.mkdir()
    stale.write_bytes(b"of a run that came further")
    os.utime(stale, (1e9, 1e9))
    assert fit(saver_of(stale.parent, every_n_steps=2, monitor=None)) == {
        "step_000005.ckpt": 5,
        "last.ckpt": 5,
    }


def test_unknown_metric(fit, tmp_path):
    with pytest.raises(ValueError, match=r"monitor='val/los' was not logged.*val/loss"):
        fit(saver_of(tmp_path / "c", monitor="val/los"), val_check_interval=1)


def test_no_name_dangles(fit, tmp_path):
    saver = saver_of(tmp_path / "c", every_n_steps=1, keep=-1)
    fit(saver, val_check_interval=1)
    for path in saver.folder.glob("step_*"):
        path.unlink()
    assert not saver.last.is_symlink()
    assert not saver.best.is_symlink()
    assert torch.load(saver.last, weights_only=True)["global_step"] == 5
    assert torch.load(saver.best, weights_only=True)["global_step"] <= 5


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    target = tmp_path / "last.ckpt"
    AsideCheckpointIO().save_checkpoint({"step": 1}, target)

    def fails(checkpoint, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="No space left"):
        AsideCheckpointIO().save_checkpoint({"step": 2}, target)
    assert torch.load(target, weights_only=True) == {"step": 1}


def test_leftovers_of_a_killed_write_are_removed(fit, tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / ".step_000001.ckpt.partial").write_bytes(b"half")
    fit(saver_of(folder, monitor=None))
    assert sorted(os.listdir(folder)) == ["last.ckpt", "step_000005.ckpt"]


def test_links_and_copies(tmp_path, monkeypatch):
    one, two, name = tmp_path / "1", tmp_path / "2", tmp_path / "last"
    one.write_text("1")
    two.write_text("2")
    replace_by_link(one, name)
    replace_by_link(one, name)
    assert name.read_text() == "1"
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    with pytest.warns(UserWarning, match="becomes a copy"):
        replace_by_link(two, name)
    assert name.read_text() == "2"
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "last"]


def test_wrong_options(tmp_path):
    with pytest.raises(ValueError, match="keep=-2"):
        saver_of(tmp_path, keep=-2)
