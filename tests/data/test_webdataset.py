"""Shards as a source: every example once, as it was stored, here and elsewhere (F13, F14, F15), and as
webdataset itself reads and writes them (F16)."""

import io
import os
import pickle
import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image
from tiny_shards import encoded, img2dataset_shard, jpeg, picture, png
from torch.utils.data import DataLoader, Dataset

from lit_sd.data import webdataset as shards_module
from lit_sd.data.caption_rules import Caption
from lit_sd.data.shards.files import ShardFiles
from lit_sd.data.shards.store import ShardIndexes
from lit_sd.data.source import Record, content_digest
from lit_sd.data.webdataset import ShardSource, ShardWriter


@pytest.fixture(autouse=True)
def shard_by_shard(monkeypatch):
    """Small sets are shuffled as one; here as large ones are."""
    monkeypatch.setattr(shards_module, "WHOLE", 0)


webdataset = pytest.importorskip("webdataset", reason="shards are webdataset's")

RECORDS = [
    Record(
        "cats/a.JPEG",
        jpeg(0, 20, 30),
        ".jpeg",
        (Caption("a cat", 2.0), Caption("an animal")),
        extra={"url": "u"},
    ),
    Record(
        "b.png", png(1, 9, 8), ".png", (Caption("b \U0001f408"),), png(2, 9, 8), jpeg(3, 9, 8), weight=0.5
    ),
    Record("c.webp", encoded(picture(4), "WEBP"), ".webp", (Caption("c"),), weight=3.0),
]
SIZES = [(20, 30), (9, 8), (16, 16)]


@pytest.fixture
def packed(tmp_path):
    """Three examples in two shards, as this project packs them."""
    with ShardWriter(tmp_path / "packed", shard_size=2) as writer:
        for record, size in zip(RECORDS, SIZES, strict=True):
            writer.write(record, size)
    return tmp_path / "packed"


@pytest.fixture
def three(tmp_path):
    """Three shards of seven, as img2dataset writes them."""
    for i in range(3):
        img2dataset_shard(tmp_path / f"three/{i:05d}.tar", 7, 10 * i)
    return tmp_path / "three"


IDS = [f"{shard:05d}/{10 * shard + i:09d}" for shard in range(3) for i in range(7)]


def test_what_was_packed_comes_back(packed):
    source = ShardSource(packed)
    assert [source.record(i) for i in range(3)] == RECORDS
    assert list(source.ids()) == [record.id for record in RECORDS]
    assert source.sizes().tolist() == [list(size) for size in SIZES]
    assert source.draw_weights().tolist() == [1.0, 0.5, 3.0]
    assert source.draw_weights(1, 2).tolist() == [0.5]
    assert [source.digest(i) for i in range(3)] == [record.digest for record in RECORDS]
    assert source.captions() == ["a cat", "an animal", "b \U0001f408", "c"]
    assert source.blocks().tolist() == [0, 2, 3]
    assert source.notes == []


def test_a_packed_digest_is_known_without_the_image(packed, three, monkeypatch):
    asked: list[list[str]] = []
    read = ShardFiles.read

    def noted(self, shard, key, spans, filesize):
        asked.append(list(spans))
        return read(self, shard, key, spans, filesize)

    monkeypatch.setattr(ShardFiles, "read", noted)
    ShardSource(packed).digest(1)
    ShardSource(three).digest(1)
    assert asked == [["json"], ["image", "text", "json"]]


def test_what_was_packed_may_be_copied_and_made_read_only(packed, tmp_path, monkeypatch):
    shutil.copytree(packed, tmp_path / "copy", copy_function=shutil.copyfile)  # with new times
    monkeypatch.setattr("lit_sd.data.shards.store.index_shard", lambda *_: pytest.fail("indexed again"))
    monkeypatch.setattr("lit_sd.data.shards.store.write_aside", lambda *_: pytest.fail("wrote"))
    assert [record.id for record in map(ShardSource(tmp_path / "copy").record, range(3))] == [
        "cats/a.JPEG",
        "b.png",
        "c.webp",
    ]
    assert ShardSource(tmp_path / "copy").identity() == ShardSource(packed).identity()


