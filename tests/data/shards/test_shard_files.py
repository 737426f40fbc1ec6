"""Reading parts of shards: the right ones, or an error that names the shard."""

import os
import pickle
import signal
import threading

import pytest
from tiny_shards import img2dataset_shard, jpeg, png, tar

from lit_sd.data.shards import files as shard_files
from lit_sd.data.shards.files import Recent, ShardFiles
from lit_sd.data.shards.index import index_shard
from lit_sd.data.shards.members import Reading, Span


def spans_of(path, row: int) -> dict[str, Span]:
    descriptor = os.open(path, os.O_RDONLY)
    index = index_shard(descriptor, Reading())
    os.close(descriptor)
    roles = ("image", "text", "mask")
    return {role: span for role in roles if (span := index.span(row, role)) is not None}


def test_files_of_an_example(tmp_path):
    path = img2dataset_shard(tmp_path / "0.tar", 3)
    found = ShardFiles().read(str(path), "000000001", spans_of(path, 1), path.stat().st_size)
    assert found == {"image": jpeg(1, 17, 24), "text": b"picture 1"}


def test_files_far_from_one_another(tmp_path):
    files = [("0.png", png(0)), ("1.bin", bytes(200_000)), ("0.mask.png", png(1))]
    path = tar(tmp_path / "0.tar", files)
    assert ShardFiles().read(str(path), "0", spans_of(path, 0), path.stat().st_size) == {
        "image": png(0),
        "mask": png(1),
    }


def test_another_shard_under_the_same_name_is_noticed(tmp_path):
    files = [("0.png", png(0)), ("1.png", png(1, 20, 20))]
    path = tar(tmp_path / "0.tar", files)
    spans, size = spans_of(path, 1), path.stat().st_size
    path = tar(tmp_path / "0.tar", files[::-1])
    assert path.stat().st_size == size, "or the test shows nothing"
    with pytest.raises(OSError, match=r"0\.tar: 1 is no longer where it was indexed"):
        ShardFiles().read(str(path), "1", spans, size)
    path = tar(tmp_path / "0.tar", [("0.png", png(0)), ("2.png", png(1, 20, 20))])
    with pytest.raises(OSError, match=r"0\.tar: 1 is no longer where it was indexed"):
        ShardFiles().read(str(path), "1", spans, size)
    path.write_bytes(b"short")
    with pytest.raises(OSError, match=rf"0\.tar: it is not the {size} bytes that were indexed"):
        ShardFiles().read(str(path), "1", spans, size)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"0\.tar"):
        ShardFiles().read(str(path), "1", spans, size)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_files, "OPEN_SHARDS", 3)
    paths = [tar(tmp_path / f"{i}.tar", {"0.png": png(i)}) for i in range(6)]
    spans, files, before = spans_of(paths[0], 0), ShardFiles(), open_files()
    for _ in range(2):
        for i, path in enumerate(paths):
            assert files.read(str(path), "0", spans, path.stat().st_size)["image"] == png(i)
    assert open_files() == before + 3
    again = pickle.loads(pickle.dumps(files))
    assert open_files() == before + 3, "a copy has opened nothing yet"
    assert again.read(str(paths[0]), "0", spans, paths[0].stat().st_size)["image"] == png(0)
    del files, again
    assert open_files() == before


def test_what_was_asked_for_last_is_kept():
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return key * 10

    recent: Recent[int, int] = Recent(2)
    assert [recent.get(key, make) for key in (1, 2, 1, 3, 1, 2)] == [10, 20, 10, 30, 10, 20]
    assert made == [1, 2, 3, 2]


def test_a_fork_starts_anew_though_another_thread_held_the_lock():
    recent: Recent[str, int] = Recent(2)
    recent.get("process", lambda _: os.getpid())
    release, held = threading.Event(), threading.Event()

    def hold() -> None:
        with recent._lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends it where it waits for ever
        os._exit(0 if recent.get("process", lambda _: os.getpid()) == os.getpid() else 1)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
