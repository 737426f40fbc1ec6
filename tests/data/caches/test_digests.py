"""Digests of what a source holds: files that have not changed are not read again."""

import os
import pickle
import time

import numpy as np
import pytest
from picture_source import PictureSource, noise
from tiny_hub import keep_caches_in, opened, saved
from tiny_shards import img2dataset_shard, png

from lit_sd.data.caches.digests import Facts, Stamps, gather_facts
from lit_sd.data.caches.leftovers import ABANDONED_S
from lit_sd.data.caption_rules import Caption
from lit_sd.data.source import Record, content_digest
from lit_sd.data.webdataset import ShardSource, ShardWriter
from lit_sd.together import Together

SIZES = [(16, 24), (32, 16), (8, 8)]


def rows(facts: Facts) -> list:
    return [facts[i] for i in range(len(facts))]


def test_digest_and_size_of_each(tmp_path):
    source = PictureSource(SIZES)
    facts = gather_facts(source, tmp_path)
    assert rows(facts) == [
        (content_digest(data), size) for data, size in zip(source.pictures, SIZES, strict=True)
    ]
    assert facts.sizes(np.array([2, 0])).tolist() == [[8, 8], [16, 24]]
    assert rows(pickle.loads(pickle.dumps(facts))) == rows(facts)


def test_only_what_has_changed_is_read_again(tmp_path):
    source = PictureSource(SIZES)
    first = rows(gather_facts(source, tmp_path))
    assert source.reads == 3
    assert rows(gather_facts(source, tmp_path)) == first
    assert source.reads == 3
    source.edit(1, noise(9, SIZES[1]))
    second = rows(gather_facts(source, tmp_path))
    assert source.reads == 4
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]


def test_a_touched_file_is_read_and_is_the_same(tmp_path):
    source = PictureSource(SIZES)
    first = rows(gather_facts(source, tmp_path))
    source.edit(0, source.pictures[0])
    assert rows(gather_facts(source, tmp_path)) == first
    assert source.reads == 4


def test_a_kind_without_stamps_is_asked_each_time(tmp_path):
    source = PictureSource(SIZES)
    source.versions = None
    gather_facts(source, tmp_path)
    source.pictures[0] = noise(9, SIZES[0])
    assert gather_facts(source, tmp_path)[0][0] == content_digest(source.pictures[0])


def test_a_file_that_is_gone_is_said(tmp_path):
    class Gone(PictureSource):
        def stamp(self, index):
            return None if index else "here"

        def record(self, index):
            if index:
                raise OSError(f"{index} is gone")
            return super().record(index)

    for _ in range(2):
        with pytest.raises(OSError, match="1 is gone"):
            gather_facts(Gone(SIZES), tmp_path)


def test_two_sources_of_equal_names_are_told_apart(tmp_path):
    """Both folders have a 0.png: their facts may not overwrite each other."""
    one, other = PictureSource(SIZES), PictureSource(SIZES)
    other.pictures = [noise(i + 100, size) for i, size in enumerate(SIZES)]
    other.versions = [7] * 3
    facts = [gather_facts(source, tmp_path) for source in (one, other)]
    assert [rows(f)[0][0] for f in facts] == [content_digest(s.pictures[0]) for s in (one, other)]


def test_parts_of_ranks_are_joined_in_order(tmp_path):
    """Three ranks, one after the other: each hands in what the others do."""

    class Taken(Together):
        """Runs all ranks' work in this process."""

        def __init__(self):
            super().__init__()
            self.world_size = 3

        def run(self, what, work):
            results = []
            for self.rank in range(3):
                results.append(work())
            self.rank = 0
            return results

        def share(self, total):
            return range(total)

    source = PictureSource(SIZES)
    facts = gather_facts(source, tmp_path, Taken())
    assert rows(facts) == 3 * rows(gather_facts(source, tmp_path))
    assert not list(tmp_path.glob(".*"))


def test_stamps_that_end_in_zero_bytes(tmp_path):
    stamps = np.zeros((3, 16), np.uint8)
    stamps[:, 0] = 1, 2, 3
    digests = np.full((3, 16), 5, np.uint8)
    table = Stamps(tmp_path / "stamps.npy")
    table.add(np.concatenate([stamps, digests], 1)[[2, 0]])
    found, known = Stamps(tmp_path / "stamps.npy").look_up(stamps)
    assert known.tolist() == [True, False, True]
    assert (found[known] == 5).all()


