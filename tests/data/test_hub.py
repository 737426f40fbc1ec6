"""Hugging Face datasets, local and streamed: the same examples, and no shard is fetched in vain."""

import io
import json
import logging
import os
import pickle
import sys

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, List, Value
from PIL import Image

from lit_sd.data import hub_rows, hub_shards
from lit_sd.data.caption_rules import Caption
from lit_sd.data.hub import HubSource
from lit_sd.data.hub_rows import Facts
from lit_sd.data.hub_shards import StreamedRows

IMAGE = datasets.Image()
ROWS = (3, 2, 4)
"""In each of three shards."""

CAPTIONS = [f"caption {i}" for i in range(9)]


@pytest.fixture(autouse=True)
def no_traces(tmp_path, monkeypatch):
    """The library's caches are the test's own; no progress bars."""
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    datasets.disable_progress_bars()


@pytest.fixture
def fetched(monkeypatch):
    """Numbers of the shards that were packed, in order."""
    found: list[int] = []
    fetch = StreamedRows._fetch

    def recorded(self, shard: int) -> None:
        found.append(shard)
        fetch(self, shard)

    monkeypatch.setattr(StreamedRows, "_fetch", recorded)
    return found


def size(i: int) -> tuple[int, int]:
    return 8 + i, 20 - i


def png(i: int, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(i).integers(0, 255, (*size(i), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def cells(numbers, **columns) -> dict[str, list]:
    """Columns of the examples with these numbers; others by functions of the number."""
    made = {"image": lambda i: {"bytes": png(i), "path": f"{i}.png"}, "text": CAPTIONS.__getitem__} | columns
    return {name: [make(i) for i in numbers] for name, make in made.items()}


def parquet(folder, rows=ROWS, features=None, **columns):
    """Files of so many rows each."""
    folder.mkdir()
    first = 0
    for shard, count in enumerate(rows):
        data = cells(range(first, first + count), **columns)
        known = Features({"image": IMAGE, "text": Value("string")} | (features or {}))
        path = folder / f"train-{shard:05d}-of-{len(rows):05d}.parquet"
        Dataset.from_dict(data, features=known).to_parquet(str(path))
        first += count
    return folder


def saved(folder, features=None, **columns):
    known = Features({"image": IMAGE, "text": Value("string")} | (features or {}))
    Dataset.from_dict(cells(range(9), **columns), features=known).save_to_disk(folder)
    return folder


def opened(root, tmp_path, streaming: bool = False, **options) -> HubSource:
    return HubSource(root, streaming=streaming, cache_dir=tmp_path / "cache", **options)


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


EXTRAS = {
    "mask": IMAGE,
    "edge": IMAGE,
    "often": Value("float32"),
    "key": Value("int64"),
    "raw": Value("binary"),
}
EXTRA_CELLS = {
    "text": lambda i: [f"a{i}", None, f"b{i}"],
    "mask": lambda i: None if i == 1 else {"bytes": png(i + 1), "path": None},
    "edge": lambda i: {"bytes": png(i, "JPEG"), "path": None},
    "often": lambda i: i / 2,
    "key": lambda i: 100 - i,
    "raw": lambda i: png(i, "JPEG"),
}


@pytest.mark.parametrize("streaming", [False, True])
def test_all_columns(tmp_path, streaming):
    root = parquet(tmp_path / "in", features=EXTRAS | {"text": List(Value("string"))}, **EXTRA_CELLS)
    source = opened(
        root,
        tmp_path,
        streaming,
        mask_column="mask",
        control_column="edge",
        weight_column="often",
        id_column="key",
    )
    assert list(source.ids()) == [str(100 - i) for i in range(9)]
    assert source.draw_weights().tolist() == [i / 2 for i in range(9)]
    assert source.draw_weights(7).tolist() == [3.5, 4.0]
    record = source.record(3)
    assert (record.id, record.weight) == ("97", 1.5)
    assert record.captions == (Caption("a3"), Caption("b3"))
    assert (record.mask, record.control) == (png(4), png(3, "JPEG"))
    assert source.record(1).mask is None
    raw = opened(root, tmp_path, streaming, image_column="raw", prompt="p")
    assert (raw.record(5).image, raw.record(5).suffix) == (png(5, "JPEG"), ".jpg")


def test_captions_with_weights(tmp_path):
    pairs = List({"text": Value("string"), "weight": Value("float64")})
    root = saved(
        tmp_path / "in",
        {"text": pairs},
        text=lambda i: [{"text": "a", "weight": 2.0}, {"text": "b", "weight": None}],
    )
    assert opened(root, tmp_path).record(0).captions == (Caption("a", 2.0), Caption("b", 1.0))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_column": "img"},
            r"image_column=img: there is no .*; there is image, text; nearest: image",
        ),
        (
            {"caption_column": "zzz"},
            r"data\.caption_column=zzz: there is no such column; there is .*, text$",
        ),
        ({"image_column": "text"}, r"data\.image_column=text: expected encoded images .*, got Value"),
        ({"caption_column": "image"}, r"data\.caption_column=image: expected texts, or lists of texts, got"),
        ({"weight_column": "text"}, r"data\.weight_column=text: expected numbers"),
        ({"id_column": "image"}, r"data\.id_column=image: expected texts or whole numbers"),
        ({"image_column": "a", "mask_column": "b"}, r"(?s)image_column=a.*\n.*mask_column=b"),
    ],
)
def test_columns_that_are_not_there_or_hold_something_else(tmp_path, streaming, options, message):
    root = parquet(tmp_path / "in", (1,))
    with pytest.raises(ValueError, match=message):
        opened(root, tmp_path, streaming, **options).check()


