"""A checkpoint alone is enough to judge a run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from finished_run import composed, made_run, photos  # noqa: F401
from PIL import Image

from lit_sd import run
from lit_sd.data.loading import to_floats
from lit_sd.evaluation import draw_from_run, evaluate, slug, stems
from lit_sd.run import make, rebuild
from lit_sd.trainable import read_checkpoint


def judged(checkpoint: Path, out: Path, *more: str) -> dict[str, float]:
    return evaluate(composed(f"ckpt={checkpoint}", f"paths.output_dir={out}", *more, name="evaluate"))


def test_held_out_loss_and_pictures_come_from_the_checkpoint_alone(
    finished_run: Path, tmp_path: Path
) -> None:
    metrics = judged(finished_run, tmp_path / "out")
    assert metrics["step"] == 2
    assert metrics["val/loss"] > 0
    strata = [value for name, value in metrics.items() if name.startswith("val/loss_t")]
    assert metrics["val/loss"] == pytest.approx(sum(strata) / len(strata), rel=1e-5)
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == metrics
    pictures = sorted(path.name for path in (tmp_path / "out" / "samples").iterdir())
    assert pictures == [f"a-cat_{seed:04d}.png" for seed in range(4)]


def test_two_evaluations_are_equal_and_a_worse_model_is_told_from_a_better(
    finished_run: Path, tmp_path: Path
) -> None:
    quick = ["prompts=[]"]
    first, again = (judged(finished_run, tmp_path / name, *quick)["val/loss"] for name in "ab")
    assert first == again
    raw = judged(finished_run, tmp_path / "c", *quick, "averaged=false")["val/loss"]
    assert raw == pytest.approx(loss_by_hand(finished_run, averaged=False), rel=1e-6)
    assert first == pytest.approx(loss_by_hand(finished_run, averaged=True), rel=1e-6)
    assert raw != first
    assert not (tmp_path / "a" / "samples").exists() or not list((tmp_path / "a" / "samples").iterdir())


def loss_by_hand(run: Path, averaged: bool) -> float:
    """The mean over the strata of timesteps, without a Trainer and with the average put in by name."""
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    rebuilt = rebuild(run / "checkpoints" / "last.ckpt", averaged=False)
    if averaged:
        rebuilt.module.load_state_dict(checkpoint["ema"]["average"], strict=False)
    data = make(rebuilt.cfg.data)
    data.check()
    totals = sum(rebuilt.module.fixed_losses(to_floats(batch)) for batch in data.val_dataloader())
    return (totals[:, 0] / totals[:, 1]).mean().item()


def test_it_judges_on_other_images_if_asked(finished_run: Path, tmp_path: Path) -> None:
    other = photos(tmp_path / "other", 2, size=96)
    usual = judged(finished_run, tmp_path / "a", "prompts=[]")["val/loss"]
    assert judged(finished_run, tmp_path / "b", "prompts=[]", f"data.val_root={other}")["val/loss"] != usual
    with pytest.raises(FileNotFoundError):
        judged(finished_run, tmp_path / "c", "prompts=[]", f"data.val_root={tmp_path / 'none'}")


def test_without_its_images_it_still_draws_and_says_so(finished_run: Path, tmp_path: Path, capsys) -> None:
    checkpoint = read_checkpoint(finished_run / "checkpoints" / "last.ckpt")
    checkpoint["config"]["data"] |= {"root": str(tmp_path / "gone"), "val_root": str(tmp_path / "gone too")}
    torch.save(checkpoint, tmp_path / "moved.ckpt")
    # nothing to validate, so no second process is started: this one draws all
    several = ["trainer.devices=2", "trainer.strategy=ddp"]
    metrics = judged(tmp_path / "moved.ckpt", tmp_path / "out", "seeds=[7,8]", *several)
    assert metrics == {"step": 2}
    names = sorted(path.name for path in (tmp_path / "out" / "samples").iterdir())
    assert names == ["a-cat_0007.png", "a-cat_0008.png"]
    assert "held-out loss is left out" in capsys.readouterr().out


def test_a_picture_belongs_to_its_prompt_and_seed(finished_run: Path, tmp_path: Path) -> None:
    options = {"steps": 2, "batch_size": 2}
    many = draw_from_run(finished_run, ["a cat", "a dog"], [3, 4], options, tmp_path / "many")
    one = draw_from_run(finished_run, ["a dog"], [4], options, tmp_path / "one")
    assert [path.name for path in many] == [
        "a-cat_0003.png",
        "a-cat_0004.png",
        "a-dog_0003.png",
        "a-dog_0004.png",
    ]
    assert (np.asarray(Image.open(many[3])) == np.asarray(Image.open(one[0]))).all()


@pytest.mark.parametrize("available", [False, True])
def test_the_process_is_made_ready_as_for_training(
    finished_run: Path, tmp_path: Path, monkeypatch, available
):
    class ReadyError(Exception):
        pass

    def reached() -> bool:
        raise ReadyError

    (tmp_path / "empty.ckpt").touch()
    monkeypatch.setattr(run, "keep_freed_memory", reached)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    for use in (
        lambda: judged(tmp_path / "empty.ckpt", tmp_path / "out"),
        lambda: draw_from_run(finished_run / "none", ["a cat"], [0], {}),
    ):
        # with an accelerator there is nothing to do, and each goes on to what is wrong here
        with pytest.raises(ValueError if available else ReadyError):
            use()


@pytest.mark.parametrize(
    ("text", "name"),
    [("a photo of sks cat", "a-photo-of-sks-cat"), ("Über/../x", "über-x"), ("", "empty"), ("?!", "empty")],
)
def test_a_short_name(text: str, name: str) -> None:
    assert slug(text) == name
    assert len(slug("long " * 50)) <= 60


def test_two_prompts_never_share_a_file() -> None:
    names = stems(["cat", "Cat?", "cat", "cat!", "cat 2", ""])
    assert names == {"cat": "cat", "Cat?": "cat-2", "cat!": "cat-3", "cat 2": "cat-2-2", "": "empty"}