def test_what_img2dataset_wrote(three):
    source = ShardSource(three)
    assert len(source) == 21
    assert list(source.ids()) == IDS
    assert source.blocks().tolist() == [0, 7, 14, 21]
    assert source.draw_weights() is None
    record = source.record(9)
    assert (record.id, record.suffix) == ("00001/000000012", ".jpg")
    assert record.image == jpeg(12, 28, 24)
    assert record.captions == (Caption("picture 12"),)
    assert record.extra["status"] == "success"
    assert source.digest(9) == content_digest(jpeg(12, 28, 24))
    assert source.load(9).size == (28, 24)
    assert source.captions()[:2] == ["picture 0", "picture 1"]


def test_sizes_of_any_range_read_the_shards_in_it_alone(three, monkeypatch):
    source = ShardSource(three)
    wanted = [[16 + 10 * shard + i, 24] for shard in range(3) for i in range(7)]
    assert source.sizes().tolist() == wanted
    for start, stop in ((0, 0), (0, 1), (6, 8), (3, 21), (20, 21), (5, None), (21, 30)):
        assert source.sizes(start, stop).tolist() == wanted[start:stop]
    fresh, loaded = ShardSource(three), []
    fresh.check()
    original = ShardIndexes.load
    monkeypatch.setattr(ShardIndexes, "load", lambda self, i: loaded.append(i) or original(self, i))
    fresh.sizes(8, 13)
    fresh.record(8)
    assert loaded == [1]


def test_ids_are_a_lazy_sequence(three):
    ids = ShardSource(three).ids()
    assert (len(ids), ids[0], ids[-1], ids[6:9]) == (21, IDS[0], IDS[-1], IDS[6:9])
    with pytest.raises(IndexError):
        ids[21]
    with pytest.raises(IndexError, match="there are 21 examples, asked for number 21"):
        ShardSource(three).record(21)


def test_identity_tells_other_examples_and_another_order_apart(three, tmp_path):
    names = [str(three / f"{i:05d}.tar") for i in range(3)]
    same = ShardSource(three).identity()
    assert ShardSource(names).identity() == ShardSource(str(three / "{00000..00002}.tar")).identity() == same
    assert ShardSource(names[::-1]).identity() != same
    assert ShardSource(names[:2]).identity() != same
    img2dataset_shard(three / "00001.tar", 7, 11)
    assert ShardSource(three).identity() != same


def test_ids_stay_unique_where_names_of_shards_repeat(tmp_path):
    for folder in ("x", "y"):
        img2dataset_shard(tmp_path / folder / "0.tar", 1)
    source = ShardSource(f"{tmp_path}/x::{tmp_path}/y")
    assert list(source.ids()) == ["x/0/000000000", "y/0/000000000"]


class Ids(Dataset):
    """What a loader's workers get of a source."""

    def __init__(self, source) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int):
        record = self.source.record(index)
        return record.id, content_digest(record.image), self.source.sizes(index, index + 1).tolist()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("method", "workers"), [("fork", 4), ("spawn", 1)])
def test_one_shard_serves_all_workers(tmp_path, method, workers):
    source = ShardSource(img2dataset_shard(tmp_path / "0.tar", 9))
    here = [Ids(source)[i] for i in range(9)]  # the parent has it open
    loader = DataLoader(Ids(source), 2, num_workers=workers, collate_fn=list, multiprocessing_context=method)
    assert [each for batch in loader for each in batch] == here
    assert len({name for name, _, _ in here}) == 9


def test_a_pickled_source_reads_on(three):
    source = ShardSource(three)
    unchecked = pickle.loads(pickle.dumps(source))
    source.record(0)
    again = pickle.loads(pickle.dumps(source))
    assert [s.record(20) for s in (again, unchecked)] == [source.record(20)] * 2
    assert len(pickle.dumps(source)) < 10_000, "without what was read"


