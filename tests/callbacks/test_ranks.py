"""Two processes on the CPU: F17, F31–F34, and a signal that only one of them gets."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import assert_same, images, trainer_of, write_images
from two_ranks import PROMPTS, SEEDS, module

from lit_sd.trainable import read_checkpoint, restore


@pytest.fixture(scope="module")
def done(tiny_model_dir, tmp_path_factory):
    """Folder of a finished run of two processes (`two_ranks.py`)."""
    folder = tmp_path_factory.mktemp("ranks")
    root = write_images(folder / "images", 13)  # 3 of them for validation
    script = Path(__file__).with_name("two_ranks.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*launch, str(script), str(tiny_model_dir("sd15")), str(root), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # else the ranks outlive their launcher
        raise
    assert process.returncode == 0, output[-4000:]
    return folder


def ranks(folder):
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_one_model_and_different_draws(done):
    """F31: noise differs between ranks, weights never do."""
    a, b = ranks(done / "whole")
    assert_same(a["first"], b["first"])
    assert_same(a["last"], b["last"])
    assert any(not torch.equal(a["first"][name], a["last"][name]) for name in a["first"])
    assert all(x != y for x, y in zip(a["timesteps"][:3], b["timesteps"][:3], strict=True))
    assert a["ids"] != b["ids"]


def test_schedule_is_of_the_sharded_loader(done):
    """F17: 5 batches on each rank, 4 accumulated: 2 updates in an epoch, 4 in all, and then rate 0."""
    for rank in ranks(done / "whole"):
        assert rank["steps"] == 4
        assert len(rank["ids"]) == 10
        assert rank["lr"] == pytest.approx([1e-3] * 3 + [7.5e-4] + [5e-4] * 4 + [2.5e-4, 0.0])


def test_validation_is_of_all_examples(done, tiny_model_dir):
    """The mean over the ranks' examples is the mean that one process finds; the ranks agree on it."""
    a, b = ranks(done / "whole")
    assert a["metrics"]["val/loss"] == b["metrics"]["val/loss"]
    model = module(str(tiny_model_dir("sd15")))
    # the last validation follows the last update, and judges the average
    restore(model, read_checkpoint(done / "whole" / "checkpoints" / "last.ckpt"), averaged=True)
    alone = trainer_of(done).validate(model, images(done / "images", val_share=0.23), verbose=False)[0]
    for name in (name for name in alone if name.startswith("val/loss")):
        assert alone[name] == pytest.approx(a["metrics"][name], rel=1e-5), name


def test_samples_are_those_of_one_process(done, tiny_model_dir, cpu_threads):
    """F33: three pictures over two ranks, in order, pixel for pixel, at the number of threads that a rank
    has.
    """
    cpu_threads(1)
    sheet = np.asarray(Image.open(done / "whole" / "samples" / "step_000000.png"))
    alone = module(str(tiny_model_dir("sd15"))).sample(PROMPTS, SEEDS * len(PROMPTS), steps=2, guidance=7.5)
    assert (sheet == np.concatenate([np.asarray(picture) for picture in alone])).all()
    assert (done / "whole" / "samples" / "step_000004.png").exists()


def test_checkpoints(done):
    """F32: all ranks take part in those that a metric asks for."""
    names = sorted(path.name for path in (done / "whole" / "checkpoints").iterdir())
    assert names == ["best.ckpt", "last.ckpt", "step_000004.ckpt"]
    saved = torch.load(done / "whole" / "checkpoints" / "last.ckpt", weights_only=True)
    assert_same(saved["state_dict"], ranks(done / "whole")[0]["last"])


def test_a_signal_to_one_rank_stops_both(done):
    folder = done / "interrupted"
    assert [(rank["code"], rank["steps"]) for rank in ranks(folder)] == [(143, 2), (143, 2)]
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("run", ["nan", "nan_deferred"])
def test_a_loss_that_one_rank_sees_break_stops_both(done, run):
    """And both say which: rank 0 knows of rank 1's example."""
    a, b = ranks(done / run)
    assert a["steps"] == b["steps"] == 1
    assert a["error"] == b["error"]
    assert a["error"].startswith("the loss is nan after 1 updates, from 1 of 1 examples:")
    assert b["bad"] in a["error"]
    assert not any(name in a["error"] for ids in a["ids"] for name in ids)
