"""The DataModule: order over kills and resumes (contract 3), validation, prior, refusals."""

import json
import pickle
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from tiny_runs import shipped

from lit_sd.data.builders import folder
from lit_sd.data.class_images import PriorSource
from lit_sd.data.datamodule import SDDataModule
from lit_sd.data.folder import FolderSource

CONF = Path(__file__).parents[2] / "conf"


def write(path: Path, count: int, size: tuple[int, int] = (20, 24)) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        pixels = np.random.default_rng([count, i]).integers(0, 255, (*size, 3), np.uint8)
        Image.fromarray(pixels).save(path / f"{size[0]}x{size[1]}-{i:02d}.png")
    return path


def data(root: Path, **options) -> SDDataModule:
    small = {"root": root, "prompt": "x", "batch_size": 2, "resolution": 16, "num_workers": 0, "flip": True}
    return folder(**{**shipped(), **small, **options})


def test_all_ranks_and_epochs_share_one_plan_and_another_process_makes_its_own(tmp_path):
    datamodule = data(write(tmp_path / "in", 6), buckets=True, bucket_step=8)
    first, second = datamodule.batch_sampler(0, 2), datamodule.batch_sampler(1, 2)
    assert first.pools[0] is second.pools[0]
    batches = [[draw.image for draw in batch] for batch in first]
    sent = pickle.loads(pickle.dumps(datamodule))
    assert [[draw.image for draw in batch] for batch in sent.batch_sampler(0, 2)] == batches


def test_of_very_many_images_the_first_are_measured(tmp_path, monkeypatch):
    datamodule = data(write(tmp_path / "in", 6, (12, 24)))
    assert "6 images are smaller than data.resolution=16 and are scaled up" in datamodule.report()
    monkeypatch.setattr("lit_sd.data.source.MEASURED", 4)
    expected = "4 images of the first 4 are smaller than data.resolution=16 and are scaled up"
    assert expected in datamodule.report()


class Recorder(L.LightningModule):
    """Remembers of each training batch the ids and a pixel sum, which tells crops and flips apart."""

    def __init__(self, die_at: int | None = None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list = []
        self.validated: list = []
        self.die_at = die_at

    def training_step(self, batch, batch_idx):
        if self.die_at is not None and len(self.seen) == self.die_at:
            raise RuntimeError("killed")
        self.seen.append([*batch["ids"], round(float(batch["pixels"].double().sum()), 4)])
        return self.layer(batch["weight"].sum().view(1, 1)).sum()

    def validation_step(self, batch, batch_idx):
        self.validated += list(zip(batch["ids"], batch["weight"].tolist(), strict=True))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(datamodule, folder: Path, *, die_at=None, ckpt=None, **options) -> Recorder:
    module = Recorder(die_at)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        callbacks=[saver],
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if die_at is None:
            trainer.fit(module, datamodule, ckpt_path=ckpt, weights_only=True)
        else:
            with pytest.raises(RuntimeError, match="killed"):
                trainer.fit(module, datamodule, ckpt_path=ckpt, weights_only=True)
    return module


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_killed_within_an_epoch_goes_on_in_order(tmp_path, workers):
    """9 images in batches of 2: 4 steps an epoch, 12 in all. Killed after 3, 6 and, at a border, 8."""
    root, options = write(tmp_path / "images", 9), {"num_workers": workers}
    whole = fit(data(root, **options), tmp_path / "whole").seen
    assert len(whole) == 12
    assert len({batch[0] for batch in whole}) > 3
    pieces, ckpt, at = [], None, 0
    for until in (3, 6, 8, None):
        die_at = None if until is None else until - at
        run = fit(data(root, **options), tmp_path / "cut", die_at=die_at, ckpt=ckpt)
        pieces += run.seen
        at, ckpt = until, tmp_path / "cut" / f"step={until}.ckpt"
    assert pieces == whole


@pytest.mark.parametrize(
    "options",
    [{"buckets": True, "bucket_step": 8, "bucket_max_ratio": 3}, {"prior_weight": 0.5, "repeats": 2}],
)
def test_buckets_and_priors_go_on_in_order_too(tmp_path, options):
    root = write(tmp_path / "images", 5)
    write(root, 4, (32, 16))
    write(tmp_path / "images-prior", 3)
    if "prior_weight" in options:
        options |= {"class_prompt": "y", "num_class_images": 3}
    whole = fit(data(root, **options), tmp_path / "whole").seen
    first = fit(data(root, **options), tmp_path / "cut", die_at=5)
    rest = fit(data(root, **options), tmp_path / "cut", ckpt=tmp_path / "cut/step=5.ckpt")
    assert first.seen + rest.seen == whole


def test_runs_ended_by_max_steps_go_on_in_order(tmp_path):
    """Lightning counts an epoch that `max_steps` cuts as done; the data doesn't. 10 = 5 + 5 = 3 + 3 + 4."""
    root = write(tmp_path / "images", 9)
    whole = fit(data(root), tmp_path / "whole").seen[:10]
    for name, stops in (("two", (5, 10)), ("three", (3, 6, 10))):
        pieces, ckpt = [], None
        for stop in stops:
            pieces += fit(data(root), tmp_path / name, ckpt=ckpt, max_steps=stop).seen
            ckpt = tmp_path / name / f"step={stop}.ckpt"
        assert pieces == whole


def test_the_position_is_plain_data_and_counts_trained_batches(tmp_path):
    fit(data(write(tmp_path / "images", 9), num_workers=2), tmp_path / "run")
    states = {
        step: torch.load(tmp_path / f"run/step={step}.ckpt", weights_only=True)["SDDataModule"]
        for step in (1, 3, 4, 6)
    }
    assert {step: (state["epoch"], state["steps"]) for step, state in states.items()} == {
        1: (0, 1),
        3: (0, 3),
        4: (1, 0),
        6: (1, 2),
    }
    assert states[1]["order"]["batch"] == {"images": 2}


def test_other_data_within_an_epoch_is_refused_and_at_its_end_taken(tmp_path):
    root = write(tmp_path / "images", 9)
    fit(data(root), tmp_path / "run")
    with pytest.raises(ValueError, match=r"3 batches into epoch 0.*batch was .*2.*is .*3"):
        fit(data(root, batch_size=3), tmp_path / "other", ckpt=tmp_path / "run/step=3.ckpt")
    rest = fit(data(root, batch_size=3), tmp_path / "other", ckpt=tmp_path / "run/step=4.ckpt")
    assert len(rest.seen) == 2 * 3
    write(root, 10)
    with pytest.raises(ValueError, match="images was"):
        fit(data(root), tmp_path / "other", ckpt=tmp_path / "run/step=3.ckpt")


def test_the_global_random_streams_are_left_alone(tmp_path):
    datamodule = data(write(tmp_path / "images", 6))
    torch.manual_seed(1)
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert len(list(datamodule.train_dataloader())) == 3
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numbers).all()


