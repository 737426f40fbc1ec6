"""Indexes are made once, kept beside the shards or in the cache, and made anew when a shard changes."""

import json
import os
import time
from pathlib import Path

import pytest
from tiny_shards import img2dataset_shard, png, tar

from lit_sd.data.shards import store as shard_store
from lit_sd.data.shards.files import ShardFiles
from lit_sd.data.shards.members import Reading
from lit_sd.data.shards.remote import FetchedFiles
from lit_sd.data.shards.store import ShardIndexes


@pytest.fixture
def indexed(monkeypatch):
    """Calls of what reads a shard to index it, by the shard's name."""
    calls: list[str] = []
    original = shard_store.index_shard

    def counted(descriptor, reading):
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        return original(descriptor, reading)

    monkeypatch.setattr(shard_store, "index_shard", counted)
    return calls


def indexes(shards, cache=None, **reading) -> ShardIndexes:
    files = ShardFiles(FetchedFiles(cache / "shards") if cache else None)
    return ShardIndexes([str(shard) for shard in shards], files, Reading(**reading), cache_dir=cache)


def counts(found) -> list[int | None]:
    return [None if entry is None else entry.samples for entry in found]


@pytest.fixture
def shards(tmp_path):
    return [img2dataset_shard(tmp_path / f"{i}.tar", 2 + i, 10 * i) for i in range(3)]


def test_shards_are_indexed_once_and_absent_ones_are_told(shards, tmp_path, indexed):
    absent = tmp_path / "9.tar"
    assert counts(indexes([*shards, absent]).entries("")) == [2, 3, 4, None]
    assert sorted(indexed) == ["0.tar", "1.tar", "2.tar"]
    assert counts(indexes([absent, *shards[::-1]]).entries("")) == [None, 4, 3, 2]
    assert len(indexed) == 3
    assert {path.name for path in (tmp_path / "shard-index").iterdir() if not path.name.startswith(".")} == {
        "index.json",
        "0.npz",
        "1.npz",
        "2.npz",
    }


def test_set_up_opens_the_summary_alone(shards, monkeypatch):
    indexes(shards).entries("")
    monkeypatch.setattr(shard_store, "load_index", lambda path: pytest.fail("opened a shard's index"))
    assert counts(indexes(shards).entries("")) == [2, 3, 4]


