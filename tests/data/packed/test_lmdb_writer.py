"""Packing: what is written is there whole or not at all, and a kill costs one batch."""

import itertools
import json
import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
from tiny_packed import SHAPES, example, pack_all, png, shorten_chunks

from lit_sd.data.lmdb import LmdbSource, LmdbWriter
from lit_sd.data.packed import lmdb_writer


@pytest.fixture
def packed(tmp_path):
    pack_all(tmp_path / "packed", [example(i) for i in range(7)])
    return tmp_path / "packed"


@pytest.fixture
def short_chunks(monkeypatch):
    shorten_chunks(monkeypatch)


def test_identity_follows_content_and_order_not_batches(tmp_path, short_chunks):
    records = [example(i) for i in range(9)]
    variants = {
        "same": records,
        "batches": records,
        "order": records[::-1],
        "fewer": records[:-1],
        "name": [*records[:-1], replace(records[-1], id="other")],
        "pixels": [replace(records[0], image=png(99, SHAPES[0])), *records[1:]],
    }
    for name, variant in variants.items():
        pack_all(tmp_path / name, variant, commit_every=2 if name == "batches" else 1000)
    found = {name: LmdbSource(tmp_path / name).identity() for name in variants}
    assert found["same"] == found["batches"]
    assert len(set(found.values())) == 5


def test_the_file_grows_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_writer, "FIRST_MAP", 2**16)
    records = [replace(example(i), image=os.urandom(30_000)) for i in range(40)]
    pack_all(tmp_path / "out", records, commit_every=7)
    source = LmdbSource(tmp_path / "out")
    assert [source.record(i) for i in range(40)] == records
    assert (tmp_path / "out" / "data.mdb").stat().st_size < 2 * 40 * 30_000  # no reserve is left in it


def test_a_batch_is_bounded_in_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_writer, "COMMIT_BYTES", 10_000)
    writer = LmdbWriter(tmp_path / "out")
    for i in range(5):
        writer.write(replace(example(i), image=os.urandom(4000)), (1, 1))
    with writer._env.begin() as view:
        assert view.stat(writer._tables[b"records"])["entries"] == 3
    writer.__exit__(ValueError)


def test_what_is_there_is_not_overwritten(packed):
    with pytest.raises(FileExistsError, match="packed is there already"):
        LmdbWriter(packed, resume=True)
    writer = LmdbWriter(packed.with_name("other"))
    with pytest.raises(OSError, match="another process is packing to"):
        LmdbWriter(packed.with_name("other"), resume=True)
    writer.__exit__(KeyboardInterrupt)
    with pytest.raises(FileExistsError, match=r"other\.partial is there, from a packing that didn't end"):
        LmdbWriter(packed.with_name("other"))


def fail_at(out, stop: int, commit_every: int) -> None:
    with LmdbWriter(out, commit_every=commit_every) as writer:
        for i in range(stop):
            writer.write(example(i), SHAPES[i % 3])
        raise RuntimeError


def test_an_exception_leaves_what_can_be_resumed(tmp_path):
    with pytest.raises(RuntimeError):
        fail_at(tmp_path / "out", 5, 2)
    assert not (tmp_path / "out").exists()
    with LmdbWriter(tmp_path / "out", resume=True) as writer:
        assert writer.written == 4


def test_a_truncated_part_is_not_resumed(tmp_path):
    with pytest.raises(RuntimeError):
        fail_at(tmp_path / "out", 5, 1)
    os.truncate(tmp_path / "out.partial" / "data.mdb", 4 * 4096)
    with pytest.raises(ValueError, match=r"data\.mdb is truncated; delete .*out\.partial and pack again"):
        LmdbWriter(tmp_path / "out", resume=True)


def write_until_killed(out, stop: int | None, commit_every: int) -> None:
    writer = LmdbWriter(out, resume=True, commit_every=commit_every)
    for i in itertools.count(writer.written):
        if i == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        writer.write(example(i), SHAPES[i % 3])


def killed(out, stop: int | None, commit_every: int, after: float = 30) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=write_until_killed, args=(out, stop, commit_every)
    )
    process.start()
    process.join(after)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_kill_costs_what_was_not_committed_and_no_more(tmp_path, short_chunks):
    pack_all(tmp_path / "straight", [example(i) for i in range(23)])
    out = tmp_path / "out"
    for stop, left in ((2, 0), (3, 3), (8, 6), (12, 12), (22, 21)):
        killed(out, stop, 3)
        writer = LmdbWriter(out, resume=True)
        assert writer.written == left
        writer.__exit__(KeyboardInterrupt)
    with LmdbWriter(out, resume=True) as writer:
        for i in range(writer.written, 23):
            writer.write(example(i), SHAPES[i % 3])
    one, other = LmdbSource(tmp_path / "straight"), LmdbSource(out)
    assert [other.record(i) for i in range(23)] == [one.record(i) for i in range(23)]
    assert other.sizes().tolist() == one.sizes().tolist()
    assert other.identity() == one.identity()
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (out, tmp_path / "straight")]
    assert manifests[0]["bytes"] == manifests[1]["bytes"]


def test_a_kill_at_any_moment_leaves_a_whole_number_of_batches(tmp_path):
    out, before = tmp_path / "out", 0
    for seconds in (0.1, 0.13, 0.17):
        killed(out, None, 1, after=seconds)
        writer = LmdbWriter(out, resume=True)
        assert writer.written >= before
        before = writer.written
        writer.__exit__(KeyboardInterrupt)
    LmdbWriter(out, resume=True).close()
    source = LmdbSource(out)
    assert len(source) == before > 0
    assert all(source.record(i) == example(i) for i in range(before))