def test_overfitting_repeats_the_same_batches(tmp_path):
    seen = fit(data(write(tmp_path / "images", 9)), tmp_path / "run", overfit_batches=1).seen
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


def test_loaders_that_are_made_anew_go_on(tmp_path):
    root = write(tmp_path / "images", 9)
    whole = fit(data(root), tmp_path / "whole").seen
    assert fit(data(root), tmp_path / "anew", reload_dataloaders_every_n_epochs=1).seen == whole


def test_limited_epochs_are_epochs(tmp_path):
    """Two of four batches each: epochs begin as they do in full; resuming after 3 goes on with the 4th."""
    root = write(tmp_path / "images", 9)
    whole = fit(data(root), tmp_path / "whole").seen
    limited = fit(data(root), tmp_path / "limited", limit_train_batches=2).seen
    assert limited == whole[0:2] + whole[4:6] + whole[8:10]
    rest = fit(data(root), tmp_path / "rest", limit_train_batches=2, ckpt=tmp_path / "limited/step=3.ckpt")
    assert rest.seen == limited[3:]


def test_validation_by_share_by_folder_or_none(tmp_path):
    root, other = write(tmp_path / "images", 9), write(tmp_path / "val", 3)
    shared = fit(data(root, val_share=0.3), tmp_path / "a", num_sanity_val_steps=0)
    trained = {name for batch in shared.seen for name in batch[:-1]}
    held = {name for name, _ in shared.validated}
    assert len(held) == 3  # 0.3 of 9 is 2.7
    assert len(shared.validated) == 3 * 3  # once in each of three epochs, in batches of two and one
    assert not trained & held
    assert sum(weight for _, weight in shared.validated) == pytest.approx(3 * 2)  # each batch weighs 1
    by_folder = fit(data(root, val_root=other), tmp_path / "b", num_sanity_val_steps=0)
    assert {name for name, _ in by_folder.validated} == {f"20x24-{i:02d}.png" for i in range(3)}
    assert fit(data(root), tmp_path / "c").validated == []
    with pytest.raises(ValueError, match=r"val_share=0\.3.*data\.val_root"):
        data(root, val_share=0.3, val_root=other)


