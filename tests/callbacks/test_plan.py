"""F35: what will be done is said first, with the arithmetic."""

import re
import resource
import sys
from functools import partial

import pytest
from peft import LoraConfig
from tiny_runs import ema_of, images, module_of, trained, trainer_of, write_images
from torch.optim import AdamW

from lit_sd import schedules
from lit_sd.adapters.peft import Peft
from lit_sd.callbacks import Plan


@pytest.fixture
def plan(tiny_model, tmp_path, capsys):
    adapter = Peft(
        {"unet": LoraConfig(target_modules=["to_q"]), "text_encoder": LoraConfig(target_modules=["q_proj"])}
    )
    module = module_of(
        tiny_model(),
        adapter,
        component_lr={"text_encoder": 5e-6},
        scheduler=partial(schedules.cosine, warmup=3),
        optimizer=partial(AdamW, lr=1e-4),
    )
    data = images(write_images(tmp_path / "images", 10), batch_size=2, repeats=2)
    trainer_of(
        tmp_path, Plan(tmp_path / "plan.txt"), ema_of(0.999), max_epochs=2, accumulate_grad_batches=4
    ).fit(module, data)
    return module, (tmp_path / "plan.txt").read_text(), capsys.readouterr().out


def rows_of(text: str) -> dict[str, str]:
    """The plan's rows by name: two spaces or more stand between a name and its value, one of its lines."""
    rows: dict[str, str] = {}
    for line in text.splitlines():
        name, value = re.split(r"\s{2,}", line, maxsplit=1)
        rows[name] = f"{rows[name]}\n{value}" if name in rows else value
    return rows


def test_text(plan):
    module, text, _ = plan
    rows = rows_of(text)
    count = {
        part: sum(p.numel() for n, p in trained(module).items() if f".{part}." in n)
        for part in ("unet", "text_encoder")
    }
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    assert "10 images x 2 repeats" in rows["data"]
    assert rows["batch"] == "2 images x 4 accumulated x 1 ranks = 8 images per update"
    assert rows["updates"] == "6; 3 in an epoch"  # 10 batches: ceil(10 / 4) updates
    assert rows["schedule"] == "cosine, warm-up over 3 updates"
    assert rows["precision"] == "32-true on cpu"
    assert rows["trains unet"] == f"{count['unet']:,} parameters at lr 0.0001"
    assert rows["trains text_encoder"] == f"{count['text_encoder']:,} parameters at lr 5e-06"
    assert rows["frozen"] == f"{frozen:,} parameters"
    starts = {re.match(r".+?\s{2,}", line).end() for line in text.splitlines()[:-1]}  # the last came later
    assert len(starts) == 1, "values stand in one column"


def test_memory(plan):
    module, text, _ = plan
    own = sum(p.numel() * 4 for p in trained(module).values())
    frozen = sum(p.numel() * 4 for p in module.parameters()) - own
    # weights, gradients, two moments, the average
    assert f"{(5 * own + frozen) / 2**30:.2f} GiB for weights, gradients, optimizer and average" in text


def test_the_peak_of_memory_is_measured_after_the_first_update(plan):
    _, text, out = plan
    (line,) = [line for line in text.splitlines() if line.startswith("peak memory")]
    measured = float(re.search(r"([\d.]+) GiB", line)[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert 0.05 < measured <= peak / 2**30 + 0.005
    assert text.splitlines()[-1] == line
    assert line in out


def test_is_printed_too(plan):
    """All of the text, however the table folds it."""
    _, text, out = plan
    printed = "".join(out.split())
    for name, value in rows_of(text).items():
        assert "".join(f"{name}{value}".split()) in printed


def test_what_is_known_before_class_images_are_drawn(tiny_model, tmp_path, capsys):
    callback, told = Plan(None), []

    def before_setup():
        callback.announce(trainer)
        told.append(capsys.readouterr().out)

    data = images(write_images(tmp_path / "images", 10), batch_size=2)
    data.before_setup = before_setup
    trainer = trainer_of(tmp_path, callback, max_steps=1, accumulate_grad_batches=4)
    trainer.fit(module_of(tiny_model()), data)
    (early,) = told
    for expected in ("10 images", "2 images x 4 accumulated x 1 ranks = 8 images per update", "1 updates"):
        assert expected in early


def test_captions_that_will_be_cut_are_told(tiny_model, tmp_path):
    """F05: the share and the longest, in one line."""
    folder = write_images(tmp_path / "images", 4)
    for path in sorted(folder.glob("*.png"))[:1]:
        path.with_suffix(".txt").write_text("cat " * 120)
    module = module_of(tiny_model())
    trainer_of(tmp_path, Plan(tmp_path / "plan.txt"), max_steps=1).fit(module, images(folder, batch_size=2))
    line = next(
        line for line in (tmp_path / "plan.txt").read_text().splitlines() if line.startswith("captions")
    )
    assert "1 of 4 captions (25%) are longer than 77 tokens" in line
    assert f"the longest has {module.model.token_counts(['cat ' * 120])[0]}" in line
