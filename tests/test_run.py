"""From a config to a trained run: paths, seeds, order of checks, sweeps on several processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from finished_run import ROOT, composed, made_run, photos, tiny  # noqa: F401
from omegaconf import OmegaConf, open_dict

from lit_sd import prior, settled
from lit_sd import run as running
from lit_sd.callbacks import Checkpoints, Interrupted
from lit_sd.config import ConfigError
from lit_sd.places import checkpoint_in
from lit_sd.run import build, fit, prepare, rebuild, train
from lit_sd.settled import settle
from lit_sd.trainable import read_checkpoint


def test_a_run_leaves_pictures_a_checkpoint_an_export_and_its_config(finished_run: Path) -> None:
    names = {path.relative_to(finished_run).as_posix() for path in finished_run.rglob("*") if path.is_file()}
    assert "samples/step_000002.png" in names
    assert "checkpoints/last.ckpt" in names
    assert "export/pytorch_lora_weights.safetensors" in names


def test_the_checkpoint_holds_the_resolved_config_as_plain_data(finished_run: Path) -> None:
    config = read_checkpoint(finished_run / "checkpoints" / "last.ckpt")["config"]
    assert type(config) is dict
    assert config["data"]["prompt"] == "a photo of sks cat"
    assert config["data"]["resolution"] == 64, "null was to become the model's own size"
    assert config["paths"]["output_dir"] == str(finished_run)
    assert "${" not in str(config)


def test_relative_paths_count_from_the_launch_folder(tmp_path: Path, monkeypatch, tiny_model_dir) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(tiny_model_dir("sd15"))
    cfg = settle(composed(*tiny("model", "photos", "out"), "data.class_root=elsewhere"))
    assert cfg.data.root == str(tmp_path / "photos")
    assert cfg.data.class_root == str(tmp_path / "elsewhere")
    assert cfg.model.path == str(tmp_path / "model")
    assert cfg.paths.output_dir == str(tmp_path / "out")
    assert cfg.callbacks.checkpoint.folder == str(tmp_path / "out" / "checkpoints")


def test_a_hub_name_stays_a_name(monkeypatch) -> None:
    monkeypatch.setattr(settled, "native_size", lambda *_: 512)
    assert (
        settle(composed("model=sd15", "data.root=x")).model.path
        == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    )


def test_shipped_names_stay_names_whatever_lies_in_the_launch_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("openmoji", "sdxl"):
        (tmp_path / name).mkdir()
    asked = ("data.root=x", "data.resolution=64")
    cfg = settle(composed(*asked, "model.architecture=sdxl"))
    assert (cfg.model.path, cfg.model.architecture) == ("openmoji", "sdxl")
    cfg = settle(composed(*asked, "model.path=./openmoji", "model.architecture=./sdxl"))
    assert (cfg.model.path, cfg.model.architecture) == (str(tmp_path / "openmoji"), str(tmp_path / "sdxl"))


def test_settling_refuses_faults_and_does_not_change_what_it_was_given() -> None:
    cfg = composed("data.root=x")
    before = OmegaConf.to_container(cfg, resolve=False)
    with open_dict(cfg):
        cfg.trainer.max_stepz = 1
    with pytest.raises(ConfigError, match="max_stepz"):
        settle(cfg)
    del cfg.trainer.max_stepz
    assert OmegaConf.to_container(cfg, resolve=False) == before


def test_a_wrong_folder_is_told_before_a_model_loads(tmp_path: Path, monkeypatch, tiny_model_dir) -> None:
    loaded = []
    real = running.build_module
    monkeypatch.setattr(running, "build_module", lambda cfg: loaded.append(1) or real(cfg))
    cfg = settle(composed(*tiny(tiny_model_dir("sd15"), tmp_path / "none", tmp_path / "out")))
    with pytest.raises(FileNotFoundError, match=r"data\.root"):
        build(cfg)
    assert not loaded


def test_callbacks_are_built_before_the_model_too(tmp_path: Path, monkeypatch, tiny_model_dir) -> None:
    monkeypatch.setattr(running, "build_module", lambda cfg: pytest.fail("the model was loaded"))
    small = tiny(tiny_model_dir("sd15"), photos(tmp_path / "photos"), tmp_path / "out")
    for wrong, told in (("callbacks.checkpoint.keep=-5", "keep=-5"), ("trainer.strategy=ddq", "ddq")):
        with pytest.raises(ValueError, match=told):
            build(settle(composed(*small, wrong)))


@pytest.mark.parametrize(
    ("chosen", "count"), [([], 1), (["callbacks.checkpoint=null"], 0), (["debug=fdr"], 0)]
)
def test_lightning_adds_no_checkpoints_of_its_own(tmp_path: Path, tiny_model_dir, chosen, count) -> None:
    small = tiny(tiny_model_dir("sd15"), photos(tmp_path / "photos"), tmp_path / "out")
    small = [text for text in small if not text.startswith("callbacks.samples.")]  # fdr has none
    trainer = build(settle(composed(*small, "strategy=lora", *chosen))).trainer
    assert len(trainer.checkpoint_callbacks) == count
    assert all(isinstance(callback, Checkpoints) for callback in trainer.checkpoint_callbacks)


def test_the_shortest_run_writes_nothing_but_its_log(tmp_path: Path, tiny_model_dir) -> None:
    """debug=fdr says so."""
    small = tiny(tiny_model_dir("sd15"), photos(tmp_path / "photos"), tmp_path / "out")
    small = [text for text in small if not text.startswith("callbacks.samples.")]
    train(composed(*small, "strategy=lora", "data.val_share=0.3", "debug=fdr"))
    names = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names <= {"plan.txt"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def test_seed_0_is_a_seed_like_any_other(tmp_path: Path, tiny_model_dir) -> None:
    root = photos(tmp_path / "photos")
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        small = tiny(tiny_model_dir("sd15"), root, tmp_path / name, steps=1)
        torch.manual_seed(len(found))  # what was drawn before must not matter
        train(
            composed("strategy=lora", *small, "data.prompt=a cat", f"seed={seed}", "callbacks.samples=null")
        )
        found.append(weights(tmp_path / name))
    first, again, other = found
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "lora_A" in name]
    assert drawn
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_resuming_from_a_runs_folder_goes_on_where_it_was(
    finished_run: Path, tmp_path: Path, tiny_model_dir
) -> None:
    config = read_checkpoint(finished_run / "checkpoints" / "last.ckpt")["config"]
    small = tiny(tiny_model_dir("sd15"), config["data"]["root"], tmp_path / "on", steps=3)
    asked = ["strategy=lora", "callbacks=ema", *small, "data.prompt=a photo of sks cat"]
    metrics = train(composed(*asked, f"ckpt={finished_run}"))
    assert read_checkpoint(tmp_path / "on" / "checkpoints" / "last.ckpt")["global_step"] == 3
    assert metrics["train/loss"] > 0


def test_ctrl_c_before_training_ends_with_130_too(tmp_path: Path, tiny_model_dir) -> None:
    small = tiny(tiny_model_dir("sd15"), photos(tmp_path / "photos"), tmp_path / "out")
    run = prepare(composed("strategy=lora", *small))

    def interrupted() -> None:
        raise KeyboardInterrupt

    run.datamodule.before_setup = interrupted  # where class images are drawn
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(Interrupted) as stop:
            fit(run)
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning leaves it ignored
    assert stop.value.code == 130


def test_a_run_that_has_done_all_of_its_updates_is_not_resumed(
    finished_run: Path, tmp_path: Path, tiny_model_dir
) -> None:
    small = tiny(tiny_model_dir("sd15"), photos(tmp_path / "photos"), tmp_path / "on", steps=2)
    with pytest.raises(
        ConfigError, match=r"2 updates behind it, so with trainer\.max_steps=2 nothing is left"
    ):
        prepare(composed("strategy=lora", *small, f"ckpt={finished_run}"))


def test_the_checkpoint_of_a_folder(tmp_path: Path, finished_run: Path) -> None:
    last = finished_run / "checkpoints" / "last.ckpt"
    assert checkpoint_in(finished_run) == checkpoint_in(last.parent) == checkpoint_in(last) == last
    with pytest.raises(ConfigError, match="no such file"):
        checkpoint_in(tmp_path / "none")
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        checkpoint_in(tmp_path)
    (tmp_path / "step_000004.ckpt").touch()
    with pytest.raises(ConfigError, match=r"it holds step_000004\.ckpt"):
        checkpoint_in(tmp_path)


def test_rebuilding_gives_the_trained_weights_or_their_average(finished_run: Path) -> None:
    path = finished_run / "checkpoints" / "last.ckpt"
    stored = read_checkpoint(path)
    raw, averaged = (rebuild(path, averaged=flag).module.state_dict() for flag in (False, True))
    for name, tensor in stored["state_dict"].items():
        assert torch.equal(raw[name], tensor)
        assert torch.equal(averaged[name], stored["ema"]["average"][name])


def test_a_checkpoints_config_may_not_call_just_anything(finished_run: Path, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(finished_run / "checkpoints" / "last.ckpt")
    checkpoint["config"]["callbacks"]["plan"] = {"_target_": "os.system", "command": "true"}
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    with pytest.raises(ConfigError, match=r"os\.system; if you trust its author"):
        rebuild(tmp_path / "foreign.ckpt")
    assert rebuild(tmp_path / "foreign.ckpt", trust=True).module is not None


@pytest.mark.parametrize(
    "hidden",
    [
        {"_target_": "lightning.pytorch.os.system", "command": "touch RAN"},
        {
            "_target_": "lit_sd.run.instantiate",
            "config": {"_target_": "lit_sd.run.OmegaConf.create", "obj": "_target_: os.mkdir\npath: RAN"},
        },
        "${oc.create:'_target_: os.mkdir\npath: RAN'}",
    ],
    ids=["through a module", "in a text", "in an interpolation"],
)
def test_a_checkpoints_config_runs_nothing_hidden_in_it(finished_run: Path, tmp_path: Path, hidden) -> None:
    """The first two pass a check of how the name begins."""
    checkpoint = read_checkpoint(finished_run / "checkpoints" / "last.ckpt")
    ran = tmp_path / "ran"
    checkpoint["config"]["objective"]["weighting"] = json.loads(json.dumps(hidden).replace("RAN", str(ran)))
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    with pytest.raises(ConfigError, match="if you trust its author"):
        rebuild(tmp_path / "foreign.ckpt")
    assert not ran.exists()


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n" + bytes(99), b"PK\x03\x04 cut short"])
def test_another_kind_of_file_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    """In our words: torch would advise to load it without its safety."""
    (tmp_path / "other.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.ckpt can't be read as a checkpoint") as error:
        read_checkpoint(tmp_path / "other.ckpt")
    assert "weights_only" not in str(error.value)


def test_what_lightning_calls_a_misconfiguration_is_a_wrong_value(tmp_path: Path, tiny_model_dir) -> None:
    small = tiny(tiny_model_dir("sd15"), photos(tmp_path / "photos"), tmp_path / "out", steps=-3)
    with pytest.raises(ValueError, match="max_steps"):
        prepare(composed("strategy=lora", *small))


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ConfigError, match="holds no config"):
        rebuild(tmp_path / "other.ckpt")


def class_images(folder: Path) -> dict[str, int]:
    """Class images by name, and when they were made."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cat-prior").glob("*.png")}