def test_validation_images_are_the_same_each_time(tmp_path):
    datamodule = data(write(tmp_path / "images", 4), val_share=0.5)
    first, second = (torch.cat([batch["pixels"] for batch in datamodule.val_dataloader()]) for _ in range(2))
    assert torch.equal(first, second)


def test_too_few_images_are_refused_before_anything_else(tmp_path):
    datamodule = data(write(tmp_path / "images", 5), batch_size=8)
    with pytest.raises(ValueError, match="5 draws an epoch, but a step takes 8"):
        datamodule.check()
    with pytest.raises(ValueError, match="5 draws an epoch, but a step takes 6"):
        data(write(tmp_path / "images", 5), batch_size=3).check(world_size=2)


def test_dropped_images_are_named_in_report_and_log(tmp_path, caplog):
    root = write(tmp_path / "images", 4)
    write(root, 1, (32, 16))
    datamodule = data(root, buckets=True, bucket_step=8, bucket_max_ratio=3)
    datamodule.setup("fit")
    assert "never trained on: 32x16-00.png" in caplog.text
    assert any("never trained on: 32x16-00.png" in line for line in datamodule.report())


def test_the_report_counts_what_matters(tmp_path):
    write(tmp_path / "images", 5, (8, 8))
    datamodule = data(tmp_path / "images", repeats=3, val_share=0.2)
    datamodule.check()
    report = datamodule.report(world_size=2)
    assert "images: 4 images x 3 repeats, 2 in each batch" in report
    assert "an epoch has 3 steps of 4 images" in report
    assert "validation: 1 images" in report
    assert "5 images are smaller than data.resolution=16 and are scaled up" in report
    assert datamodule.captions() == ["x"] * 5


def test_dreambooth_asks_for_class_images_before_training(tmp_path):
    root = write(tmp_path / "subject", 5)
    datamodule = data(root, prior_weight=0.5, class_prompt="a photo of cat", num_class_images=6, batch_size=3)
    assert datamodule.prior_requests() == [(tmp_path / "subject-prior", "a photo of cat", 6)]
    datamodule.check()  # the class images may still be missing
    with pytest.raises(FileNotFoundError, match="0 of 6 class images"):
        datamodule.setup("fit")
    datamodule.before_setup = lambda: write(tmp_path / "subject-prior", 6)
    datamodule.setup("fit")
    batches = list(datamodule.train_dataloader())
    assert len(batches) == 6
    for batch in batches:
        assert batch["source"] == ["instance", "instance", "prior"]
        assert batch["captions"] == ["x", "x", "a photo of cat"]
        assert batch["weight"].tolist() == [0.5, 0.5, 0.5]
    assert data(root).prior_requests() == []


def test_class_images_that_were_made_again_are_read_again(tmp_path):
    """`check` has read the old ones, as `lit_sd.run.build` does; `before_setup` puts others there."""
    root, prior = write(tmp_path / "subject", 2), write(tmp_path / "subject-prior", 2)
    datamodule = data(root, prior_weight=1.0, class_prompt="y", num_class_images=2)
    datamodule.check()

    def made_again() -> None:
        for path in list(prior.iterdir()):
            path.rename(path.with_stem(f"new-{path.stem}"))

    datamodule.before_setup = made_again
    datamodule.setup("fit")
    names = [batch["ids"][1] for batch in datamodule.train_dataloader()]
    assert sorted(names) == ["new-20x24-00.png", "new-20x24-01.png"]


def test_dreambooth_without_class_prompt_or_with_mixed_folders(tmp_path):
    root = write(tmp_path / "subject", 5)
    with pytest.raises(ValueError, match=r"data\.class_prompt is not set"):
        data(root, prior_weight=1.0)
    for class_root in (root, root / "class", tmp_path):
        with pytest.raises(ValueError, match=r"data\.class_root=.*lie within one another"):
            data(root, prior_weight=1.0, class_prompt="y", num_class_images=1, class_root=class_root)


