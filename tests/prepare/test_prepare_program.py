"""The stages together: they go on after a kill, do nothing twice, and leave what they read alone."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from PIL import Image
from small_data import encoded, picture, report_of, run, write_folder

from lit_sd.data.folder import FolderSource
from lit_sd.data.lmdb import LmdbSource
from lit_sd.data.webdataset import ShardSource
from lit_sd.prepare.program import Request, inspect
from lit_sd.prepare.reading import open_input
from lit_sd.prepare.scan import read_chunk
from lit_sd.prepare.settings import Settings
from lit_sd.prepare.writing import kept_records

KILLER = Path(__file__).with_name("killed_run.py")
SOURCES = {"folder": FolderSource, "lmdb": LmdbSource, "webdataset": ShardSource}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Twenty-two examples: a copy, a blank, a broken one, and captions to balance and to repair."""
    examples = {f"{i:02}.png": (picture(i), f"thing {i % 5}, light, nâ€™{i % 3}") for i in range(19)}
    examples["19.png"] = (picture(3), "a copy")
    examples["20.png"] = (Image.new("RGB", (64, 64)), "black")
    examples["21.jpg"] = (encoded(picture(30), "JPEG")[:300], "broken")
    return write_folder(tmp_path_factory.mktemp("program") / "in", examples)


SCANNING, CHUNK_DONE = "lit_sd.prepare.scan.read_chunk", "lit_sd.prepare.scan._finished"
WRITING = "lit_sd.prepare.writing.kept_captions"


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "out"
    run(data, out, "lmdb", balance=0.5)
    return out


def records(form: str, out: Path) -> dict:
    source = SOURCES[form](out)
    return {record.id: record for record in map(source.record, range(len(source)))}


def pages_of(out: Path) -> list[str]:
    work = out.with_name(f"{out.name}.prepare")
    names = ("decisions.jsonl", "report.json", "report.html")
    return [(work / name).read_text().replace(out.name, "OUT") for name in names]


