"""Sample grids: what lies where, when they are drawn, where they go."""

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tiny_runs import images, module_of, samples_of, trainer_of, write_images

from lit_sd.callbacks import Export
from lit_sd.callbacks.samples import grid, log_image


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 4)


def plain(color, size=(4, 2)):
    return Image.new("RGB", size, color)


def test_grid():
    sheet = np.asarray(grid([plain((i, 0, 0)) for i in range(5)], columns=2))
    assert sheet.shape == (6, 8, 3)
    assert sheet[0, 0, 0] == 0
    assert sheet[0, 4, 0] == 1
    assert sheet[2, 0, 0] == 2
    assert sheet[5, 3, 0] == 4
    assert sheet[5, 7].tolist() == [255, 255, 255]


def test_when_and_what(tiny_model, tmp_path, root):
    module = module_of(tiny_model())
    asked = []

    def sample(prompts, seeds, **options):
        asked.append((list(prompts), list(seeds), options))
        return [plain((seed, 10 * prompts.index(p), 0)) for p, seed in zip(prompts, seeds, strict=True)]

    module.sample = sample
    samples = samples_of(
        tmp_path / "s", ["a", "b"], [1, 2, 3], every_n_steps=2, at_start=True, steps=7, guidance=3.0
    )
    trainer_of(tmp_path, samples, max_steps=5, accumulate_grad_batches=2).fit(module, images(root))
    names = [f"step_{n:06d}.png" for n in (0, 2, 4, 5)]
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == names
    prompts, seeds, options = asked[0]
    assert list(zip(prompts, seeds, strict=True)) == [(p, s) for p in ("a", "b") for s in (1, 2, 3)]
    assert options["steps"] == 7
    assert options["guidance"] == 3.0
    sheet = np.asarray(Image.open(tmp_path / "s" / names[0]))
    assert sheet.shape == (4, 12, 3)
    assert sheet[0, 8].tolist() == [3, 0, 0]
    assert sheet[2, 4].tolist() == [2, 30, 0]


def test_real_pictures_are_the_same_at_the_same_weights(tiny_model, tmp_path, root):
    """At rate 0 every grid is the same picture, and no two seeds are."""
    module = module_of(tiny_model(), component_lr={"unet": 0.0})
    samples = samples_of(tmp_path / "s", ["a cat"], [0, 1], every_n_steps=1, at_start=True, steps=2)
    trainer = trainer_of(tmp_path, samples, max_steps=1)
    trainer.fit(module, images(root))
    sheets = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "s").iterdir())]
    assert len(sheets) == 2
    assert (sheets[0] == sheets[1]).all()
    left, right = np.split(sheets[0], 2, axis=1)
    assert (left != right).any()
    before = torch.get_rng_state()
    samples.draw(trainer, module)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_prompts_no_files(tiny_model, tmp_path, root):
    trainer_of(tmp_path, samples_of(tmp_path / "s"), max_steps=1).fit(module_of(tiny_model()), images(root))
    assert not (tmp_path / "s").exists()


def test_a_single_prompt_must_be_in_a_list(tmp_path):
    with pytest.raises(ValueError, match="expected a list"):
        samples_of(tmp_path, "a photo")


def test_loggers(tmp_path):
    """Those that take pictures get one, the others are left alone."""
    log_image(CSVLogger(tmp_path), "samples", plain("red"), 3)
    board = TensorBoardLogger(tmp_path, name="board", version="")
    log_image(board, "samples", plain("red"), 3)
    board.experiment.flush()
    assert any((tmp_path / "board").glob("events*"))

    class Wandb(WandbLogger):
        def __init__(self):
            self.got = []

        def log_image(self, key, images, step=None, **kwargs):
            self.got.append((key, len(images), step, kwargs))

    wandb = Wandb()
    log_image(wandb, "samples", plain("red"), 3, caption="a | b")
    assert wandb.got == [("samples", 1, 3, {"caption": ["a | b"]})]


def test_export_at_the_end(tiny_model, tmp_path, root):
    export = Export(tmp_path / "export")
    module = module_of(tiny_model())
    trainer_of(tmp_path, export, max_steps=1).fit(module, images(root))
    assert export.files == [tmp_path / "export" / "conv_out.pt"]
    saved = torch.load(export.files[0], weights_only=True)
    assert torch.equal(saved["bias"], module.model.unet.conv_out.bias)