def test_dreambooth_makes_the_missing_class_images_first(tmp_path: Path, tiny_model_dir, capsys) -> None:
    root, out = photos(tmp_path / "cat"), tmp_path / "out"
    asked = [
        "strategy=dreambooth",
        *tiny(tiny_model_dir("sd15"), root, out, steps=1),
        "callbacks.samples=null",
    ]
    asked += ["data.prompt=a photo of sks cat", "data.class_prompt=a photo of cat", "data.num_class_images=3"]
    asked += ["data.prior_sampling={steps: 1, guidance: 1.0}"]
    train(composed(*asked))
    assert capsys.readouterr().out.count("images per update") == 2, "the plan was to be told first"
    made = class_images(tmp_path)
    assert len(made) == 3
    train(composed(*asked, "data.num_class_images=4"))
    now = class_images(tmp_path)
    assert len(now) == 4
    assert made.items() <= now.items(), "images that were there were made again"
    smaller = "data.prior_sampling={steps: 1, guidance: 1.0, batch_size: 1}"
    train(composed(*asked, "data.num_class_images=4", smaller))
    assert class_images(tmp_path) == now, "how many are drawn at once does not change them"
    assert capsys.readouterr().out.count("images per update") == 3  # one image was missing, then none
    train(composed(*asked, "data.num_class_images=4", "model.prediction=v_prediction"))
    again = class_images(tmp_path)
    assert again.keys() == now.keys()
    assert all(again[name] > time for name, time in now.items()), "another prediction draws other pictures"


