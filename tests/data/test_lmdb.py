"""Packed datasets as a source: nothing is lost, and workers read them after the parent did (F12)."""

import io
import itertools
import json
import multiprocessing
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_packed import SHAPES, example, pack_all, png, shorten_chunks

from lit_sd.data import lmdb
from lit_sd.data.caption_rules import Caption
from lit_sd.data.lmdb import LmdbSource, LmdbWriter
from lit_sd.data.source import Record


@pytest.fixture
def packed(tmp_path):
    pack_all(tmp_path / "packed", [example(i) for i in range(7)])
    return tmp_path / "packed"


@pytest.fixture
def short_chunks(monkeypatch):
    shorten_chunks(monkeypatch)


def test_everything_comes_back(tmp_path):
    rich = Record(
        "rich",
        png(1),
        ".png",
        (Caption("one", 3.0), Caption("zwei 🐈")),
        mask=png(2, (5, 9)),
        control=png(3, (5, 9)),
        weight=2.5,
        extra={"url": "u", "tags": [1, "a"]},
    )
    records = [example(0), rich, example(2)]
    pack_all(tmp_path / "out", records)
    source = LmdbSource(tmp_path / "out")
    assert len(source) == 3
    assert [source.record(i) for i in range(3)] == records
    assert list(source.ids()) == ["0/é0.png", "rich", "0/é2.png"]
    assert source.ids()[-1] == "0/é2.png"
    assert source.sizes().tolist() == [[8, 6], [5, 9], [7, 7]]
    assert source.sizes().dtype == np.int32
    assert source.draw_weights().tolist() == [1.0, 2.5, 1.0]
    assert source.captions() == ["caption 0", "one", "zwei 🐈", "caption 2"]
    assert [source.digest(i) for i in range(3)] == [record.digest for record in records]
    assert source.blocks().tolist() == [0, 3]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data.mdb", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {
        "count": 3,
        "weighted": 1,
        "masks": 1,
        "controls": 1,
        "uncaptioned": 0,
    }.items() <= manifest.items()


def test_pictures_are_decoded_with_mask_and_control(tmp_path):
    pack_all(tmp_path / "out", [replace(example(0), mask=png(5, (8, 6)), control=png(6, (8, 6)))])
    picture = LmdbSource(tmp_path / "out").load(0)
    for image, i in ((picture.image, 0), (picture.control, 6)):
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(png(i, (8, 6))))))
    assert np.array_equal(
        picture.mask[..., 0], np.asarray(Image.open(io.BytesIO(png(5, (8, 6)))).convert("L"))
    )
    assert (picture.size, picture.captions) == ((8, 6), (Caption("caption 0"),))


def test_a_file_that_can_not_be_decoded_is_named(tmp_path):
    pack_all(tmp_path / "out", [replace(example(0), image=png(0)[:-40])])
    with pytest.raises(OSError, match=r"train: 0/é0\.png: can't be read as an image"):
        LmdbSource(tmp_path / "out", name="train").load(0)


def test_all_of_equal_weight_have_no_weights(packed):
    assert LmdbSource(packed).draw_weights() is None


def test_ranges_reach_over_chunks(tmp_path, short_chunks):
    records = [replace(example(i), weight=1.0 if i < 8 else i / 4) for i in range(11)]
    pack_all(tmp_path / "out", records, commit_every=3)
    source = LmdbSource(tmp_path / "out")
    sizes, weights = [list(SHAPES[i % 3]) for i in range(11)], [record.weight for record in records]
    for start, stop in itertools.product(range(12), (None, *range(13))):
        assert source.sizes(start, stop).tolist() == sizes[start:stop]
        assert source.draw_weights(start, stop).tolist() == weights[start:stop]
    assert list(source.ids()) == [record.id for record in records]


def test_many_examples_are_blocks_of_a_million(packed, monkeypatch):
    assert lmdb.BLOCK == 1_000_000
    monkeypatch.setattr(lmdb, "BLOCK", 3)
    monkeypatch.setattr(lmdb, "PART", 3)
    assert LmdbSource(packed).blocks().tolist() == [0, 3, 6, 7]


def test_an_empty_one_is_refused(tmp_path):
    LmdbWriter(tmp_path / "out").close()
    with pytest.raises(ValueError, match=r"data\.root=.*out holds no images"):
        LmdbSource(tmp_path / "out").check()
    with pytest.raises(ValueError, match=r"data\.root is not set; set data\.root=FOLDER"):
        LmdbSource(None)