@pytest.mark.parametrize(
    ("form", "workers", "where", "call"),
    [
        ("lmdb", 1, SCANNING, 3),
        ("lmdb", 2, CHUNK_DONE, 2),
        ("lmdb", 1, WRITING, 9),
        ("folder", 1, WRITING, 9),
        ("webdataset", 1, WRITING, 9),
    ],
)
def test_killed_and_run_again_it_ends_as_if_it_had_not_been(
    form: str, workers: int, where: str, call: int, data: Path, straight: Path, tmp_path: Path, monkeypatch
) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(KILLER), str(data), str(out), form, str(workers), where, str(call)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == -9, done.stderr
    assert not out.exists()
    with closing(sqlite3.connect(tmp_path / "out.prepare" / "facts.sqlite")) as facts:
        known = facts.execute("SELECT count(*) FROM images").fetchone()[0]
    assert known == 22 if where == WRITING else 0 < known < 22
    monkeypatch.setattr("lit_sd.prepare.scan.CHUNK", 4)  # as the killed one had it; else it would scan anew
    chunks: list[int] = []
    monkeypatch.setattr(
        "lit_sd.prepare.scan.read_chunk", lambda *chunk: chunks.append(chunk[2]) or read_chunk(*chunk)
    )
    run(data, out, form, balance=0.5, workers=workers)
    assert workers > 1 or len(chunks) == 6 - -(-known // 4)
    assert records(form, out) == records("lmdb", straight)
    assert pages_of(out) == pages_of(straight)


def test_processes_end_with_a_parent_that_was_killed(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(KILLER), str(data), str(tmp_path / "out"), "lmdb", "2", CHUNK_DONE, "1"]
    group = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    assert group.wait(100) == -9
    for _ in range(100):
        try:
            os.killpg(group.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("its processes are still there")


def test_a_finished_one_is_not_made_again(data: Path, tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "out"
    run(data, out)
    before = (out / "data.mdb").stat().st_mtime_ns
    monkeypatch.setattr("lit_sd.prepare.program.stages", lambda *_: pytest.fail("it works again"))
    (said,) = run(data, out)
    assert "is finished, there is nothing to do" in said
    assert (out / "data.mdb").stat().st_mtime_ns == before


def test_other_options_replace_it_only_when_told_to(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(data, out)
    with pytest.raises(FileExistsError, match=r"made with other options.*--overwrite"):
        run(data, out, off=("blank",))
    assert len(LmdbSource(out)) == 19
    run(data, out, off=("blank",), overwrite=True)
    assert len(LmdbSource(out)) == 20


def test_what_others_wrote_is_never_replaced(data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="of something else"):
        run(data, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.txt").exists()
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(FileExistsError, match="is there, of another run"):
        run(data, tmp_path / "other")


def test_nothing_that_is_read_is_touched(data: Path, tmp_path: Path) -> None:
    def state() -> dict:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in data.iterdir()}

    before = state()
    run(data, tmp_path / "out")
    assert state() == before
    for place in (data / "out", data):
        with pytest.raises(ValueError, match="which is read; nothing is written there"):
            run(data, place)
    assert state() == before


def test_a_file_that_changes_between_scan_and_writing_is_noticed(
    data: Path, tmp_path: Path, monkeypatch
) -> None:
    copy = write_folder(tmp_path / "in", {"a.png": (picture(1), "one"), "b.png": (picture(2), "two")})

    def change(*arguments):
        (copy / "b.png").write_bytes(encoded(picture(9)))
        return kept_records(*arguments)

    monkeypatch.setattr("lit_sd.prepare.writing.kept_records", change)
    with pytest.raises(OSError, match=r"b\.png has changed since it was scanned"):
        run(copy, tmp_path / "out")
    monkeypatch.undo()
    run(copy, tmp_path / "out")
    assert LmdbSource(tmp_path / "out").record(1).image == encoded(picture(9))


def test_two_runs_in_one_work_folder_are_refused(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out", dry_run=True)
    held = sqlite3.connect(tmp_path / "out.prepare" / "facts.sqlite")
    held.execute("BEGIN IMMEDIATE")
    with pytest.raises(ValueError, match="another lit-sd works with it"):
        run(data, tmp_path / "out")
    held.close()


def test_nothing_left_is_an_error_after_the_report(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no example is kept"):
        run(data, tmp_path / "out", min_side=65)
    assert report_of(tmp_path / "out")["rules"]["too_small"]["refused"] == 21


def test_captions_are_written_as_they_are_normalised_or_as_they_came(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out")
    assert LmdbSource(tmp_path / "out").record(0).captions[0].text == "thing 0, light, n’0"
    run(data, tmp_path / "raw", normalise=False, off=("caption_encoding",))
    assert LmdbSource(tmp_path / "raw").record(0).captions[0].text == "thing 0, light, nâ€™0"


def test_inspect_tells_buckets_and_completeness(tmp_path: Path) -> None:
    shapes = [(64, 64), (100, 64), (64, 100), (100, 64)]  # width, height
    examples = {f"{i}.png": (picture(i, *shape), f"the picture {i}") for i, shape in enumerate(shapes)}
    folder = write_folder(tmp_path / "in", examples)
    run(folder, tmp_path / "packed")
    said: list[str] = []
    request = Request(str(tmp_path / "packed"), tmp_path / "look", workers=1)
    inspect(request, Settings(), resolution=64, bucket_step=16, max_ratio=2.0, say=said.append)
    report = json.loads((tmp_path / "look" / "report.json").read_text())
    assert report["data"] == {"kind": "lmdb", "complete": True, "notes": []}
    # Of 64 x 64 pixels in steps of 16: 64x64, 80x48, 96x32 …; 64/100 = 0.64 is nearest 48/80 = 0.6.
    assert report["buckets"] == [
        {"height": 48, "width": 80, "count": 2},
        {"height": 64, "width": 64, "count": 1},
        {"height": 80, "width": 48, "count": 1},
    ]
    assert report["rules"]["too_small"]["refused"] == 4
    rows = [json.loads(line) for line in (tmp_path / "look" / "buckets.jsonl").read_text().splitlines()]
    assert rows[2] == {"index": 2, "id": "2.png", "bucket": [80, 48]}
    assert said[0] == "lmdb of 4 examples, complete by its manifest"
    assert "  bucket 48x80: 2" in said


def test_examples_are_read_one_after_the_other(data: Path, tmp_path: Path, monkeypatch) -> None:
    """Writing asks for one example at a time, and scanning for a chunk."""
    asked: list[int] = []
    read = type(open_input(str(data), tmp_path, "x")).read

    def counted(self, start: int, stop: int):
        asked.append(stop - start)
        return read(self, start, stop)

    monkeypatch.setattr("lit_sd.prepare.folder_input.FolderInput.read", counted)
    monkeypatch.setattr("lit_sd.prepare.scan.CHUNK", 5)
    run(data, tmp_path / "out")
    assert max(asked) == 5
