"""Hugging Face datasets, local and streamed: the same examples either way, and faults in a sentence."""

import io
import json
import logging
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Value
from PIL import Image
from tiny_hub import CAPTIONS, IMAGE, cells, keep_caches_in, opened, parquet, png, saved, size

from lit_sd.data import hub_rows, hub_shards
from lit_sd.data.caption_rules import Caption
from lit_sd.data.hub import HubSource
from lit_sd.data.hub_columns import Columns
from lit_sd.data.hub_rows import Facts
from lit_sd.data.source import content_digest


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    keep_caches_in(tmp_path, monkeypatch)


@pytest.mark.parametrize("kind", ["saved", "saved splits", "parquet", "streamed parquet", "image folder"])
def test_every_kind_gives_the_same_examples(tmp_path, kind):
    streaming = kind == "streamed parquet"
    match kind:
        case "saved":
            root = saved(tmp_path / "in")
        case "saved splits":
            root = tmp_path / "in"
            features = Features({"image": IMAGE, "text": Value("string")})
            whole = Dataset.from_dict(cells(range(9)), features=features)
            DatasetDict({"train": whole, "val": whole.select([0])}).save_to_disk(root)
        case "image folder":
            root = tmp_path / "in"
            root.mkdir()
            for i in range(9):
                (root / f"{i}.png").write_bytes(png(i))
            lines = (json.dumps({"file_name": f"{i}.png", "text": CAPTIONS[i]}) for i in range(9))
            (root / "metadata.jsonl").write_text("\n".join(lines))
        case _:
            root = parquet(tmp_path / "in")
    source = opened(root, tmp_path, streaming)
    assert len(source) == 9
    assert list(source.ids()) == [f"{i:09d}" for i in range(9)]
    assert source.sizes().tolist() == [list(size(i)) for i in range(9)]
    assert source.sizes(2, 4).tolist() == [[10, 18], [11, 17]]
    assert source.captions() == CAPTIONS[: 3 if streaming else 9]
    assert source.draw_weights() is None
    assert source.blocks().tolist() == ([0, 3, 5, 9] if streaming else [0, 9])
    for i in (8, 0, 4):
        record = source.record(i)
        assert (record.id, record.image, record.suffix) == (f"{i:09d}", png(i), ".png")
        assert record.captions == (Caption(CAPTIONS[i]),)
        assert source.digest(i) == record.digest
    assert np.array_equal(np.asarray(source.load(7).image), np.asarray(Image.open(io.BytesIO(png(7)))))
    assert source.notes == []


def test_streamed_or_not_it_is_the_same(tmp_path):
    root = parquet(tmp_path / "in")
    whole, streamed = opened(root, tmp_path), opened(root, tmp_path, True)
    assert [streamed.record(i) for i in range(9)] == [whole.record(i) for i in range(9)]
    assert streamed.identity() == whole.identity()
    fewer = opened(parquet(tmp_path / "fewer", (3, 2, 3)), tmp_path)
    assert fewer.identity() != whole.identity()


