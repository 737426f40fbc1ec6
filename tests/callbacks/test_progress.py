"""What is shown: metrics, their format, and how seldom a device is asked for them."""

import csv

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny_runs import images, module_of, trainer_of, write_images

from lit_sd.callbacks import Meters, Progress
from lit_sd.callbacks.progress import count_images, readable


@pytest.fixture
def root(tmp_path):
    return write_images(tmp_path / "images", 6)


def test_meters_reach_the_logger(tiny_model, tmp_path, root):
    logger = CSVLogger(tmp_path, name="csv", version="")
    trainer = trainer_of(
        tmp_path, Meters(), max_steps=6, log_every_n_steps=2, logger=logger, accumulate_grad_batches=2
    )
    trainer.fit(module_of(tiny_model()), images(root))
    rows = list(csv.DictReader((tmp_path / "csv" / "metrics.csv").open()))
    logged = [row for row in rows if row["images_per_s"]]
    assert logged
    assert all(float(row["images_per_s"]) > 0 for row in logged)
    # warm-up over 2 updates, then down to 0 at the sixth
    assert float(logged[-1]["lr"]) == pytest.approx(0, abs=1e-12)
    assert {"train/loss", "lr", "images_per_s"} <= rows[0].keys()


def test_images_per_second_counts_all_that_was_accumulated(tiny_model, tmp_path, root, monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("lit_sd.callbacks.progress.time.perf_counter", lambda: float(next(clock)))
    logged = []
    module = module_of(tiny_model())
    log = module.log_dict
    module.log_dict = lambda values, **options: (logged.append(values), log(values, **options))
    trainer_of(tmp_path, Meters(every_n_steps=2), max_steps=4, accumulate_grad_batches=3).fit(
        module, images(root, batch_size=2)
    )
    # One update takes an epoch of 3 batches of 2. The clock moves on by 2 s at each look, twice each time.
    assert [values["images_per_s"] for values in logged] == [6 / 2, 6 / 2, 12 / 2]


def test_rates_by_group(tiny_model, tmp_path, root):
    module = module_of(tiny_model())
    unet = list(module.model.unet.conv_out.parameters())
    module.parameter_groups = lambda: [
        {"name": "weight", "params": unet[:1]},
        {"name": "bias", "params": unet[1:], "lr": 0.5},
    ]
    trainer = trainer_of(tmp_path, Meters(), max_steps=1)
    trainer.fit(module, images(root))
    assert {"lr/weight", "lr/bias"} <= trainer.callback_metrics.keys()


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"ids": ["a", "b"]}, 2),
        ({"x": torch.zeros(3, 2)}, 3),
        ([torch.zeros(4)], 4),
        (torch.zeros(5), 5),
        ({}, 0),
    ],
)
def test_count_images(batch, count):
    assert count_images(batch) == count


def test_readable():
    assert readable("lr/unet", 1.25e-5) == "1.25e-05"
    assert readable("train/loss", 0.123456) == "0.1235"
    assert readable("images_per_s", 12.345) == "12.3"
    assert readable("note", "x") == "x"


def run_with(progress, tiny_model, tmp_path, root, *more, **options):
    trainer = trainer_of(
        tmp_path, progress, Meters(), *more, enable_progress_bar=True, **{"max_steps": 8, **options}
    )
    trainer.fit(module_of(tiny_model()), images(root))
    return trainer


def test_plain_lines_where_there_is_no_terminal(tiny_model, tmp_path, root, capsys):
    run_with(Progress(every_s=0.0, plain_every_s=0.0), tiny_model, tmp_path, root)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 6/8")]
    assert len(lines) == 1
    for word in ("train/loss ", "lr ", "images_per_s ", " left"):
        assert word in lines[0]


def test_metrics_are_read_seldom(tiny_model, tmp_path, root):
    """Reading makes an accelerator's host wait, so it follows the clock and not the steps."""
    reads = []

    class Count(Progress):
        def get_metrics(self, *args):
            reads.append(1)
            return super().get_metrics(*args)

    run_with(Count(every_s=1000.0, plain_every_s=15.0), tiny_model, tmp_path, root)
    assert len(reads) <= 2  # the first step, and the end


def test_bar_counts_updates_over_all_epochs(tiny_model, tmp_path, root):
    progress = Progress(every_s=0.0, plain_every_s=15.0)
    seen = []

    class Look(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            task = progress.progress.tasks[progress.train_progress_bar_id]
            seen.append((task.completed, task.total))

    run_with(progress, tiny_model, tmp_path, root, Look(), accumulate_grad_batches=2)
    assert [total for _, total in seen] == [8] * 16
    assert [completed for completed, _ in seen] == sorted(completed for completed, _ in seen)
    assert seen[-1][0] == 8


def test_can_be_disabled(tiny_model, tmp_path, root, capsys):
    progress = Progress(every_s=0.0, plain_every_s=0.0)
    progress.disable()
    run_with(progress, tiny_model, tmp_path, root)
    assert "train/loss" not in capsys.readouterr().out
