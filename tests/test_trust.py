"""What a checkpoint's config may build: everything that shipped configs name, and nothing that runs code."""

import re
from pathlib import Path

import pytest

from lit_sd.trust import foreign, is_trusted, targets

CONF = Path(__file__).resolve().parents[1] / "conf"
SHIPPED = sorted(
    {t for path in CONF.rglob("*.yaml") for t in re.findall(r"_target_: (\S+)", path.read_text())}
)


@pytest.mark.parametrize("target", SHIPPED)
def test_every_shipped_target_is_trusted(target: str) -> None:
    assert is_trusted(target)


@pytest.mark.parametrize(
    "target", ["torch.optim.SGD", "lightning.Trainer", "lightning.pytorch.callbacks.EarlyStopping"]
)
def test_so_are_torchs_optimizers_and_lightnings_parts(target: str) -> None:
    assert is_trusted(target)


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "lightning.pytorch.os.system",  # a module's import of another
        "torch.optim.adamw.torch.load",
        "lit_sd.callbacks.export.Path",
        "lit_sd.run.instantiate",  # not of an allowed module
        "lit_sd.run.OmegaConf.create",
        "lit_sd.objectives.partial",  # imported, not defined there
        "lit_sd.models.loading.DiffusionPipeline.from_pretrained",
        "lit_sd.callbacks.checkpoint.replace_by_link",  # a function that writes
        "lit_sd.callbacks.Checkpoints.save",  # a method
        "lit_sd.callbacks.Plan.__init__.__globals__",
        "lit_sd.objectives.no_such_thing",
        "no_such_package.Thing",
        "math.sqrt",  # no source
        "${oc.env:HOME}",
        "",
    ],
)
def test_nothing_else_is(target: str) -> None:
    assert not is_trusted(target)


def test_targets_are_found_at_any_depth() -> None:
    nested = {
        "a": [{"_target_": "x.y", "b": {"_target_": "z"}}],
        "c": {"d": None},
        "e": (1, {"_target_": "t"}),
    }
    assert targets(nested) == {"x.y", "z", "t"}


def test_interpolations_are_foreign_wherever_they_stand() -> None:
    assert foreign({"a": [1, "${oc.create:x}"], "b": "plain", "c": {"_target_": "os.system"}}) == [
        "${oc.create:x}",
        "os.system",
    ]
    assert foreign({"_target_": "torch.optim.AdamW", "lr": 0.1}) == []


@pytest.mark.parametrize("root", ["pipe:touch x", ["a.tar", "pipe:touch x"], "a.tar::pipe:touch x"])
def test_a_checkpoint_may_not_run_a_command(root) -> None:
    config = {"data": {"_target_": "lit_sd.data.builders.webdataset", "root": root}}
    assert len(foreign(config)) == 1


@pytest.mark.parametrize(
    "name", ["shards.writer.ShardWriter", "packed.lmdb_writer.LmdbWriter", "folder_writer.FolderWriter"]
)
def test_what_writes_is_not_trusted(name: str) -> None:
    assert not is_trusted(f"lit_sd.data.{name}")