def test_another_table_is_refused(tmp_path):
    np.save(tmp_path / "stamps.npy", np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"stamps\.npy: expected a table of stamps"):
        Stamps(tmp_path / "stamps.npy")


@pytest.fixture
def opened_images(monkeypatch):
    """Indexes of the examples of shards whose image was read, in order."""
    read, record = [], ShardSource.record
    monkeypatch.setattr(ShardSource, "record", lambda self, i: read.append(i) or record(self, i))
    return read


def started(shards, tmp_path) -> Facts:
    """As a run that starts anew does."""
    source = ShardSource([str(path) for path in shards])
    source.check()
    return gather_facts(source, tmp_path / "digests")


def test_a_second_start_opens_no_image_of_shards(tmp_path, opened_images):
    shards = [img2dataset_shard(tmp_path / f"{i}.tar", 3, 3 * i) for i in range(2)]
    first = rows(started(shards, tmp_path))
    assert sorted(opened_images) == [0, 1, 2, 3, 4, 5]
    opened_images.clear()
    assert rows(started(shards, tmp_path)) == first
    assert opened_images == []
    img2dataset_shard(shards[1], 3, 6)  # other pictures in its place
    second = rows(started(shards, tmp_path))
    assert sorted(opened_images) == [3, 4, 5]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("packed_first", [False, True])
def test_shards_packed_by_this_project_beside_others(tmp_path, opened_images, packed_first):
    """The ones tell their digests, the others their stamps, whichever comes first; no start adds a stamp."""
    with ShardWriter(tmp_path / "packed") as writer:
        for i in range(2):
            writer.write(Record(f"{i}.png", png(i), ".png", (Caption("x"),)), (16, 16))
    (packed,) = (tmp_path / "packed").glob("*.tar")
    shards = [img2dataset_shard(tmp_path / "other.tar", 3), packed]
    other = [0, 1, 2]
    if packed_first:
        shards, other = shards[::-1], [2, 3, 4]
    first = rows(started(shards, tmp_path))
    assert sorted(opened_images) == other
    assert rows(started(shards, tmp_path)) == first
    assert len(opened_images) == 3
    assert len(np.load(tmp_path / "digests" / "stamps.npy")) == 3


def test_a_second_start_opens_no_image_of_a_hub_dataset(tmp_path, monkeypatch):
    keep_caches_in(tmp_path, monkeypatch)
    root = saved(tmp_path / "in")
    first = opened(root, tmp_path)
    first.check()
    facts = rows(gather_facts(first, tmp_path / "digests"))
    again = opened(root, tmp_path)
    again.check()
    monkeypatch.setattr(type(again), "record", lambda *_: pytest.fail("an image was read"))
    monkeypatch.setattr(type(again), "digest", lambda *_: pytest.fail("an image was read"))
    assert rows(gather_facts(again, tmp_path / "digests")) == facts


def test_what_killed_runs_left_goes_and_what_others_write_stays(tmp_path):
    names = [".a.piece", ".b.tmp", ".stamps.c.npy"]
    old, young = [[tmp_path / f"{name[:1]}{age}{name[1:]}" for name in names] for age in ("old", "young")]
    for path in [*old, *young]:
        path.write_bytes(b"")
    for path in old:
        os.utime(path, (then := time.time() - ABANDONED_S - 60, then))
    facts = gather_facts(PictureSource(SIZES), tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*young, facts.path, tmp_path / "stamps.npy"])


def test_stamps_of_other_digests_are_dropped(tmp_path):
    """Digests 1, 2 and 3; the second ends with zeros."""
    table = np.zeros((3, 32), np.uint8)
    table[:, 0] = 7, 8, 9
    table[:, 16] = 1, 2, 3
    table[[0, 2], 31] = 1
    stamps = Stamps(tmp_path / "stamps.npy")
    stamps.add(table)
    assert stamps.keep(np.frombuffer(table[[1, 2], 16:].tobytes(), "V16")) == 1
    for held in (stamps, Stamps(tmp_path / "stamps.npy")):
        assert held.look_up(table[:, :16])[1].tolist() == [False, True, True]
    assert stamps.keep(np.frombuffer(table[:, 16:].tobytes(), "V16")) == 0
