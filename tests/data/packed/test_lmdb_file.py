"""A packed file is refused unless it is whole, and opened once in each process (F12)."""

import json
import os
import sys
import threading

import pytest
from tiny_packed import example, pack_all, png

from lit_sd.data.lmdb import LmdbSource, LmdbWriter


@pytest.fixture
def packed(tmp_path):
    pack_all(tmp_path / "packed", [example(i) for i in range(7)])
    return tmp_path / "packed"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("partial", r"out was not packed to its end, out\.partial is there; run the packing again"),
        ("inside", r"out\.partial is half-written; run the packing again"),
        ("manifest", r"out has no manifest\.json: it is half-written"),
        ("json", r"manifest\.json can't be read"),
        ("kind", r"expected lit-sd-lmdb, version 1, got lit-sd-lmdb, version 2"),
        ("count", r"the manifest says 8 examples, the file holds 7"),
        ("cut", r"data\.mdb is truncated: 4,096 bytes, expected .* copy it again"),
        ("data", r"data\.mdb is truncated: 0 bytes"),
        ("absent", r"data\.root: .*out does not exist; relative paths count from"),
        ("file", r"out is a file; expected the folder around it"),
    ],
)
def test_what_is_not_whole_is_refused(packed, damage, message):
    out = packed.rename(packed.with_name("out"))
    manifest = json.loads((out / "manifest.json").read_text())
    match damage:
        case "partial":
            out.rename(out.with_name("out.partial"))
        case "inside":
            out = out.rename(out.with_name("out.partial"))
        case "manifest":
            (out / "manifest.json").unlink()
        case "json":
            (out / "manifest.json").write_text("{")
        case "kind":
            (out / "manifest.json").write_text(json.dumps(manifest | {"version": 2}))
        case "count":
            (out / "manifest.json").write_text(json.dumps(manifest | {"count": 8}))
        case "cut":
            os.truncate(out / "data.mdb", 4096)
        case "data":
            (out / "data.mdb").unlink()
        case "absent" | "file":
            out.rename(out.with_name("elsewhere"))
            if damage == "file":
                out.write_text("")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LmdbSource(out).check()


def test_a_damaged_record_is_named_by_its_row(packed):
    with LmdbWriter(packed.with_name("broken")) as writer:
        writer.write(example(0), (8, 6))
        writer._batch[0] = b"\xff\xff\0\0nonsense"
    with pytest.raises(OSError, match="broken: example 0 is damaged"):
        LmdbSource(packed.with_name("broken")).record(0)
    with pytest.raises(IndexError):
        LmdbSource(packed).record(7)


def test_two_sources_share_one_file(packed):
    one, other = LmdbSource(packed), LmdbSource(packed / ".." / "packed", prompt="p")
    assert one.record(0).image == other.record(0).image == png(0)
    assert one._rows is other._rows
    del one
    assert other.record(1).image == png(1)


def test_a_new_file_at_the_same_place_is_another(tmp_path):
    pack_all(tmp_path / "out", [example(0)])
    old = LmdbSource(tmp_path / "out")
    old.check()
    (tmp_path / "out").rename(tmp_path / "gone")
    pack_all(tmp_path / "out", [example(1)])
    assert LmdbSource(tmp_path / "out").record(0) == example(1)
    assert old.record(0) == example(0)


def test_threads_read_at_once(packed):
    source, found = LmdbSource(packed), []

    def read() -> None:
        found.extend((i, source.record(i)) for _ in range(20) for i in range(7))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 560
    assert all(record == example(i) for i, record in found)


def test_a_fork_never_uses_the_handle_it_inherits(packed):
    source = LmdbSource(packed)
    source.load(0)
    handle, reader = source._rows._env, os.getpid()
    child = os.fork()
    if child == 0:
        same = source.record(3) == example(3) and source._rows._env is not handle
        again = LmdbSource(packed).record(4) == example(4)  # and one that the child makes itself
        os._exit(0 if same and again and source._rows._process != reader else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert source.record(2) == example(2)
    assert source._rows._env is handle


def test_a_fork_may_drop_what_it_inherits_and_open_it_anew(packed):
    source = LmdbSource(packed)
    source.load(0)
    child = os.fork()
    if child == 0:
        del source
        os._exit(0 if LmdbSource(packed).record(4) == example(4) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert source.record(2) == example(2)


def test_without_the_library_it_says_what_to_install(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ModuleNotFoundError, match=r"lmdb is needed .*pip install 'lit-sd\[data\]'"):
        LmdbSource(packed).check()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-sd\[data\]'"):
        LmdbWriter(packed.with_name("new"))
