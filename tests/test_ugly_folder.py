"""All the ugly files at once: cleaned, packed to all three forms, trained on with equal losses (F01–F05)."""

from pathlib import Path

import numpy as np
import pytest
from tiny_runs import FewWeights, Snapshots, assert_same, images, module_of, trainer_of
from typer.testing import CliRunner
from ugly_folder import BAD, CAPTIONS, GOOD, write_ugly

from lit_sd.cli import app
from lit_sd.data.datamodule import SDDataModule
from lit_sd.data.folder import FolderSource
from lit_sd.data.lmdb import LmdbSource
from lit_sd.data.source import Source
from lit_sd.data.webdataset import ShardSource

KINDS = {"folder": FolderSource, "lmdb": LmdbSource, "webdataset": ShardSource}


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ugly")
    ugly = write_ugly(root / "ugly")
    before = {path: path.read_bytes() for path in sorted(ugly.rglob("*")) if path.is_file()}
    for kind in KINDS:
        words = ["prepare", str(ugly), str(root / kind), "--to", kind, "--min-side", "16", "--workers", "0"]
        done = CliRunner().invoke(app, [*words, "--off", "blank"])
        assert done.exit_code == 0, done.output
        assert f"kept {len(GOOD)}, refused {len(BAD)}" in done.output
    assert {path: path.read_bytes() for path in before} == before  # nothing of the input is touched
    return root


def source_of(kind: str, root: Path) -> Source:
    return KINDS[kind](str(root / kind))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_good_is_packed_as_it_was(packed, kind):
    source = source_of(kind, packed)
    source.check()
    assert tuple(source.ids()) == GOOD
    for index, name in enumerate(GOOD):
        record = source.record(index)
        assert record.image == (packed / "ugly" / name).read_bytes()
        assert record.captions[0].text == CAPTIONS.get(name, f"picture of {name}")
        image = source.load(index).image
        assert image.dtype == np.uint8
        assert image.shape == (*source.sizes(index, index + 1)[0], 3)
    turned = source.load(GOOD.index("turned.jpg")).image
    assert turned.shape == (60, 20, 3)
    assert turned[5].mean(0).argmax() == 0  # red came to stand above
    assert source.load(GOOD.index("rgba.png")).image.min() == 255  # white under transparency


def test_a_run_of_the_folder_as_it_is_names_every_bad_file(packed):
    with pytest.raises(ValueError, match="image files can't be read") as error:
        images(packed / "ugly", bad_captions="latin-1").check()
    for name in BAD:
        assert name in str(error.value)
    for name in GOOD:
        assert name not in str(error.value)


def trained(tmp_path: Path, model, source: Source) -> tuple[list, list]:
    snapshots = Snapshots()
    data = SDDataModule(
        {"images": source},
        batch_size=2,
        resolution=32,
        flip=True,
        num_workers=0,
        decoded_mb=0,
        seed=1,
        shuffle_shards=8,
    )
    trainer_of(tmp_path, snapshots, max_steps=4).fit(module_of(model, FewWeights()), data)
    return snapshots.seen, list(snapshots.steps.values())


def test_it_trains_alike_from_all_three_forms(packed, tmp_path, tiny_model):
    expected = trained(tmp_path, tiny_model("sd15"), source_of("folder", packed))
    assert len(expected[0]) == 4
    for kind in ("lmdb", "webdataset"):
        assert_same(trained(tmp_path, tiny_model("sd15"), source_of(kind, packed)), expected, kind)