def test_several_concepts(tmp_path):
    def sources(second_root):
        return {
            "cat": FolderSource(write(tmp_path / "cat", 2), prompt="sks cat"),
            "dog": FolderSource(write(tmp_path / "dog", 3), prompt="sks dog"),
            "cats": PriorSource(tmp_path / "cats", "a cat", 2, weight=0.5),
            "dogs": PriorSource(tmp_path / second_root, "a dog", 2, weight=0.5),
        }

    plain = {"resolution": 16, "flip": False, "num_workers": 0, "decoded_mb": 0, "seed": 0}
    plain["shares"] = dict.fromkeys(("cat", "dog", "cats", "dogs"), 1)
    datamodule = SDDataModule(sources("dogs"), batch_size=4, **plain)
    assert [request.prompt for request in datamodule.prior_requests()] == ["a cat", "a dog"]
    for request in datamodule.prior_requests():
        write(request.folder, 2)
    for batch in datamodule.train_dataloader():
        assert batch["captions"] == ["sks cat", "sks dog", "a cat", "a dog"]
        assert batch["weight"].tolist() == [1, 1, 0.5, 0.5]
    with pytest.raises(ValueError, match="share the folder"):
        SDDataModule(sources("cats"), batch_size=4, **plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size"),
        ({"resolution": 100}, r"data\.resolution=100: expected a multiple of 8"),
        ({"resolution": None}, r"data\.resolution is not set"),
        ({"prior_weight": 1.0, "class_prompt": "y"}, r"data\.num_class_images=0: expected 1"),
        ({"buckets": True, "resolution": 96}, r"no multiple of data\.bucket_step=64"),
        ({"flip": 2.0}, r"data\.flip=2"),
        ({"val_share": 1.0}, r"data\.val_share=1"),
        ({"seed": -1}, "seed"),
        ({"prior_weight": -1.0}, r"data\.prior_weight=-1"),
    ],
)
def test_options_out_of_range(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        data(write(tmp_path / "images", 2), **options)


@pytest.mark.parametrize("name", ["folder", "dreambooth"])
def test_the_configs_make_a_datamodule(tmp_path, name):
    write(tmp_path / "images", 4)
    overrides = [f"+data={name}", "+seed=7", f"data.root={tmp_path}/images", "data.prompt=x"]
    overrides += ["data.num_workers=0", "data.resolution=16"]
    overrides += ["data.class_prompt=y"] if name == "dreambooth" else []
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose(overrides=overrides)
    datamodule = instantiate(cfg.data, _convert_="all")
    assert isinstance(datamodule, SDDataModule)
    assert datamodule.seed == 7
    assert len(datamodule.prior_requests()) == (name == "dreambooth")
    assert datamodule.batch_size == {"folder": 4, "dreambooth": 2}[name]


def test_an_unset_root_says_what_to_set():
    with initialize_config_dir(str(CONF), version_base=None):
        cfg = compose(overrides=["+data=folder", "+seed=0"])
    with pytest.raises(Exception, match=r"data\.root is not set; set data\.root=FOLDER"):
        instantiate(cfg.data, _convert_="all")


TWO_RANKS = """
    import json, sys
    from pathlib import Path
    sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/.."]
    from test_datamodule import Recorder, data, fit, write

    root, out = Path(sys.argv[2]), Path(sys.argv[3])

    def record(name, **options):
        class Kept(Recorder):
            def on_train_end(self):
                (out / f"{name}-{self.global_rank}.json").write_text(json.dumps(self.seen))
            def on_validation_epoch_end(self):
                (out / f"{name}-val-{self.global_rank}.json").write_text(json.dumps(self.validated))
        import test_datamodule
        test_datamodule.Recorder = Kept
        fit(data(root, num_workers=1, val_share=0.2), out / name, strategy="ddp_fork", devices=2,
        num_sanity_val_steps=0, **options)

    if __name__ == "__main__":
        record("whole")
        record("cut", max_steps=4)
        record("rest", ckpt=out / "cut" / "step=4.ckpt")
"""


def test_two_ranks_share_and_resume_exactly(tmp_path):
    """15 images less 3 held out, 2 on each of 2 ranks: 3 steps an epoch, 9 in all, cut after 4."""
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO_RANKS))
    write(tmp_path / "images", 15)
    command = [sys.executable, script, Path(__file__).parent, tmp_path / "images", tmp_path]
    subprocess.run(command, check=True, timeout=90, capture_output=True)

    def read(name):
        return [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]

    whole, cut, rest = read("whole"), read("cut"), read("rest")
    for rank in (0, 1):
        assert len(whole[rank]) == 9
        assert len(cut[rank]) == 4
        assert cut[rank] + rest[rank] == whole[rank]
    drawn = [name for rank in (0, 1) for batch in whole[rank][:3] for name in batch[:-1]]
    assert len(drawn) == len(set(drawn)) == 12
    validated = [entry for entries in read("whole-val") for entry in entries]
    assert len([weight for _, weight in validated if weight]) == 3 * 3  # three epochs, each image once
