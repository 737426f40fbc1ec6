"""Misspelt words on the command line: all told at once, in the first second, before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from lit_sd.command_line import CommandLine
from lit_sd.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"


def faults(
    *overrides: str, sweeps: bool = False, name: str = "train", folders: list[Path] | None = None
) -> list[str]:
    try:
        CommandLine([CONF, *(folders or [])], name, list(overrides), sweeps=sweeps).check()
    except ConfigError as error:
        return error.faults
    return []


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.max_stepz=4", "trainer.max_stepz=4: no such key in trainer; nearest: trainer.max_steps"),
        ("modl=sd15", "modl=sd15: no such group or key; nearest: model"),
        ("model=sd14", "model=sd14: no such choice; nearest: sd15"),
        ("strategy=lorra", "strategy=lorra: no such choice; nearest: lora"),
        ("experiment=dreamboth_cat", "experiment=dreamboth_cat: no such choice; nearest: dreambooth_cat"),
        ("lr=3", "lr=3: no such group or key; nearest: optimizer.lr"),
        ("tranier.max_steps=3", "tranier.max_steps=3: no such key; nearest: trainer.max_steps"),
        ("seeed=3", "seeed=3: no such group or key; nearest: seed"),
        ("seed=three", "seed: expected int, got str 'three'"),
        ("seed=null", "seed: expected int, got null"),
        ("trainer.max_steps=many", "trainer.max_steps: expected int, got str 'many'"),
        ("trainer.precision=bf16-mixd", "got str 'bf16-mixd'; nearest: bf16-mixed"),
        ("data.bad_files=ignore", "data.bad_files: expected one of error, skip, got str 'ignore'"),
        ("callbacks.emma.decay=0.9", "no such key; nearest: callbacks"),
        ("optimizer._target_=torch.optim.AdamV", "no 'AdamV' in torch.optim; nearest: Adam"),
        ("+trainer.max_stepz=4", "trainer.max_stepz: no such key of lightning.pytorch.Trainer"),
        ("seed=1,2", "seed=1,2: several values need -m"),
        ("foo bar", "foo bar: not of the form key=value"),
        ("data.prompt=5", "data.prompt: expected str or null, got int 5"),
        ("callbacks.samples.seeds=[0,a]", "callbacks.samples.seeds[1]: expected int, got str 'a'"),
        ("optimizer.betas=[0.9,x]", "optimizer.betas[1]: expected float"),
        ("callbacks.checkpoint.mode=mni", "expected one of max, min, got str 'mni'; nearest: min"),
    ],
)
def test_one_misspelt_word(override: str, expected: str) -> None:
    told = faults(override)
    assert len(told) == 1, told
    assert expected in told[0]


def test_a_group_that_is_not_chosen_is_named_as_such() -> None:
    (told,) = faults("experiment=openmoji_vae", "adapter.rank=4")
    assert told == "adapter.rank=4: no adapter is chosen here; choose one of full, lora with adapter=…"


def test_shards_that_a_shell_made_of_braces_are_told() -> None:
    words = [f"data.root=shards/{i}.tar" for i in range(3)]
    (told,) = faults("data=webdataset", *words)
    assert told.startswith(f"data.root is given 3 shards, of which the last would count ({', '.join(words)}")
    assert told.endswith("""quote them twice, 'data.root="…"'""")
    assert faults("data=webdataset", words[0], words[0], "data.batch_size=1", "data.batch_size=2") == []


def test_all_are_told_at_once_and_good_ones_do_not_suffer() -> None:
    told = faults(
        "modl=x", "model=sd14", "strategy=lora", "adapter.rank=4", "adapter.rnk=4", "seed=a", "foo=1"
    )
    assert len(told) == 5
    assert not any("adapter.rank" in line.partition(":")[0] for line in told)


def test_sweeps_are_checked_value_by_value() -> None:
    assert faults("strategy=lora", "adapter.rank=4,16", "model=sd15,sdxl", sweeps=True) == []
    told = faults("strategy=lora", "adapter.rank=4,x", "model=sd15,sd16", "seed=0,1,y", sweeps=True)
    assert len(told) == 3
    assert any("adapter.rank: expected int, got str 'x'" in line for line in told)
    assert any("model=sd16: no such choice" in line for line in told)
    assert any("seed: expected int, got str 'y'" in line for line in told)


def test_arguments_of_the_target_need_no_plus_and_neither_do_entries_of_an_empty_mapping() -> None:
    asked = ["trainer.limit_test_batches=3", "task.component_lr.text_encoder=1e-5", "adapter=lora"]
    line = CommandLine([CONF], "train", asked)
    line.check()
    assert line.rewritten == {text: f"++{text}" for text in asked[:2]}


def test_good_command_lines_pass_as_they_are() -> None:
    for asked in (
        [],
        ["experiment=dreambooth_cat", "trainer.devices=8"],
        ["strategy=dreambooth_lora", "model=sdxl", "model.path=some/where", "logger=many"],
        ["~callbacks.samples"],
        ["callbacks.samples=null"],
        ["hydra.run.dir=x", "hydra/job_logging=none"],
        ["data.prompt='a, b = {c}'"],
        ["+optimizer.amsgrad=true"],
    ):
        line = CommandLine([CONF], "train", asked)
        line.check()
        assert line.rewritten == {}, asked


def test_null_leaves_a_group_out() -> None:
    for asked in ("logger=null", "experiment=null"):
        line = CommandLine([CONF], "train", [asked])
        line.check()
        assert line.rewritten == {asked: f"~{asked.partition('=')[0]}"}, "Hydra knows deletions alone"


def test_configs_of_ones_own_are_found_in_a_further_folder(tmp_path: Path) -> None:
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("# @package _global_\ntrainer:\n  max_stepz: 3\n")
    assert "no such choice" in faults("experiment=mine")[0]
    (told,) = faults("experiment=mine", folders=[tmp_path])
    assert told.startswith("trainer.max_stepz: no such key")


def test_a_misspelt_choice_inside_a_yaml_is_told(tmp_path: Path) -> None:
    own = tmp_path / "experiment" / "mine.yaml"
    own.parent.mkdir()
    own.write_text("# @package _global_\ndefaults:\n  - override /model: sd14\n")
    (told,) = faults("experiment=mine", folders=[tmp_path])
    assert "Could not find 'model/sd14'" in told


def test_evaluation_has_its_own_names() -> None:
    told = faults("ckp=x", "sampling.stepz=3", "seeds=3", name="evaluate")
    assert any(line.startswith("ckp=x: no such group or key; nearest: ckpt") for line in told)
    assert "sampling.stepz: no such key; nearest: sampling.steps" in told
    assert "seeds: expected list of int, got int 3" in told
    assert "ckpt: needs a value; give ckpt=…" in told
    assert faults("ckpt=.", "data.val_root=y", name="evaluate")[0].startswith(
        "ckpt=.: no last.ckpt in this folder"
    )


def test_a_checkpoint_that_is_not_there_is_told_as_early_as_a_misspelt_word(
    tmp_path: Path, monkeypatch
) -> None:
    missing = "ckpt=gone.ckpt: there is no such file; expected a .ckpt file or the folder of a run"
    assert faults("ckpt=gone.ckpt", "data.root=photos") == [missing]
    assert faults("ckpt=gone.ckpt", name="evaluate") == [missing]
    (tmp_path / "gone.ckpt").touch()
    monkeypatch.chdir(tmp_path)
    assert faults("ckpt=gone.ckpt", "data.root=photos") == []


def test_an_evaluations_changes_are_checked_against_the_runs_own_config(tmp_path: Path) -> None:
    """As early as the rest, where `config.yaml` lies in the run's folder."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        OmegaConf.save(compose("train", overrides=["data.root=photos"]), tmp_path / "config.yaml")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    wrong = ["data.val_rot=y", "trainer.devcs=2", "model.dtype=float33"]
    for place in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "last.ckpt"):
        told = faults(f"ckpt={place}", *wrong, name="evaluate")
        assert len(told) == 3
        assert any("data.val_rot: no such key" in line and "data.val_root" in line for line in told)
        assert any(line.endswith("nearest: trainer.devices") for line in told)
        assert any(line.startswith("model.dtype: expected one of") for line in told)
        assert faults(f"ckpt={place}", "data.val_root=y", "trainer.devices=2", name="evaluate") == []
    (tmp_path / "config.yaml").unlink()
    assert faults(f"ckpt={tmp_path}", *wrong, name="evaluate") == []


@pytest.mark.parametrize("script", ["train.py", "evaluate.py"])
def test_as_a_process_it_ends_with_2_and_has_not_imported_torch(script: str, tmp_path: Path) -> None:
    # PYTHONPROFILEIMPORTTIME is -X importtime: every import is listed on stderr.
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "paths.outputdir=x", "seeds_=1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "import time:" in line}
    assert "hydra" in modules, "the imports were not listed"
    assert not modules & {"torch", "lightning", "diffusers", "transformers", "peft", "numpy"}
    told = [line for line in done.stderr.splitlines() if "import time:" not in line]
    assert told[0].endswith("faults in the configuration:")
    assert any("paths.outputdir=x: no such key in paths; nearest: paths.output_dir" in line for line in told)
    assert not list(tmp_path.iterdir()), "a run folder was made for a run that never was"
