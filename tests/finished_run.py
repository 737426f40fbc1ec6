"""A tiny run that has trained, made once for all the tests that want one."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
_MADE: dict[str, Path] = {}


def composed(*overrides: str, name: str = "train") -> DictConfig:
    """A config as the command line makes it, with the corrections that `check_command_line` makes."""
    from lit_sd.command_line import CommandLine

    line = CommandLine([CONF], name, list(overrides))
    line.check()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(name, overrides=[line.rewritten.get(text, text) for text in overrides])


def photos(folder: Path, count: int = 4, size: int = 72) -> Path:
    """A folder of plain pictures, each of another colour, with captions beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("RGB", (size, size), (40 * i, 200 - 30 * i, 90)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"picture {i}")
    return folder


def tiny(model: Path | str, root: Path | str, out: Path | str, steps: int = 2) -> list[str]:
    """Overrides that make any training command a matter of seconds on a CPU."""
    return [
        "model=sd15",
        f"model.path={model}",
        f"data.root={root}",
        "data.batch_size=2",
        "data.num_workers=0",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        f"trainer.max_steps={steps}",
        "callbacks.samples.prompts=[a cat]",
        "callbacks.samples.seeds=[0,1]",
        "callbacks.samples.steps=2",
        f"paths.output_dir={out}",
    ]


@pytest.fixture(scope="session", name="finished_run")
def made_run(tiny_model_dir, tmp_path_factory) -> Path:
    """The folder of a LoRA run of two steps, with held-out images and an average (EMA)."""
    if "run" not in _MADE:
        from lit_sd.run import train

        base = tmp_path_factory.mktemp("finished")
        small = tiny(tiny_model_dir("sd15"), photos(base / "photos"), base / "run")
        train(
            composed(
                "strategy=lora",
                "callbacks=ema",
                *small,
                "data.prompt=a photo of sks cat",
                f"data.val_root={photos(base / 'held_out', 3)}",
            )
        )
        _MADE["run"] = base / "run"
    return _MADE["run"]