def test_a_shard_that_changed_is_indexed_anew(shards, indexed):
    indexes(shards).entries("")
    img2dataset_shard(shards[1], 7)
    assert counts(indexes(shards).entries("")) == [2, 7, 4]
    assert indexed[3:] == ["1.tar"]
    stat = shards[2].stat()
    os.utime(shards[2], ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    indexes(shards).entries("")
    assert indexed[4:] == ["2.tar"]


def test_without_a_summary_what_is_indexed_already_counts(shards, tmp_path, indexed):
    indexes(shards).entries("")
    (tmp_path / "shard-index/index.json").unlink()
    (tmp_path / "shard-index/1.npz").unlink()
    assert counts(indexes(shards).entries("")) == [2, 3, 4]
    assert indexed[3:] == ["1.tar"], "as after a kill"


def test_a_damaged_summary_is_made_again(shards, tmp_path):
    indexes(shards).entries("")
    summary = tmp_path / "shard-index/index.json"
    for bad in ("", "[]", '{"version": 0}', json.dumps({"version": 1, "fields": ["x"], "shards": {}})):
        summary.write_text(bad)
        assert counts(indexes(shards).entries("")) == [2, 3, 4]


def test_parts_of_a_folder_share_one_summary(shards, tmp_path, indexed):
    indexes(shards[:2]).entries("")
    indexes(shards[1:]).entries("")
    assert counts(indexes(shards).entries("")) == [2, 3, 4]
    assert len(indexed) == 3


def test_other_readings_have_indexes_of_their_own(tmp_path, indexed):
    shard = tar(tmp_path / "0.tar", {"0.png": png(0), "0.short": b"x", "1.png": png(1), "1.txt": b"y"})
    for _ in range(2):
        assert indexes([shard]).entries("")[0].captioned == 1
        assert indexes([shard], caption_key="short").load(0).captioned.tolist() == [True, False]
        assert indexes([shard]).load(0).captioned.tolist() == [False, True]
        assert indexes([shard], caption_key="short").entries("")[0].captioned == 1
    assert len(indexed) == 2


def test_what_was_not_verified_is_read_again_to_verify_it(shards, indexed):
    for verify, read in ((False, 3), (True, 6), (True, 6), (False, 6)):
        indexes(shards, verify=verify).entries("")
        assert len(indexed) == read


def test_with_a_cache_nothing_is_written_beside_the_shards(shards, tmp_path, indexed):
    cache = tmp_path / "cache"
    assert counts(indexes(shards, cache).entries("")) == [2, 3, 4]
    assert counts(indexes(shards, cache).entries("")) == [2, 3, 4]
    assert len(indexed) == 3
    assert not (tmp_path / "shard-index").exists()
    other = img2dataset_shard(tmp_path / "elsewhere/0.tar", 5)
    assert counts(indexes([shards[0], other], cache).entries("")) == [2, 5]


def test_indexes_beside_the_shards_serve_with_a_cache_too(shards, tmp_path, indexed):
    indexes(shards).entries("")
    there = indexes(shards, tmp_path / "cache")
    assert counts(there.entries("")) == [2, 3, 4]
    assert there.load(2).names[0] == "000000020.jpg"
    assert len(indexed) == 3


def test_where_nothing_can_be_written_the_cache_is_asked_for(shards, tmp_path):
    (tmp_path / "shard-index").write_text("in the way, as a folder that is read-only would be")
    with pytest.raises(ValueError, match=r"set data\.cache_dir=FOLDER"):
        indexes(shards).entries("")


def test_a_remote_folder_with_indexes_is_not_read_to_set_up(shards, tmp_path, indexed):
    import fsspec

    indexes(shards).entries("")
    indexed.clear()
    store = fsspec.filesystem("memory")
    store.put(str(tmp_path), "/published", recursive=True)
    urls = [f"memory://published/{shard.name}" for shard in shards]
    there = indexes(urls, tmp_path / "cache")
    assert counts(there.entries("")) == [2, 3, 4]
    assert there.load(1).names[0] == "000000010.jpg"
    assert indexed == []
    assert not (tmp_path / "cache/shards").exists()
    store.rm("/published/shard-index", recursive=True)
    again = indexes(urls, tmp_path / "another")
    assert counts(again.entries("")) == [2, 3, 4]
    assert len(indexed) == 3
    store.rm("/published", recursive=True)


def test_absent_remote_shards_are_told(shards, tmp_path):
    urls = [f"memory://nowhere/{i}.tar" for i in range(2)]
    assert counts(indexes(urls, tmp_path / "cache").entries("")) == [None, None]


def test_names_that_are_no_file_names(shards, tmp_path, indexed):
    pytest.importorskip("webdataset")
    commands = [f"pipe:cat {shard}" for shard in shards]
    for _ in range(2):
        there = indexes(commands, tmp_path / "cache")
        assert counts(there.entries("")) == [2, 3, 4]
        assert [there.load(i).names[0] for i in range(3)] == [
            "000000000.jpg",
            "000000010.jpg",
            "000000020.jpg",
        ]
    assert len(indexed) == 3


def test_several_processes_may_index_at_once(shards):
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            time.sleep(0.01)
            os._exit(0 if counts(indexes(shards).entries("")) == [2, 3, 4] else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert counts(indexes(shards).entries("")) == [2, 3, 4]


def test_a_hundred_thousand_shards_are_summarised_at_once(tmp_path):
    shard = img2dataset_shard(tmp_path / "0.tar", 1)
    there = indexes([shard])
    entry = there.entries("")[0]
    folder = there.folders[0]
    folder.add_entries({f"{i:05d}": entry for i in range(100_000)})
    start = time.perf_counter()
    assert len(folder.entries()) == 100_001
    assert time.perf_counter() - start < 3, "about 0.4 s on an idle machine"
