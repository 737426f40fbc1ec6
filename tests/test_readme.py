"""Every command in the README and in CONTRIBUTING does what it says, on tiny models."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from finished_run import CONF, ROOT, composed, made_run, photos  # noqa: F401
from typer.testing import CliRunner

from lit_sd.command_line import CommandLine
from lit_sd.run import train
from lit_sd.trainable import read_checkpoint

README = (ROOT / "README.md").read_text()


def commands(text: str, program: str) -> list[str]:
    """Command lines of the bash blocks that call a program, without their comments."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(program)]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch, finished_run: Path, tiny_model_dir) -> Path:
    """A folder with everything that the README's commands name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs" / "train" / "runs").mkdir(parents=True)
    shutil.copytree(finished_run, tmp_path / "logs" / "train" / "runs" / "RUN")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "sd15").symlink_to(tiny_model_dir("sd15"))
    photos(tmp_path / "photos")
    photos(tmp_path / "images")
    return tmp_path


def test_the_first_two_commands_are_the_ones_for_everybody() -> None:
    assert commands(README, "make") == ["make demo", "make test"]
    assert commands(README, "")[:2] == ["make demo", "make test"]


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would do, called from nowhere: what a `make test` around these tests was given counts not."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("MAKE") and k not in ("MFLAGS", "VENV", "ARGS")
    }
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "line", [*commands(README, "make"), *commands((ROOT / "CONTRIBUTING.md").read_text(), "make")]
)
def test_make_has_the_target(line: str, tmp_path: Path) -> None:
    done = dry_run(*shlex.split(line)[1:], f"VENV={tmp_path / 'venv'}")
    assert done.returncode == 0, done.stderr
    job = {"demo": "train.py experiment=dreambooth_cat", "test": "-m pytest", "check": "ruff check ."}
    assert job.get(line.split()[1], "pip install -c constraints.txt -e") in done.stdout


def test_make_installs_once(tmp_path: Path) -> None:
    """With a stamp newer than the lists, nothing but the job is left to do; `dev` has all that `demo` has."""
    if shutil.which("make") is None:  # make is not what these tests need, only what the README needs
        pytest.fail("make is missing")
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("bin/python", ".dev", ".demo"):
        (venv / name).touch()
    for target in ("demo", "test"):
        done = dry_run(target, f"VENV={venv}")
        assert len(done.stdout.splitlines()) == 1, done.stdout
    (venv / ".demo").unlink()
    done = dry_run("demo", f"VENV={venv}")
    assert "'.[demo]'" in done.stdout
    assert "[dev]" not in done.stdout


def test_half_an_environment_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    """Where `python -m venv` fails after it has written bin/python, as it does without ensurepip."""
    python, venv = tmp_path / "python", tmp_path / "venv"
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nmkdir -p {venv}/bin; touch {venv}/bin/python\nexit 1\n'
    )
    python.chmod(0o755)
    command = ["make", "install", f"VENV={venv}", f"PYTHON={python}"]
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert f"{python} -m venv" in done.stdout, "the environment was not made again"
        assert not (venv / "bin" / "python").exists()


def test_help_names_every_target() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    makefile = (ROOT / "Makefile").read_text()
    (declared,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert set(re.findall(r"^  make (\w+)", told, re.MULTILINE)) == set(declared.split())


def small(overrides: list[str], model: Path, steps: int) -> list[str]:
    """A README's overrides with what would take long replaced."""
    ours = [
        "trainer.accelerator=cpu",
        "trainer.devices=1",
        f"trainer.max_steps={steps}",
    ]
    ours += [
        "data.batch_size=2",
        "data.num_workers=0",
        "data.resolution=64",
        "paths.output_dir=out",
        "callbacks.samples.steps=1",
    ]
    ours += ["model=sd15", f"model.path={model}"]
    if any("dreambooth" in text for text in overrides):
        ours += ["data.num_class_images=2", "data.prior_sampling.steps=1"]
    taken = {text.partition("=")[0] for text in ours}
    kept = [text for text in overrides if text.partition("=")[0] not in taken and text != "-m"]
    single = [
        text if text.startswith(("adapter.comp",)) else re.sub(r"=([^,\[]+),.*", r"=\1", text)
        for text in kept
    ]
    return [*single, *ours]


@pytest.mark.parametrize("line", commands(README, "python train.py"))
def test_training_commands_are_valid_as_they_stand_and_train(line: str, checkout: Path) -> None:
    overrides = shlex.split(line)[2:]
    plain = [text for text in overrides if text != "-m"]
    CommandLine([CONF], "train", plain, sweeps="-m" in overrides).check()
    steps = 3 if "ckpt=" in line else 1
    asked = small(overrides, checkout / "weights" / "sd15", steps)
    train(composed(*[text for text in asked if not text.startswith("sweep=")]))
    assert read_checkpoint(checkout / "out" / "checkpoints" / "last.ckpt")["global_step"] == steps
    assert list((checkout / "out" / "export").iterdir())


@pytest.mark.parametrize("line", commands(README, "python evaluate.py"))
def test_evaluation_commands(line: str, checkout: Path) -> None:
    from lit_sd.evaluation import evaluate

    evaluate(composed(*shlex.split(line)[2:], "paths.output_dir=out", name="evaluate"))
    assert (checkout / "out" / "metrics.json").is_file()


@pytest.mark.parametrize("line", commands(README, "lit-sd"))
def test_generate_commands(line: str, checkout: Path) -> None:
    from lit_sd.cli import app

    result = CliRunner().invoke(app, [*shlex.split(line)[1:], "--steps", "1"])
    assert result.exit_code == 0, result.output
    assert len(list((checkout / "logs/train/runs/RUN/generated").glob("a-photo-of-sks-cat*.png"))) == 4


@pytest.mark.parametrize("line", commands(README, "python benchmarks/"))
def test_benchmarks_take_these_options(line: str) -> None:
    _, script, *arguments = shlex.split(line)
    told = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert told.returncode == 0, told.stderr
    for option in (word for word in arguments if word.startswith("--")):
        assert option in told.stdout


def test_the_faults_that_it_shows_are_those_that_are_told() -> None:
    (block,) = re.findall(r"```text\n\$ python train\.py (.*?)```", README, re.DOTALL)
    line, _, shown = block.partition("\n")
    told = CommandLine([CONF], "train", shlex.split(line))
    with pytest.raises(ValueError, match="faults") as error:
        told.check()
    assert str(error.value).splitlines() == shown.splitlines()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_nothing_else_is_called() -> None:
    known = (
        "make ",
        "python train.py",
        "python evaluate.py",
        "lit-sd ",
        "python benchmarks/",
        "python -m lit_sd.",
    )
    assert all(line.startswith(known) for line in commands(README, "") if line)