def test_verify_finds_bad_images_and_changed_bytes(tmp_path):
    records = [example(i) for i in range(6)]
    records[2] = replace(records[2], image=png(0)[:-40])
    with LmdbWriter(tmp_path / "out") as writer:
        for record in records:
            writer.write(record, (8, 6))
        writer._batch[4] = writer._batch[4].replace(records[4].digest.hex().encode(), b"0" * 32)
    LmdbSource(tmp_path / "out").check()
    with pytest.raises(ValueError, match=r"2 of 6 .*é2\.png \(Truncated.*é4\.png \(its bytes are not those"):
        LmdbSource(tmp_path / "out", verify=True).check()
    source = LmdbSource(tmp_path / "out", verify=True, bad_files="skip")
    assert list(source.ids()) == [records[i].id for i in (0, 1, 3, 5)]
    assert [source.record(i) for i in range(4)] == [records[i] for i in (0, 1, 3, 5)]
    assert source.blocks().tolist() == [0, 4]
    assert "they are skipped" in source.notes[0]
    assert source.identity() != LmdbSource(tmp_path / "out").identity()
    with pytest.raises(ValueError, match="max_bad_share"):
        LmdbSource(tmp_path / "out", verify=True, bad_files="skip", max_bad_share=0.3).check()


def test_missing_captions_by_policy(tmp_path, short_chunks):
    blank = (1, 4, 5)
    texts = [() if i in blank[1:] else (Caption(" "),) if i == 1 else (Caption(f"c{i}"),) for i in range(7)]
    pack_all(tmp_path / "out", [replace(example(i), captions=texts[i]) for i in range(7)])

    def captions(**options) -> list[str]:
        source = LmdbSource(tmp_path / "out", **options)
        return ["".join(caption.text for caption in source.record(i).captions) for i in range(len(source))]

    with pytest.raises(
        ValueError, match=r"3 of 7 images have no caption: 1/é1\.png, 0/é4\.png, 1/é5\.png; wri"
    ):
        captions()
    assert captions(missing_captions="skip") == ["c0", "c2", "c3", "c6"]
    assert captions(missing_captions="empty") == ["c0", "", "c2", "c3", "", "", "c6"]
    assert captions(missing_captions="prompt", prompt="p") == ["c0", "p", "c2", "c3", "p", "p", "c6"]
    assert captions(prompt="p") == ["p"] * 7
    assert LmdbSource(tmp_path / "out", prompt="p").captions() == ["p"] * 7
    skipping = LmdbSource(tmp_path / "out", missing_captions="skip")
    assert skipping.sizes(1).tolist() == [[7, 7], [8, 6], [8, 6]]
    assert list(skipping.ids()) == ["0/é0.png", "0/é2.png", "1/é3.png", "0/é6.png"]


class Loads(torch.utils.data.Dataset):
    """Reads through a source, in the workers of a DataLoader."""

    def __init__(self, source: LmdbSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, int, str]:
        picture = self.source.load(index)
        return os.getpid(), int(np.asarray(picture.image).astype(np.int64).sum()), picture.captions[0].text


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind_read_after_the_parent_did(packed, method, persistent):
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(["torch"])  # once, not in each worker
    dataset = Loads(LmdbSource(packed))
    expected = [list(dataset[i][1:]) for i in range(7)]
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    processes = set()
    for _ in range(2):
        found = list(loader)
        assert [item[1:] for item in found] == expected
        processes |= {item[0] for item in found}
        assert list(dataset[0][1:]) == expected[0]
    assert len(processes) == (2 if persistent else 4)
    assert os.getpid() not in processes


def test_a_source_is_pickled_without_its_handle(packed):
    source = LmdbSource(packed)
    source.load(0)
    data = pickle.dumps(source)
    assert len(data) < 3000
    again = pickle.loads(data)
    assert again._file is None
    assert again.record(6) == example(6)


def test_names_are_looked_up_when_they_are_asked_for(packed, monkeypatch):
    source = LmdbSource(packed)
    names = source.ids()
    monkeypatch.setattr(source._rows, "names", lambda total: pytest.fail("all were read"))
    assert names[2:4] == ["0/é2.png", "1/é3.png"]
