"""F35: what will be done is said first, with the arithmetic."""

from functools import partial

import pytest
from peft import LoraConfig
from tiny_runs import images, module_of, trained, trainer_of, write_images
from torch.optim import AdamW

from lit_sd import schedules
from lit_sd.adapters.peft import Peft
from lit_sd.callbacks import EMA, Plan


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
    trainer_of(tmp_path, Plan(tmp_path / "plan.txt"), EMA(), max_epochs=2, accumulate_grad_batches=4).fit(
        module, data
    )
    return module, (tmp_path / "plan.txt").read_text(), capsys.readouterr().out


def test_text(plan):
    module, text, _ = plan
    rows = {line[:21].strip(): line[21:].strip() for line in text.splitlines()}
    width = text.index("2 images") if "2 images" in text else 0
    assert width
    assert "10 images x 2 repeats" in text
    assert "2 images x 4 accumulated x 1 ranks = 8 images per update" in text
    assert "6; 3 in an epoch" in text  # 10 batches: ceil(10 / 4) updates
    assert "cosine, warm-up over 3 updates" in text
    assert "32-true on cpu" in text
    unet = sum(p.numel() for n, p in trained(module).items() if ".unet." in n)
    assert f"trains unet          {unet:,} parameters at lr 0.0001" in text
    assert "parameters at lr 5e-06" in text
    assert rows


def test_memory(plan):
    module, text, _ = plan
    own = sum(p.numel() * 4 for p in trained(module).values())
    frozen = sum(p.numel() * 4 for p in module.parameters()) - own
    # weights, gradients, two moments, the average
    assert f"{(5 * own + frozen) / 2**30:.2f} GiB for weights, gradients, optimizer and average" in text


def test_is_printed_too(plan):
    _, text, out = plan
    for line in text.splitlines():
        assert line.split()[-1] in out


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