def test_an_image_that_broke_after_the_check_is_named(three):
    source = ShardSource(three, name="pets")
    source.check()
    shard = three / "00001.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(OSError, match=r"00001\.tar: it is not the \d+ bytes"):
        source.record(9)
    assert source.record(2).id == IDS[2]


def test_a_packed_folder_misses_a_shard_that_got_lost(packed):
    (packed / "00001.tar").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 shards can't be used: 00001 \(there is no such shard\)"):
        ShardSource(packed).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"missing_captions": "prompt"}, r"needs data\.prompt"),
        ({"repeats": 0}, "repeats=0"),
        ({"cache_dir": "cache", "cache_gb": 0}, r"data\.cache_gb=0"),
    ],
)
def test_options_out_of_range(three, options, message):
    with pytest.raises(ValueError, match=message):
        ShardSource(three, **options)


# elsewhere


@pytest.fixture
def web(tmp_path):
    """The URL of a server of `tmp_path`, and what it was asked for."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_shards_of_a_web_server_are_those_on_disk(three, web, tmp_path):
    url, asked = web
    here, there = (
        ShardSource(three),
        ShardSource(f"{url}/three/{{00000..00002}}.tar", cache_dir=tmp_path / "cache"),
    )
    here.check()
    (three / "shard-index/index.json").unlink()  # what the other would take
    assert [there.record(i) for i in range(21)] == [here.record(i) for i in range(21)]
    assert there.identity() == here.identity()
    assert sorted(path for path in asked if path.endswith(".tar")) == [
        f"/three/0000{i}.tar" for i in range(3)
    ]


def test_packed_shards_of_a_web_server_are_fetched_when_they_are_read(packed, web, tmp_path):
    url, asked = web
    source = ShardSource(f"{url}/packed/index.json", cache_dir=tmp_path / "cache")
    assert list(source.ids()) == ["cats/a.JPEG", "b.png", "c.webp"]
    assert not any(path.endswith(".tar") for path in asked)
    assert source.record(2) == RECORDS[2]
    assert [path for path in asked if path.endswith(".tar")] == ["/packed/00001.tar"]


def test_workers_fetch_for_themselves(three, web, tmp_path):
    url, asked = web
    root, cache = f"{url}/three/{{00000..00002}}.tar", tmp_path / "cache"
    source = ShardSource(root, cache_dir=cache)
    source.check()  # the parent has talked to the server, which forked children must not go on with
    shutil.rmtree(cache / "shards")
    asked.clear()
    loader = DataLoader(Ids(source), 2, num_workers=2, collate_fn=list, multiprocessing_context="fork")
    assert [name for batch in loader for name, _, _ in batch] == IDS
    assert sorted(asked) == [f"/three/0000{i}.tar" for i in range(3)], "each once"


def test_commands_give_shards(three, tmp_path):
    source = ShardSource(f"pipe:cat {three}/{{00000..00002}}.tar", cache_dir=tmp_path / "cache")
    assert list(source.ids()) == IDS
    assert source.record(20).image == jpeg(26, 42, 24)


def test_what_is_elsewhere_needs_a_cache(three):
    with pytest.raises(ValueError, match=r"2 remote shards like s3://b/0\.tar; set data\.cache_dir"):
        ShardSource("s3://b/{0..1}.tar").check()


# F16: webdataset itself


def webdataset_of(urls: list[str]):
    return webdataset.WebDataset(urls, shardshuffle=False)


def test_webdataset_reads_what_we_wrote(packed):
    urls = [str(packed / f"{i:05d}.tar") for i in range(2)]
    samples = list(webdataset_of(urls).decode("pil"))
    assert [sample["__key__"] for sample in samples] == ["000000000", "000000001", "000000002"]
    assert [sample["txt"] for sample in samples] == ["a cat", "b \U0001f408", "c"]
    assert [sample["json"]["id"] for sample in samples] == [record.id for record in RECORDS]
    for sample, ending, record in zip(samples, ("jpeg", "png", "webp"), RECORDS, strict=True):
        assert np.array_equal(
            np.asarray(sample[ending]), np.asarray(Image.open(io.BytesIO(record.image)).convert("RGB"))
        )
    assert np.array_equal(np.asarray(samples[1]["mask.png"]), np.asarray(picture(2, 9, 8)))
    assert samples[1]["control.jpg"].size == (8, 9)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_we_read_what_webdataset_wrote(tmp_path, one_by_one):
    samples = [
        {
            "__key__": f"{i:05d}",
            "jpg": jpeg(i),
            "txt": f"picture {i}",
            "json": {"caption": f"picture {i}", "sha256": "0"},
        }
        for i in range(5)
    ]
    if one_by_one:
        with webdataset.TarWriter(str(tmp_path / "000000.tar")) as writer:
            for sample in samples:
                writer.write(sample)
    else:
        with webdataset.ShardWriter(str(tmp_path / "%06d.tar"), maxcount=2) as writer:
            for sample in samples:
                writer.write(sample)
    source = ShardSource(tmp_path)
    assert source.blocks().tolist() == ([0, 5] if one_by_one else [0, 2, 4, 5])
    assert [name.split("/")[1] for name in source.ids()] == [f"{i:05d}" for i in range(5)]
    for i in range(5):
        assert source.record(i).image == jpeg(i)
        assert source.record(i).captions == (Caption(f"picture {i}"),)
        assert source.record(i).extra["sha256"] == "0"
    urls = [str(path) for path in sorted(tmp_path.glob("*.tar"))]
    assert [sample["jpg"] for sample in webdataset_of(urls)] == [source.record(i).image for i in range(5)]


def test_shards_on_this_machine_are_shuffled_as_one_up_to_a_million(monkeypatch, tmp_path):
    monkeypatch.undo()
    with ShardWriter(tmp_path / "out", shard_size=2) as writer:
        for i in range(5):
            writer.write(Record(f"{i}.png", png(i), ".png", (Caption("x"),)), (8, 8))
    source = ShardSource(str(tmp_path / "out"))
    assert source.blocks().tolist() == [0, 5]
    monkeypatch.setattr(shards_module, "WHOLE", 4)
    assert source.blocks().tolist() == [0, 2, 4, 5]


def test_shards_packed_anew_have_their_new_index_also_with_a_cache_folder(tmp_path):
    """The same size in bytes, other captions."""
    for text in ("a", "b"):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with ShardWriter(tmp_path / "out") as writer:
            writer.write(Record("0.png", png(0), ".png", (Caption(text * (1 + 30 * (text == "b"))),)), (8, 8))
        source = ShardSource(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
        assert source.record(0).captions[0].text[0] == text


def test_a_stamp_changes_with_the_shard_and_tells_its_examples_apart(three):
    source = ShardSource(three)
    stamps = [source.stamp(i) for i in range(21)]
    assert len({*stamps}) == 21
    assert None not in stamps
    assert [ShardSource(three).stamp(i) for i in range(21)] == stamps
    middle = three / "00001.tar"
    os.utime(middle, ns=(1, 1))
    changed = [ShardSource(three).stamp(i) != stamps[i] for i in range(21)]
    assert changed == [False] * 7 + [True] * 7 + [False] * 7


def test_what_this_project_packed_has_no_stamp_but_knows_its_digests(packed, monkeypatch):
    source = ShardSource(packed)
    assert [source.stamp(i) for i in range(3)] == [None] * 3
    monkeypatch.setattr(ShardSource, "record", lambda *_: pytest.fail("an image was read"))
    assert [source.digest(i) for i in range(3)] == [record.digest for record in RECORDS]


def test_broken_texts_are_told_with_shard_and_example(tmp_path):
    """The index is of whole texts, as long as the broken ones that come in their place."""
    img2dataset_shard(tmp_path / "00000.tar", 2)
    source = ShardSource(tmp_path)
    source.check()
    tar = tmp_path / "00000.tar"
    span = source._checked().find(1).span("json")
    stat = tar.stat()
    with tar.open("r+b") as file:
        file.seek(span.start)
        file.write(b"[" * span.size)
    os.utime(tar, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    for read in (source.record, source.captions_of):
        with pytest.raises(OSError, match=r"^00000: 00000/000000001: "):
            read(1)
