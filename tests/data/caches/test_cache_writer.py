"""Parts of a cache on disk: durable by and by, taken over after a kill, never two writers of one."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import lmdb
import pytest

from lit_sd.data.caches import writer as cache_writer
from lit_sd.data.caches.parts import Parts
from lit_sd.data.caches.writer import PARTIAL, PartWriter, take_over


def key(i: int) -> bytes:
    return hashlib.md5(str(i).encode()).digest()


def partial(folder):
    return list(folder.glob(f"*{PARTIAL}"))


def read(folder, keys):
    parts = Parts(folder, "k")
    parts.refresh()
    return [None if value is None else bytes(value) for value in parts.values(keys)]


def test_a_part_is_seen_once_it_is_closed(tmp_path):
    writer = PartWriter(tmp_path, "k", every=2)
    for i in range(3):
        writer.write(key(i), b"%d" % i)
    assert writer.written == 2
    assert read(tmp_path, [key(0)]) == [None]
    writer.close()
    assert read(tmp_path, [key(2), key(0), key(7)]) == [b"2", b"0", None]
    assert partial(tmp_path) == []
    (part,) = tmp_path.iterdir()
    assert json.loads((part / "manifest.json").read_text())["entries"] == 3


def test_nothing_written_leaves_nothing(tmp_path):
    PartWriter(tmp_path, "k").close()
    assert list(tmp_path.iterdir()) == []


def test_it_grows_past_the_room_it_began_with(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_writer, "ROOM", 1 << 16)
    with PartWriter(tmp_path, "k", every=3) as writer:
        for i in range(10):
            writer.write(key(i), bytes([i]) * 50_000)
    assert read(tmp_path, [key(9), key(0)]) == [b"\x09" * 50_000, b"\0" * 50_000]


def test_bytes_make_it_durable_too(tmp_path):
    writer = PartWriter(tmp_path, "k", every=1000, every_bytes=100)
    writer.write(key(0), b"x" * 60)
    assert writer.written == 0
    writer.write(key(1), b"x" * 60)
    assert writer.written == 2
    writer.close()


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from lit_sd.data.caches.writer import PartWriter
    import hashlib
    writer = PartWriter(Path(sys.argv[1]), "k", every=4)
    for i in range(10):
        writer.write(hashlib.md5(str(i).encode()).digest(), b"%d" % i)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_had_made_durable_is_taken_over(tmp_path):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert take_over(tmp_path, "k") == 8
    assert read(tmp_path, [key(i) for i in range(9)]) == [b"%d" % i for i in range(8)] + [None]
    assert take_over(tmp_path, "k") == 0


def test_an_exception_leaves_what_was_durable(tmp_path):
    def interrupted():
        with PartWriter(tmp_path, "k", every=1) as writer:
            writer.write(key(0), b"0")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read(tmp_path, [key(0)]) == [None]
    assert take_over(tmp_path, "k") == 1
    assert read(tmp_path, [key(0)]) == [b"0"]


def test_a_part_whose_writer_lives_is_left_alone(tmp_path):
    writer = PartWriter(tmp_path, "k", every=1)
    writer.write(key(0), b"0")
    pid = os.fork()
    if pid == 0:  # another process, which shares no lock
        taken = take_over(tmp_path, "k")
        os._exit(taken)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(partial(tmp_path)) == 1
    writer.close()
    assert read(tmp_path, [key(0)]) == [b"0"]


def test_a_part_is_locked_until_it_has_its_name(tmp_path, monkeypatch):
    """Another process that looks right before the renaming finds it locked, and leaves it alone."""
    writer = PartWriter(tmp_path, "k", every=1)
    writer.write(key(0), b"0")
    rename, taken = Path.rename, []

    def look_first(path, target):
        if path.suffix == PARTIAL:
            pid = os.fork()
            if pid == 0:
                os._exit(take_over(tmp_path, "k") + 10 * len(list(tmp_path.glob("*/manifest.json"))))
            taken.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look_first)
    writer.close()
    assert taken == [10]
    assert read(tmp_path, [key(0)]) == [b"0"]
    assert not list(tmp_path.glob("*/writer.lock"))


def test_a_torn_file_is_deleted_and_said(tmp_path, caplog):
    broken = tmp_path / f"abc{PARTIAL}"
    broken.mkdir()
    (broken / "data.mdb").write_bytes(b"no database" * 1000)
    assert take_over(tmp_path, "k") == 0
    assert "abc.partial was left half-written" in caplog.text
    assert not broken.exists()


def test_a_full_disk_is_said_with_what_to_do(tmp_path, monkeypatch):
    """As LMDB reports it: an error of its own, that the device has no space."""
    writer = PartWriter(tmp_path, "k", every=2)
    writer.write(key(0), b"0")
    writer.write(key(1), b"1")

    class Full:
        def begin(self, write):
            raise lmdb.DiskError("mdb_txn_commit: No space left on device")

        def close(self):
            real.close()

    real, writer._env = writer._env, Full()
    writer.write(key(2), b"2")
    with pytest.raises(OSError, match=r"data\.mdb can't be written: .*MiB are free there.*data\.cache_dir"):
        writer.commit()
    writer.abandon()
    assert take_over(tmp_path, "k") == 2
