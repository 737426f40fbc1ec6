"""The same examples from a folder, LMDB, shards and a hub's dataset: one order, exact resume, equal losses
(contract 3, F13, F14).
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import FewWeights, Snapshots, assert_same, module_of, trainer_of

from lit_sd.data.caption_rules import CaptionRule
from lit_sd.data.datamodule import SDDataModule
from lit_sd.data.folder import FolderSource
from lit_sd.data.hub import HubSource
from lit_sd.data.lmdb import LmdbSource, LmdbWriter
from lit_sd.data.loading import load_batches
from lit_sd.data.source import Source
from lit_sd.data.webdataset import ShardSource, ShardWriter

KINDS = ("folder", "lmdb", "webdataset", "hub", "streamed")
COUNT = 23


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """23 pictures of two shapes with tags, as a folder and packed."""
    root = tmp_path_factory.mktemp("every_kind")
    (root / "folder" / "deep").mkdir(parents=True)
    for i in range(COUNT):
        height, width = (24, 40) if i % 3 else (32, 32)
        pixels = np.random.default_rng(i).integers(0, 255, (height, width, 3), np.uint8)
        path = root / "folder" / ("deep" if i % 2 else "") / f"{i:02}.png"
        Image.fromarray(pixels).save(path)
        path.with_suffix(".txt").write_text(f"number {i}, red, green, blue")
    source = FolderSource(root / "folder")
    source.check()
    with LmdbWriter(root / "lmdb") as lmdb, ShardWriter(root / "webdataset", shard_size=7) as shards:
        for i, size in enumerate(source.sizes()):
            for writer in (lmdb, shards):
                writer.write(source.record(i), tuple(size.tolist()))
    as_dataset(source, root / "hub")
    return root


def as_dataset(source: Source, root: Path) -> None:
    """Parquet files of 7 rows, as a hub keeps them."""
    import datasets

    records = [source.record(i) for i in range(len(source))]
    rows = {
        "id": [record.id for record in records],
        "image": [{"bytes": record.image, "path": None} for record in records],
        "text": [record.captions[0].text for record in records],
    }
    features = datasets.Features(
        {"id": datasets.Value("string"), "image": datasets.Image(), "text": datasets.Value("string")}
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    (root / "data").mkdir(parents=True)
    for number, start in enumerate(range(0, COUNT, 7)):
        part = made.select(range(start, min(COUNT, start + 7)))
        part.to_parquet(root / "data" / f"train-{number:05}-of-00004.parquet")


def source_of(kind: str, root: Path, **options) -> Source:
    match kind:
        case "folder":
            return FolderSource(root / "folder", **options)
        case "lmdb":
            return LmdbSource(root / "lmdb", **options)
        case "webdataset":
            return ShardSource(str(root / "webdataset"), **options)
        case _:
            streaming = kind == "streamed"
            return HubSource(
                str(root / "hub"),
                id_column="id",
                streaming=streaming,
                cache_dir=str(root / f"cache-{kind}"),
                **options,
            )


def data_of(source: Source, **options) -> SDDataModule:
    defaults = {
        "batch_size": 2,
        "resolution": 32,
        "flip": True,
        "num_workers": 0,
        "decoded_mb": 0,
        "seed": 5,
        "buckets": True,
        "bucket_step": 8,
        "bucket_max_ratio": 2.0,
    }
    return SDDataModule({"images": source}, **{**defaults, **options})


def contents(batch: dict) -> tuple:
    """What tells a batch apart: names, captions, crops, pixels."""
    return (
        batch["ids"],
        batch["captions"],
        batch["crop_top_left"].tolist(),
        batch["original_size"].tolist(),
        batch["pixels"].numpy().tobytes(),
    )


def batches(source: Source, *, rank=0, world_size=1, epoch=0, skip=0, **options) -> list[tuple]:
    """What one rank is given from a place in an epoch on."""
    data = data_of(source, **options)
    data.check(world_size)
    loader = data.train_dataloader()
    sampler = data.batch_sampler(rank, world_size)
    sampler.set_epoch(epoch, skip)
    loader = load_batches(
        loader.dataset, sampler, {"images": 1.0}, {"images": "images"}, num_workers=data.num_workers, seed=5
    )
    return [contents(batch) for batch in loader]


TAGS = CaptionRule(shuffle_tags=True, keep_tags=1, tag_dropout=0.3)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_every_kind_gives_the_same_batches_in_the_same_order(packed, kind):
    options = {"shuffle_shards": None if kind == "streamed" else 8, "epoch": 2}  # 8 is what ships
    expected = batches(source_of("folder", packed, rule=TAGS, repeats=2), **options)
    assert len(expected) == 8 + 15  # of 8 and 15 pictures, twice, in steps of 2
    assert batches(source_of(kind, packed, rule=TAGS, repeats=2), **options) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_resumed_in_mid_epoch_it_goes_on_as_if_it_had_not_stopped(packed, kind, world_size):
    """With buckets, repeats, tags and shards mixed two at a time."""
    make = lambda: source_of(kind, packed, rule=TAGS, repeats=3)  # noqa: E731
    drawn = []
    for rank in range(world_size):
        place = {"rank": rank, "world_size": world_size, "shuffle_shards": 2, "epoch": 1}
        whole = batches(make(), **place)
        for skip in (1, 5, len(whole) - 1):
            assert batches(make(), skip=skip, **place) == whole[skip:]
        drawn += [name for batch in whole for name in batch[0]]
    counts = [drawn.count(name) for name in set(drawn)]
    # 24 draws of the squares and 45 of the others, in whole steps of 2 and 4: none too often, few missing.
    assert max(counts) <= 3
    assert len(drawn) == {1: 24 + 44, 2: 24 + 44}[world_size]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(packed, kind, workers):
    if kind != "folder" and workers == 3:
        pytest.skip("three workers are tried on folders, for the time that starting them takes")
    make = lambda: source_of(kind, packed, rule=TAGS)  # noqa: E731
    alone = batches(make(), shuffle_shards=2, skip=3)
    assert batches(make(), shuffle_shards=2, skip=3, num_workers=workers) == alone


def losses(tmp_path: Path, model, source: Source) -> tuple[list, list]:
    module = module_of(model, FewWeights())
    snapshots = Snapshots()
    trainer = trainer_of(tmp_path, snapshots, max_steps=4)
    trainer.fit(module, data_of(source, shuffle_shards=None))
    return snapshots.seen, [snapshots.steps[step]["weights"] for step in sorted(snapshots.steps)]


def test_training_is_the_same_from_every_kind(packed, tmp_path, tiny_model):
    """Step by step, bit for bit."""
    expected = losses(tmp_path, tiny_model("sd15"), source_of("folder", packed))
    assert len(expected[0]) == 4
    for kind in KINDS[1:]:
        assert_same(losses(tmp_path, tiny_model("sd15"), source_of(kind, packed)), expected, kind)


def test_one_shard_serves_more_workers_and_ranks_than_there_are_shards(packed, tmp_path):
    """F13: one shard of 23, two ranks of four workers: every example once, no worker empty, no hang."""
    source = source_of("folder", packed)
    source.check()
    with ShardWriter(tmp_path / "one", shard_size=100) as shards:
        for i, size in enumerate(source.sizes()):
            shards.write(source.record(i), tuple(size.tolist()))
    found = [
        batches(
            ShardSource(str(tmp_path / "one")),
            rank=rank,
            world_size=2,
            batch_size=1,
            num_workers=4,
            buckets=False,
            bucket_step=8,
        )
        for rank in range(2)
    ]
    assert [len(of_rank) for of_rank in found] == [11, 11]
    names = list(itertools.chain.from_iterable(batch[0] for of_rank in found for batch in of_rank))
    assert len(set(names)) == 22


@pytest.mark.parametrize(("workers", "world_size"), itertools.product((0, 2), (1, 2)))
def test_length_is_defined_once(packed, workers, world_size):
    """F14: len(loader) is what comes, equal on each rank, whatever the workers do; 23 // (2 * ranks)."""
    for rank in range(world_size):
        data = data_of(source_of("webdataset", packed), buckets=False, num_workers=workers, shuffle_shards=1)
        data.check()
        sampler = data.batch_sampler(rank, world_size)
        loader = load_batches(
            data.train_dataloader().dataset,
            sampler,
            {"images": 1.0},
            {"images": "images"},
            num_workers=workers,
            seed=0,
        )
        assert len(loader) == len(list(loader)) == 23 // (2 * world_size)


def test_moved_weights_are_kept(packed):
    """The mean of a batch's losses does not depend on the kind: weights are one over the batch."""
    data = data_of(source_of("lmdb", packed))
    data.check()
    for batch in data.train_dataloader():
        assert torch.equal(batch["weight"], torch.tensor([0.5, 0.5]))