def test_class_images_that_another_prompt_replaced_are_those_that_train(
    tmp_path: Path, tiny_model_dir, monkeypatch
) -> None:
    """With first tries refused, the second prompt's images get other names than those that `build` saw."""
    small = tiny(tiny_model_dir("sd15"), photos(tmp_path / "cat"), tmp_path / "out", steps=2)
    asked = ["strategy=dreambooth_lora", *small, "callbacks.samples=null", "data.num_class_images=2"]
    asked += ["data.prompt=a photo of sks cat", "data.prior_sampling={steps: 1, guidance: 1.0}"]
    train(composed(*asked, "data.class_prompt=a photo of cat"))
    assert sorted(class_images(tmp_path)) == ["prior-000000000000.png", "prior-000000000001.png"]
    verdicts = iter([False, False, True, True])
    monkeypatch.setattr(prior, "is_not_black", lambda image: next(verdicts))
    train(composed(*asked, "data.class_prompt=a cat"))  # a loader that wants the old files would fail
    assert sorted(class_images(tmp_path)) == ["prior-000001000003.png", "prior-000001000004.png"]


def test_a_sweep_on_two_processes_leaves_two_folders_and_reads_relative_paths(
    tmp_path: Path, tiny_model_dir
) -> None:
    photos(tmp_path / "photos")
    asked = [
        *tiny(tiny_model_dir("sd15"), "photos", "unused", steps=1),
        "data.prompt=a cat",
        "data.batch_size=1",
    ]
    asked = [text for text in asked if not text.startswith(("paths.", "callbacks."))]
    asked += ["callbacks.samples=null", "trainer.devices=2", "trainer.strategy=ddp", "strategy=lora"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "-m", "seed=1,2", *asked],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (sweep,) = (tmp_path / "logs" / "train" / "multiruns").iterdir()
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1"]
    assert not (tmp_path / "logs" / "train" / "runs").exists(), "a rank made a run of its own"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "photos"]
    for job, seed in (("0", 1), ("1", 2)):
        config = read_checkpoint(sweep / job / "checkpoints" / "last.ckpt")["config"]
        assert config["seed"] == seed
        assert config["data"]["root"] == str(tmp_path / "photos")
        assert config["paths"]["output_dir"] == str(sweep / job)
