"""What is counted of a source's parts, by hand, and when it is counted anew (F14)."""

import io
import os
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny_shards import jpeg

from lit_sd.data import webdataset as shards_module
from lit_sd.data.buckets import Buckets
from lit_sd.data.counts import Counts, code_of, count, kept
from lit_sd.data.pools import Pool
from lit_sd.data.shards.store import IndexFolder, own_share
from lit_sd.data.webdataset import ShardSource

WIDE, TALL = (8, 16), (16, 8)
PARTS = [[WIDE, TALL, WIDE], [TALL], [None, WIDE]]


def part(number):
    return np.array([-1 if shape is None else code_of(shape) for shape in PARTS[number]]), None


def counted(counts: Counts) -> dict:
    return {shape: sums.tolist() for shape, sums in counts.sums.items()}


def test_images_are_counted_by_part_and_shape():
    counts = count(3, part)
    assert counted(counts) == {WIDE: [2, 0, 1], TALL: [1, 1, 0]}
    assert counts.held == {WIDE: 3, TALL: 2}


def test_weights_are_summed():
    weights = [[0.4, 0.4], [0.25], [0.5]]
    counts = count(3, lambda i: (np.full(len(weights[i]), code_of(WIDE)), np.array(weights[i])))
    assert counted(counts) == {WIDE: [0.8, 0.25, 0.5]}
    assert counts.held == {WIDE: 4}


def test_another_shape_or_weight_is_other_content():
    plain = count(1, lambda _: (np.array([5, 6]), None)).content
    assert plain == count(1, lambda _: (np.array([5, 6]), None)).content
    assert plain != count(1, lambda _: (np.array([6, 5]), None)).content
    assert plain != count(1, lambda _: (np.array([5, 6]), np.array([1.0, 2.0]))).content


def test_what_was_counted_is_kept(tmp_path):
    path, made = tmp_path / "new" / "counts.npz", count(3, part)
    assert kept(path, 3, lambda: made) is made
    again = kept(path, 3, lambda: pytest.fail("counted twice"))
    assert counted(again) == counted(made)
    assert (again.held, again.content) == (made.held, made.content)
    assert kept(None, 3, lambda: made) is made


@pytest.mark.parametrize("spoil", ["cut", "empty", "other parts"])
def test_a_file_that_does_not_fit_is_counted_anew(tmp_path, spoil):
    path, made = tmp_path / "counts.npz", count(3, part)
    kept(path, 3, lambda: count(2, part) if spoil == "other parts" else made)
    if spoil != "other parts":
        path.write_bytes(path.read_bytes()[: 100 if spoil == "cut" else 0])
    assert kept(path, 3, lambda: made) is made
    assert counted(kept(path, 3, lambda: pytest.fail("not mended"))) == counted(made)


def test_of_several_that_ask_at_once_one_counts(tmp_path):
    asked = []

    def slow() -> Counts:
        asked.append(1)
        time.sleep(0.2)
        return count(3, part)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: kept(tmp_path / "counts.npz", 3, slow), range(3)))
    assert len(asked) == 1
    assert all(counted(counts) == counted(found[0]) for counts in found)


def write_shard(path, first, shapes):
    with tarfile.open(path, "w") as tar:
        for i, (height, width) in enumerate(shapes, first):
            for name, data in ((f"{i:03}.jpg", jpeg(i, height, width)), (f"{i:03}.txt", b"a picture")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def test_a_second_plan_of_the_same_shards_reads_no_index(tmp_path, monkeypatch):
    """Three shards of 2 + 1 + 2 images; buckets of 16 are 16x16, and for twice as wide images 8x24."""
    monkeypatch.setattr(shards_module, "WHOLE", 0)
    square, wide = (16, 16), (8, 24)
    for i, shapes in enumerate([[square, wide], [wide], [square, square]]):
        write_shard(tmp_path / f"{i}.tar", 10 * i, shapes)

    def planned() -> Pool:
        source = ShardSource(str(tmp_path), name="s")
        return Pool("s", [source], 1, buckets=Buckets([16], 8, 4), square=square, shuffle_shards=1)

    first = planned()
    assert counted(first.members[0].counts) == {square: [1, 0, 2], wide: [1, 1, 0]}
    with monkeypatch.context() as patch:
        patch.setattr(IndexFolder, "load", lambda *_: pytest.fail("read an index"))
        again = planned()
        assert counted(again.members[0].counts) == counted(first.members[0].counts)
        assert again.fingerprint() == first.fingerprint()
    write_shard(tmp_path / "1.tar", 10, [square])
    os.utime(tmp_path / "1.tar", ns=(1, 1))
    assert counted(planned().members[0].counts) == {square: [1, 1, 2], wide: [1, 0, 0]}


@pytest.mark.parametrize(
    ("told", "share"),
    [
        ({}, range(10)),
        ({"RANK": "1", "WORLD_SIZE": "3"}, range(3, 6)),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, range(7, 10)),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, range(5)),
    ],
)
def test_a_process_knows_its_share_before_ranks_can_talk(monkeypatch, told, share):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert own_share(10) == share


def test_ranks_index_different_shards_first(tmp_path, monkeypatch):
    """Rank 1 of 2 begins with the third of four shards, and then goes through what rank 0 may have done."""
    for i in range(4):
        write_shard(tmp_path / f"{i}.tar", 10 * i, [(8, 8)] * (i + 1))
    monkeypatch.setattr("lit_sd.data.shards.store.THREADS", 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    source = ShardSource(str(tmp_path), name="s")
    opened = []
    real = source._files.open
    monkeypatch.setattr(source._files, "open", lambda shard: (opened.append(shard[-5:]), real(shard))[1])
    source.check()
    assert opened == ["2.tar", "3.tar", "0.tar", "1.tar"]
    assert [source.record(i).id for i in (0, 1, 3, 6)] == ["0/000", "1/010", "2/020", "3/030"]