def test_a_prompt_needs_no_caption_column(tmp_path):
    root = saved(tmp_path / "in")
    source = opened(root, tmp_path, caption_column="absent", prompt="p")
    assert source.captions() == ["p"] * 9
    for options in ({}, {"missing_captions": "prompt"}):
        source = opened(root, tmp_path, caption_column=None, prompt="p", **options)
        assert source.record(4).captions == (Caption("p"),)
    with pytest.raises(ValueError, match=r"data\.caption_column is not set"):
        HubSource(root, caption_column=None)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("root", "split", "error", "message"),
    [
        (
            "nobody/nothing",
            "train",
            OSError,
            r"root=nobody/nothing.* can be opened: Couldn't reach .*network",
        ),
        ("/no/such/folder", "train", FileNotFoundError, r"data\.root=/no/such/folder"),
        ("in", "test", ValueError, r"split test: no dataset can be opened: .*train"),
        ("saved", "test", ValueError, r"there is no split test; there is train"),
        ("empty", "train", FileNotFoundError, r"no dataset can be opened"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(tmp_path, streaming, root, split, error, message):
    parquet(tmp_path / "in", (1,))
    (tmp_path / "empty").mkdir()
    DatasetDict({"train": Dataset.from_dict({"a": [1]})}).save_to_disk(tmp_path / "saved")
    root = tmp_path / root if (tmp_path / root).exists() else root
    with pytest.raises(error, match=message) as caught:
        opened(root, tmp_path, streaming, split=split).check()
    assert "\n" not in str(caught.value)


def test_options_out_of_range():
    with pytest.raises(ValueError, match=r"data\.root is not set"):
        HubSource(" ")
    with pytest.raises(ValueError, match=r"data\.cache_gb=0"):
        HubSource("a/b", cache_gb=0)


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_images_and_missing_captions_by_policy(tmp_path, streaming):
    broken = {2: {"bytes": b"no image", "path": None}, 3: None}
    root = parquet(
        tmp_path / "in",
        image=lambda i: broken.get(i, {"bytes": png(i), "path": None}),
        text=lambda i: None if i == 0 else " " if i == 8 else CAPTIONS[i],
    )
    with pytest.raises(ValueError, match=r"2 of 9 images can't be read: 000000002 .*, 000000003 ") as error:
        opened(root, tmp_path, streaming).check()
    assert "2 of 7 images have no caption: 000000000, 000000008;" in str(error.value)
    source = opened(root, tmp_path, streaming, bad_files="skip", missing_captions="skip")
    left = [1, 4, 5, 6, 7]
    assert list(source.ids()) == [f"{i:09d}" for i in left]
    assert [source.record(i).image for i in range(5)] == [png(i) for i in left]
    assert source.sizes().tolist() == [list(size(i)) for i in left]
    assert source.blocks().tolist() == ([0, 1, 2, 5] if streaming else [0, 5])
    assert len(source.notes) == 2
    filled = opened(root, tmp_path, streaming, bad_files="skip", missing_captions="prompt", prompt="p")
    assert [filled.record(i).captions[0].text for i in (0, 1)] == ["p", "caption 1"]


@pytest.mark.parametrize("streaming", [False, True])
def test_verify_decodes(tmp_path, streaming):
    root = parquet(
        tmp_path / "in", image=lambda i: {"bytes": png(i)[: -40 if i == 4 else None], "path": None}
    )
    opened(root, tmp_path, streaming).check()
    with pytest.raises(ValueError, match=r"1 of 9 images can't be read: 000000004"):
        opened(root, tmp_path, streaming, verify=True).check()
    with pytest.raises(OSError, match=r"val: 000000004: can't be read"):
        opened(root, tmp_path, streaming, name="val").load(4)


def test_an_empty_dataset_is_refused(tmp_path, monkeypatch):
    # The library itself opens an empty dataset in some of its forms and releases only.
    monkeypatch.setattr(hub_rows.LocalRows, "learn", lambda _: Facts.collect([], named=False))
    with pytest.raises(ValueError, match="split train holds no images"):
        opened(saved(tmp_path / "in"), tmp_path).check()


class Loads(torch.utils.data.Dataset):
    """Reads through a source, in the workers of a DataLoader."""

    def __init__(self, source: HubSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> str:
        picture = self.source.load(index)
        return f"{picture.size} {picture.captions[0].text}"


@pytest.mark.parametrize("streaming", [False, True])
def test_workers_read(tmp_path, streaming):
    source = opened(parquet(tmp_path / "in"), tmp_path, streaming)
    source.load(0)
    again = pickle.loads(pickle.dumps(source))
    assert again.record(8) == source.record(8)
    for order in (range(9), (0, 8)):  # both want the same shard at once, and each its own
        for shard in (tmp_path / "cache").glob("*/shards/*"):
            hub_shards._throw_out(shard)
        loader = torch.utils.data.DataLoader(
            Loads(again), sampler=order, batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        assert list(loader) == [f"{size(i)} {CAPTIONS[i]}" for i in order]


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"datasets is needed .*pip install 'lit-sd\[data\]'"):
        HubSource("a/b").check()


def test_nothing_is_logged_of_what_is_well(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lit_sd"):
        opened(saved(tmp_path / "in"), tmp_path).check()
    assert caplog.text == ""


def test_a_stamp_stays_while_the_dataset_does(tmp_path):
    root = saved(tmp_path / "in")
    stamps = [opened(root, tmp_path).stamp(i) for i in range(9)]
    assert len({*stamps}) == 9
    assert None not in stamps
    assert [opened(root, tmp_path).stamp(i) for i in range(9)] == stamps
    other = opened(saved(tmp_path / "other", text=lambda i: "another text"), tmp_path)
    assert not {*stamps} & {other.stamp(i) for i in range(9)}


def test_images_outside_of_the_dataset_and_packed_ones_have_no_stamp(tmp_path):
    """Files may change though the dataset doesn't; and what is streamed is packed with its digests."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for i in range(2):
        (outside / f"{i}.png").write_bytes(png(i))
    (outside / "metadata.jsonl").write_text(
        "\n".join(json.dumps({"file_name": f"{i}.png", "text": "x"}) for i in range(2))
    )
    assert opened(outside, tmp_path).stamp(0) is None
    assert opened(parquet(tmp_path / "in"), tmp_path, True).stamp(0) is None


def test_a_dataset_saved_again_from_other_images_has_other_stamps(tmp_path):
    """Its fingerprint is of the paths that the images were read from: it stays."""
    file, stamps = tmp_path / "0.png", []
    for i in (0, 1):
        file.write_bytes(png(i))
        features = Features({"image": IMAGE, "text": Value("string")})
        Dataset.from_dict({"image": [str(file)], "text": ["x"]}, features=features).save_to_disk(
            tmp_path / f"{i}"
        )
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        (tmp_path / f"{i}").rename(tmp_path / "in")
        source = opened(tmp_path / "in", tmp_path)
        assert source.digest(0) == content_digest(png(i))
        stamps.append(source.stamp(0).split(maxsplit=1))
    assert stamps[0][0] == stamps[1][0]
    assert stamps[0][1] != stamps[1][1]


def test_one_image_outside_is_enough_for_no_stamps(tmp_path):
    """Not only the first row counts; an image that is missing altogether is no file outside."""
    (tmp_path / "1.png").write_bytes(png(1))
    outside = {1: {"bytes": None, "path": str(tmp_path / "1.png")}}
    missing = {1: None}
    stamps = []
    for name, second in (("outside", outside), ("missing", missing)):
        root = parquet(
            tmp_path / name, (3,), image=lambda i, s=second: s.get(i, {"bytes": png(i), "path": None})
        )
        source = opened(root, tmp_path, bad_files="skip")
        stamps.append([source.stamp(0), source.stamp(1)])
    assert stamps[0] == [None, None]
    assert None not in stamps[1]


def test_a_dataset_in_memory_alone_has_no_stamp(tmp_path):
    """What it was made of may change, and nothing of it would tell."""
    dataset = Dataset.from_dict(cells(range(2)), features=Features({"image": IMAGE, "text": Value("string")}))
    assert hub_rows.LocalRows(dataset, Columns("image"), False, None).stamp(0) is None
