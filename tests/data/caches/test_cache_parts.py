"""All parts of a cache read as one, from any process; what is damaged or foreign is refused."""

import json
import multiprocessing
import os
import pickle
import shutil
import time

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from lit_sd.data.caches.leftovers import ABANDONED_S
from lit_sd.data.caches.parts import INDEX, Parts
from lit_sd.data.caches.writer import KEY, PartWriter
from lit_sd.together import Together


def key(i: int) -> bytes:
    """Ends with zero bytes, which numpy's own text type drops."""
    return i.to_bytes(2, "big") + b"\xff" * 12 + b"\0\0"


def write(folder, numbers, kind="k"):
    with PartWriter(folder, kind) as writer:
        for i in numbers:
            writer.write(key(i), b"value %d" % i)


def seen(folder, kind="k") -> Parts:
    parts = Parts(folder, kind)
    parts.refresh()
    return parts


def values(parts, numbers):
    found = parts.values([key(i) for i in numbers])
    return [None if value is None else int(bytes(value).split()[1]) for value in found]


def keys(numbers):
    return np.frombuffer(b"".join(map(key, numbers)), KEY)


@pytest.fixture
def three(tmp_path):
    """Parts with 0 to 29, of which 5 is in two."""
    for numbers in ([*range(0, 30, 3), 5], range(1, 30, 3), range(2, 30, 3)):
        write(tmp_path, numbers)
    return tmp_path


@pytest.mark.parametrize("indexed", [False, True])
def test_several_parts_are_read_as_one(three, indexed):
    parts = seen(three)
    if indexed:
        parts.write_index()
        parts = seen(three)
    numbers = [17, 0, 29, 30, 5, 5, 999]
    assert values(parts, numbers) == [17, 0, 29, None, 5, 5, None]
    assert parts.has(keys(numbers)).tolist() == [True, True, True, False, True, True, False]
    assert len(parts) == 31
    assert parts.nbytes == sum(path.stat().st_size for path in three.glob("*/data.mdb"))


def test_one_part_and_none(tmp_path):
    parts = seen(tmp_path)
    assert values(parts, [1, 2]) == [None, None]
    assert not parts.has(keys([1, 2])).any()
    write(tmp_path, [2])
    assert values(parts, [1, 2]) == [None, None]
    parts.refresh()
    assert values(parts, [1, 2]) == [None, 2]
    assert parts.has(keys([1, 2])).tolist() == [False, True]


def test_an_index_is_of_the_parts_that_there_are(three):
    parts = seen(three)
    parts.write_index()
    before = sorted(path.name for path in (three / INDEX).iterdir())
    write(three, [77])
    parts.refresh()
    assert values(parts, [77, 3]) == [77, 3]
    parts.write_index()
    after = sorted(path.name for path in (three / INDEX).iterdir())
    assert len(before) == len(after) == 2
    assert not set(before) & set(after)


class Values(Dataset):
    def __init__(self, parts):
        self.parts = parts

    def __len__(self):
        return 30

    def __getitem__(self, i):
        return values(self.parts, [i])[0]


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_read_here_and_then_in_workers(three, start):
    """F12: item 0 in the parent, then two workers, pickled or forked."""
    items = Values(seen(three))
    assert items[0] == 0
    loader = DataLoader(items, num_workers=2, multiprocessing_context=start, collate_fn=list)
    assert [row[0] for row in loader] == list(range(30))
    assert items[7] == 7
    assert values(pickle.loads(pickle.dumps(items.parts)), [4]) == [4]


def test_a_part_is_opened_once_whoever_reads_it(tmp_path):
    write(tmp_path, [1])
    first, second = seen(tmp_path), seen(tmp_path)
    assert values(first, [1]) == values(second, [1]) == [1]
    assert first._opened()[0] is second._opened()[0]
    del first
    assert values(second, [1]) == [1]


def test_a_child_that_closes_does_not_close_the_parents(tmp_path):
    write(tmp_path, [1])
    parts = seen(tmp_path)
    values(parts, [1])
    child = multiprocessing.get_context("fork").Process(target=lambda: values(parts, [1]))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert values(parts, [1]) == [1]


def only(folder):
    return next(path for path in folder.iterdir() if path.is_dir())


def test_a_truncated_file_is_refused(tmp_path):
    write(tmp_path, range(200))
    data = only(tmp_path) / "data.mdb"
    os.truncate(data, data.stat().st_size - 4096)
    with pytest.raises(ValueError, match=r"is damaged: expected .* bytes .* delete it"):
        seen(tmp_path)


def test_foreign_folders_are_refused(tmp_path):
    (tmp_path / "holiday").mkdir()
    with pytest.raises(ValueError, match=r"holiday is no part of a cache .*data\.cache_dir"):
        seen(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("version", 99), ("format", "other"), ("kind", "texts")])
def test_parts_of_another_kind_or_version_are_refused(tmp_path, field, value):
    write(tmp_path, [1])
    manifest = only(tmp_path) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=r"expected lit-sd-cache, version 1, of k, got .*delete it"):
        seen(tmp_path)


def test_a_file_of_another_part_is_refused(tmp_path):
    """Of equal length, but not what the manifest counts."""
    write(tmp_path / "a", [1, 2])
    write(tmp_path / "b", [1])
    a, b = (only(tmp_path / name) for name in "ab")
    shutil.copy(a / "data.mdb", b / "data.mdb")
    with pytest.raises(ValueError, match=r"holds 2 entries, its manifest says 1"):
        values(seen(tmp_path / "b"), [1])


def test_what_killed_processes_left_goes_and_what_others_write_stays(three):
    """Parts that were not even locked yet, and halves of an index; the index is hidden and old, too."""
    seen(three).write_index()
    left = [three / ".0123456789abcdef", three / INDEX / "x.1.tmp.npy"]
    others = [three / ".fedcba9876543210", three / INDEX / "x.2.tmp.npy"]
    for folder, file in (left, others):
        folder.mkdir()
        file.write_bytes(b"")
    write(three, [30])
    then = time.time() - ABANDONED_S - 60
    for path in (*left, three / INDEX):
        os.utime(path, (then, then))
    parts = Parts(three, "k")
    parts.agree(Together())
    assert [path.exists() for path in (*left, *others)] == [False, False, True, True]
    assert values(parts, range(31)) == list(range(31))