def test_images_as_arrays_are_refused(tmp_path):
    Dataset.from_dict({"image": [[[1, 2], [3, 4]]], "text": ["x"]}).save_to_disk(tmp_path / "in")
    with pytest.raises(ValueError, match=r"expected encoded images \(a feature of kind Image, or bi"):
        opened(tmp_path / "in", tmp_path).check()


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


def test_headers_are_read_once(tmp_path, monkeypatch):
    root = saved(tmp_path / "in")
    first = opened(root, tmp_path)
    first.check()
    monkeypatch.setattr(hub_rows, "judge", lambda *_: pytest.fail("read again"))
    again = opened(root, tmp_path)
    assert again.sizes().tolist() == first.sizes().tolist()
    assert again.identity() == first.identity()
    with pytest.raises(pytest.fail.Exception):
        HubSource(root).check()  # nowhere to keep it
    assert [path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()] == ["facts"]


def test_many_rows_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_rows, "STEP", 2)
    monkeypatch.setattr(hub_rows, "_AT_ONCE", 2)
    root = saved(tmp_path / "in", image=lambda i: {"bytes": b"bad" if i == 5 else png(i), "path": None})
    source = opened(root, tmp_path, bad_files="skip")
    assert source.sizes().tolist() == [list(size(i)) for i in range(9) if i != 5]
    assert "000000005" in source.notes[0]


def test_learning_reads_each_shard_once_and_later_only_what_is_asked_for(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    assert fetched == [0, 1, 2]
    again = opened(root, tmp_path, True)
    assert (again.record(4).image, again.record(0).image) == (png(4), png(0))
    assert fetched == [0, 1, 2]


def test_a_resumed_run_fetches_the_shard_it_lands_in(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    for shard in (tmp_path / "cache").glob("*/shards/*"):
        hub_shards._throw_out(shard)
    fetched.clear()
    source = opened(root, tmp_path, True)
    assert source.sizes(3, 5).tolist() == [[11, 17], [12, 16]]
    assert source.ids()[8] == "000000008"
    assert fetched == []
    assert source.record(8).image == png(8)
    assert source.digest(5) == source.record(5).digest
    assert fetched == [2]


def test_learning_goes_on_where_it_was_stopped(tmp_path, fetched, monkeypatch):
    root = parquet(tmp_path / "in")
    save = Facts.save

    def stop_at_the_third(self, path) -> None:
        if path.stem == "000002":
            raise KeyboardInterrupt
        save(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Facts, "save", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            opened(root, tmp_path, True).check()
    source = opened(root, tmp_path, True)
    assert len(source) == 9
    assert fetched == [0, 1, 2, 2]


def test_little_room_throws_out_what_was_not_used_for_longest(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    file_bytes = max(path.stat().st_size for path in (tmp_path / "cache").glob("*/shards/*/data.mdb"))

    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "cache").glob("*/shards/*"))

    small = opened(root, tmp_path, True, cache_gb=2.5 * file_bytes / 1e9)
    for folder in (tmp_path / "cache").glob("*/shards/000000"):
        hub_shards._throw_out(folder)
    fetched.clear()
    for place, number in ((1, 3), (2, 5)):
        small.record(number)
        manifest = next((tmp_path / "cache").glob(f"*/shards/00000{place}/manifest.json"))
        os.utime(manifest, (place, place))  # long ago, in this order
    assert small.record(0).image == png(0)
    assert (fetched, there()) == ([0], ["000000", "000002"])
    assert small.record(3).image == png(3)  # thrown out, but this process has it open
    assert fetched == [0]
    assert opened(root, tmp_path, True, cache_gb=1e-9).record(4).image == png(4)
    assert (fetched, there()) == ([0, 1], ["000001"])


def test_a_fork_fetches_again_what_was_thrown_out(tmp_path):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    assert source.record(0).image == png(0)
    for shard in (tmp_path / "cache").glob("*/shards/*"):
        hub_shards._throw_out(shard)
    child = os.fork()
    if child == 0:
        os._exit(0 if source.record(1).image == png(1) and source.record(8).image == png(8) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_damaged_shards_are_fetched_again(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    os.truncate(next((tmp_path / "cache").glob("*/shards/000001/data.mdb")), 100)
    next((tmp_path / "cache").glob("*/shards/000002/manifest.json")).unlink()
    fetched.clear()
    source = opened(root, tmp_path, True)
    assert [source.record(i).image for i in range(9)] == [png(i) for i in range(9)]
    assert fetched == [1, 2]


def test_a_shard_that_is_another_now_is_refused(tmp_path):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    source.check()
    other = parquet(tmp_path / "other", image=lambda i: {"bytes": png(i + 1), "path": None})
    for shard in (tmp_path / "cache").glob("*/shards/*"):
        hub_shards._throw_out(shard)
    for path in other.iterdir():
        path.rename(tmp_path / "in" / path.name)
    with pytest.raises(OSError, match=r"shard 1 of 3 has changed since it was measured"):
        source.record(3)
    assert len(opened(tmp_path / "in", tmp_path, True)) == 9  # learnt anew, as another dataset


def test_a_shard_that_can_not_be_read_is_told(tmp_path):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    path = tmp_path / "in" / "train-00001-of-00003.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(OSError, match=r"shard 1 of 3 can't be read"):
        source.check()


def test_what_another_process_reads_is_left_to_it(tmp_path, fetched):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    rows = source._open()
    with rows._lock(1):
        assert not rows._learn_one(1, 0)
        assert rows._learn_one(0, 0)
    assert fetched == [0]


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
