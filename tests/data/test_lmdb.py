"""Packed datasets: nothing is lost, half-written ones are refused, a kill costs one batch, and readers
survive forks (F12).
"""

import io
import itertools
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from lit_sd.data import lmdb, lmdb_file, lmdb_writer
from lit_sd.data.caption_rules import Caption
from lit_sd.data.lmdb import LmdbSource, LmdbWriter
from lit_sd.data.source import Record

SHAPES = [(8, 6), (5, 9), (7, 7)]


def png(i: int, size: tuple[int, int] | None = None, kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(i).integers(0, 255, (*(size or SHAPES[i % 3]), 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def example(i: int) -> Record:
    return Record(f"{i % 2}/é{i}.png", png(i), ".png", (Caption(f"caption {i}"),))


def pack_all(out, records, **options) -> None:
    with LmdbWriter(out, **options) as writer:
        for i, record in enumerate(records):
            writer.write(record, SHAPES[i % 3])


@pytest.fixture
def packed(tmp_path):
    pack_all(tmp_path / "packed", [example(i) for i in range(7)])
    return tmp_path / "packed"


@pytest.fixture
def short_chunks(monkeypatch):
    for module in (lmdb_file, lmdb_writer):
        monkeypatch.setattr(module, "CHUNK", 4)


def test_everything_comes_back(tmp_path):
    rich = Record(
        "rich",
        png(1),
        ".png",
        (Caption("one", 3.0), Caption("zwei 🐈")),
        mask=png(2, (5, 9)),
        control=png(3, (5, 9)),
        weight=2.5,
        extra={"url": "u", "tags": [1, "a"]},
    )
    records = [example(0), rich, example(2)]
    pack_all(tmp_path / "out", records)
    source = LmdbSource(tmp_path / "out")
    assert len(source) == 3
    assert [source.record(i) for i in range(3)] == records
    assert list(source.ids()) == ["0/é0.png", "rich", "0/é2.png"]
    assert source.ids()[-1] == "0/é2.png"
    assert source.sizes().tolist() == [[8, 6], [5, 9], [7, 7]]
    assert source.sizes().dtype == np.int32
    assert source.draw_weights().tolist() == [1.0, 2.5, 1.0]
    assert source.captions() == ["caption 0", "one", "zwei 🐈", "caption 2"]
    assert [source.digest(i) for i in range(3)] == [record.digest for record in records]
    assert source.blocks().tolist() == [0, 3]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data.mdb", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {
        "count": 3,
        "weighted": 1,
        "masks": 1,
        "controls": 1,
        "uncaptioned": 0,
    }.items() <= manifest.items()


def test_pictures_are_decoded_with_mask_and_control(tmp_path):
    pack_all(tmp_path / "out", [replace(example(0), mask=png(5, (8, 6)), control=png(6, (8, 6)))])
    picture = LmdbSource(tmp_path / "out").load(0)
    for image, i in ((picture.image, 0), (picture.control, 6)):
        assert np.array_equal(np.asarray(image), np.asarray(Image.open(io.BytesIO(png(i, (8, 6))))))
    assert picture.mask.mode == "L"
    assert (picture.size, picture.captions) == ((8, 6), (Caption("caption 0"),))


def test_a_file_that_can_not_be_decoded_is_named(tmp_path):
    pack_all(tmp_path / "out", [replace(example(0), image=png(0)[:-40])])
    with pytest.raises(OSError, match=r"train: 0/é0\.png: can't be read as an image"):
        LmdbSource(tmp_path / "out", name="train").load(0)


def test_all_of_equal_weight_have_no_weights(packed):
    assert LmdbSource(packed).draw_weights() is None


def test_ranges_reach_over_chunks(tmp_path, short_chunks):
    records = [replace(example(i), weight=1.0 if i < 8 else i / 4) for i in range(11)]
    pack_all(tmp_path / "out", records, commit_every=3)
    source = LmdbSource(tmp_path / "out")
    sizes, weights = [list(SHAPES[i % 3]) for i in range(11)], [record.weight for record in records]
    for start, stop in itertools.product(range(12), (None, *range(13))):
        assert source.sizes(start, stop).tolist() == sizes[start:stop]
        assert source.draw_weights(start, stop).tolist() == weights[start:stop]
    assert list(source.ids()) == [record.id for record in records]


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


def test_many_examples_are_blocks_of_a_million(packed, monkeypatch):
    assert lmdb.BLOCK == 1_000_000
    monkeypatch.setattr(lmdb, "BLOCK", 3)
    assert LmdbSource(packed).blocks().tolist() == [0, 3, 6, 7]


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


def test_an_empty_one_is_refused(tmp_path):
    LmdbWriter(tmp_path / "out").close()
    with pytest.raises(ValueError, match=r"data\.root=.*out holds no images"):
        LmdbSource(tmp_path / "out").check()
    with pytest.raises(ValueError, match=r"data\.root is not set; set data\.root=FOLDER"):
        LmdbSource(None)


def test_a_damaged_record_is_named_by_its_row(packed):
    with LmdbWriter(packed.with_name("broken")) as writer:
        writer.write(example(0), (8, 6))
        writer._batch[0] = b"\xff\xff\0\0nonsense"
    with pytest.raises(OSError, match="broken: example 0 is damaged"):
        LmdbSource(packed.with_name("broken")).record(0)
    with pytest.raises(IndexError):
        LmdbSource(packed).record(7)


def test_verify_finds_bad_images_and_changed_bytes(tmp_path):
    records = [example(i) for i in range(6)]
    records[2] = replace(records[2], image=png(0)[:-40])
    with LmdbWriter(tmp_path / "out") as writer:
        for record in records:
            writer.write(record, (8, 6))
        writer._batch[4] = writer._batch[4].replace(records[4].digest.hex().encode(), b"0" * 32)
    LmdbSource(tmp_path / "out").check()
    with pytest.raises(ValueError, match=r"2 of 6 .*é2\.png \(Truncated.*é4\.png \(its bytes are not those"):
        LmdbSource(tmp_path / "out", verify=True).check()
    source = LmdbSource(tmp_path / "out", verify=True, bad_files="skip")
    assert list(source.ids()) == [records[i].id for i in (0, 1, 3, 5)]
    assert [source.record(i) for i in range(4)] == [records[i] for i in (0, 1, 3, 5)]
    assert source.blocks().tolist() == [0, 4]
    assert "they are skipped" in source.notes[0]
    assert source.identity() != LmdbSource(tmp_path / "out").identity()
    with pytest.raises(ValueError, match="max_bad_share"):
        LmdbSource(tmp_path / "out", verify=True, bad_files="skip", max_bad_share=0.3).check()


def test_missing_captions_by_policy(tmp_path, short_chunks):
    blank = (1, 4, 5)
    texts = [() if i in blank[1:] else (Caption(" "),) if i == 1 else (Caption(f"c{i}"),) for i in range(7)]
    pack_all(tmp_path / "out", [replace(example(i), captions=texts[i]) for i in range(7)])

    def captions(**options) -> list[str]:
        source = LmdbSource(tmp_path / "out", **options)
        return ["".join(caption.text for caption in source.record(i).captions) for i in range(len(source))]

    with pytest.raises(
        ValueError, match=r"3 of 7 images have no caption: 1/é1\.png, 0/é4\.png, 1/é5\.png; wri"
    ):
        captions()
    assert captions(missing_captions="skip") == ["c0", "c2", "c3", "c6"]
    assert captions(missing_captions="empty") == ["c0", "", "c2", "c3", "", "", "c6"]
    assert captions(missing_captions="prompt", prompt="p") == ["c0", "p", "c2", "c3", "p", "p", "c6"]
    assert captions(prompt="p") == ["p"] * 7
    assert LmdbSource(tmp_path / "out", prompt="p").captions() == ["p"] * 7
    skipping = LmdbSource(tmp_path / "out", missing_captions="skip")
    assert skipping.sizes(1).tolist() == [[7, 7], [8, 6], [8, 6]]
    assert list(skipping.ids()) == ["0/é0.png", "0/é2.png", "1/é3.png", "0/é6.png"]


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


class Loads(torch.utils.data.Dataset):
    """Reads through a source, in the workers of a DataLoader."""

    def __init__(self, source: LmdbSource) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[int, int, str]:
        picture = self.source.load(index)
        return os.getpid(), int(np.asarray(picture.image).astype(np.int64).sum()), picture.captions[0].text


@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind_read_after_the_parent_did(packed, method, persistent):
    if method == "forkserver":
        multiprocessing.set_forkserver_preload(["torch"])  # once, not in each worker
    dataset = Loads(LmdbSource(packed))
    expected = [list(dataset[i][1:]) for i in range(7)]
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
    )
    processes = set()
    for _ in range(2):
        found = list(loader)
        assert [item[1:] for item in found] == expected
        processes |= {item[0] for item in found}
        assert list(dataset[0][1:]) == expected[0]
    assert len(processes) == (2 if persistent else 4)
    assert os.getpid() not in processes


def test_a_source_is_pickled_without_its_handle(packed):
    source = LmdbSource(packed)
    source.load(0)
    data = pickle.dumps(source)
    assert len(data) < 3000
    again = pickle.loads(data)
    assert again._file is None
    assert again.record(6) == example(6)


def test_without_the_library_it_says_what_to_install(packed, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ModuleNotFoundError, match=r"lmdb is needed .*pip install 'lit-sd\[data\]'"):
        LmdbSource(packed).check()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-sd\[data\]'"):
        LmdbWriter(packed.with_name("new"))


def test_names_are_looked_up_when_they_are_asked_for(packed, monkeypatch):
    source = LmdbSource(packed)
    names = source.ids()
    monkeypatch.setattr(source._rows, "names", lambda total: pytest.fail("all were read"))
    assert names[2:4] == ["0/é2.png", "1/é3.png"]
