"""What is written as a folder and read back is the same, also when the writer was killed on the way."""

import dataclasses
import io
import json
import posixpath
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from lit_sd.data.caption_rules import Caption
from lit_sd.data.folder import FolderSource
from lit_sd.data.folder_writer import FolderWriter, safe_path
from lit_sd.data.source import Record


def encoded(shade: int, format: str = "PNG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (4, 4), shade if mode == "L" else (shade, 0, 0)).save(out, format)
    return out.getvalue()


def records() -> list[Record]:
    """One of each kind of captions, weights, partners and names."""
    return [
        Record("a.png", encoded(0), ".png", (Caption("a cat, “sat” 🐈"),)),
        Record("sub/b.JPG", encoded(1, "JPEG"), ".jpg", (Caption("one"), Caption("two"))),
        Record("sub/c.v2.png", encoded(2), ".png", (Caption("x", 3.0), Caption("y", 0.5)), weight=2.5),
        Record("sub/d.webp", encoded(3, "WEBP"), ".webp"),
        Record(
            "sub/e.png", encoded(4), ".png", (Caption("e", 2.0),), encoded(9, "PNG", "L"), encoded(8, "JPEG")
        ),
        Record("sub/f.png", encoded(5), ".png", (Caption("f"),), extra={"site": "x", "n": [1, None]}),
    ]


def write(out: Path, given: Sequence[Record], **options) -> None:
    with FolderWriter(out, **options) as writer:
        for record in given[writer.written :]:
            writer.write(record, (4, 4))


def read(root: Path) -> list[Record]:
    source = FolderSource(root, missing_captions="empty")
    return [source.record(i) for i in range(len(source))]


@pytest.mark.parametrize("caption_files", [False, True])
def test_what_was_written_reads_back_the_same(tmp_path, caption_files):
    write(tmp_path / "out", records(), caption_files=caption_files)
    assert read(tmp_path / "out") == records()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list((tmp_path / "out").rglob(".*"))
    write(tmp_path / "again", read(tmp_path / "out"), caption_files=caption_files)
    first, second = (
        {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "out", tmp_path / "again")
    )
    assert first == second


def test_the_table_is_one_that_others_read(tmp_path):
    write(tmp_path / "out", records())
    rows = [json.loads(line) for line in (tmp_path / "out/metadata.jsonl").read_text("utf-8").splitlines()]
    assert rows[0] == {"file_name": "a.png", "text": "a cat, “sat” 🐈"}
    assert rows[2]["text"] == [{"text": "x", "weight": 3.0}, {"text": "y", "weight": 0.5}]
    assert (rows[2]["weight"], rows[3]["text"]) == (2.5, None)
    assert (rows[4]["mask"], rows[4]["control"]) == ("masks/sub/e.png", "controls/sub/e.jpg")


def test_text_files_beside_the_images(tmp_path):
    write(tmp_path / "out", records(), caption_files=True)
    root = tmp_path / "out"
    assert (root / "a.txt").read_text("utf-8") == "a cat, “sat” 🐈\n"
    assert (root / "sub/b.txt").read_text("utf-8") == "one\ntwo\n"
    assert not (root / "sub/d.txt").exists()
    named = [json.loads(line)["file_name"] for line in (root / "metadata.jsonl").read_text().splitlines()]
    assert named == ["sub/b.JPG", "sub/c.v2.png", "sub/e.png", "sub/f.png"]
    write(tmp_path / "plain", records()[:1], caption_files=True)
    assert sorted(path.name for path in (tmp_path / "plain").iterdir()) == ["a.png", "a.txt"]


def test_images_of_one_stem_share_no_text_file(tmp_path):
    pair = [
        Record("a.jpg", encoded(0, "JPEG"), ".jpg", (Caption("one"),)),
        Record("a.png", encoded(1), ".png", (Caption("two"),)),
    ]
    write(tmp_path / "out", pair, caption_files=True)
    assert sorted(read(tmp_path / "out"), key=lambda record: record.id) == pair
    write(tmp_path / "table", pair)
    assert (tmp_path / "table/a.png").exists()


IDS = [
    "shard-0001/000000017",
    "A.png",
    "a.png",
    "../../../outside.png",
    "/absolute.png",
    "..",
    "/",
    ".hidden/.x.png",
    "__MACOSX/x.png",
    "https://x.org/a b.jpg?size=1&q=2",
    "back\\slash.png",
    "con.png",
    "metadata.jsonl/x.png",
    "a.png/inside.png",
    "masks/b.png",
    "b.png",
    "Stra\u00dfe.png",
    "STRASSE.png",
    "e\u0301.png",
    "\u00e9.png",
    "x" * 300 + ".png",
    "deep/" * 300 + "x.png",
    "line\nbreak.png",
]


def test_names_that_no_folder_can_hold_are_made_safe_and_kept(tmp_path):
    given = [
        Record(id, encoded(i), ".png", (Caption(f"{i}"),), mask=encoded(i, "PNG", "L"))
        for i, id in enumerate(IDS)
    ]
    write(tmp_path / "new/out", given)
    root = tmp_path / "new/out"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
    assert len({name.casefold() for name in files}) == len(files) == 2 * len(IDS) + 1
    assert all(len(part.encode()) < 200 for name in files for part in name.split("/"))
    assert {record.id: record for record in read(root)} == {record.id: record for record in given}
    assert {"A.png", "shard-0001/000000017.png", "b.png"} <= set(files)


def test_equal_ids_overwrite_nothing(tmp_path):
    given = [Record("a.png", encoded(i), ".png", (Caption("x"),)) for i in range(3)]
    write(tmp_path / "out", given)
    assert sorted(record.image for record in read(tmp_path / "out")) == sorted(
        record.image for record in given
    )


@pytest.mark.parametrize("name", ["a.png", "sub dir/ä.JPG", "x/y/z.v2.webp", "-_.jpeg"])
def test_good_names_stay(name):
    assert safe_path(*posixpath.splitext(name)) == name


def test_an_image_without_a_known_suffix_gets_its_own(tmp_path):
    given = [Record(f"x{i}.bin", encoded(i, kind), ".bin") for i, kind in enumerate(("JPEG", "PNG", "TIFF"))]
    write(tmp_path / "out", [*given, Record("z", encoded(5), ".png", (Caption("z"),))])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "metadata.jsonl",
        "x0.bin.jpg",
        "x1.bin.png",
        "x2.bin.tiff",
        "z.png",
    ]
    assert [record.id for record in read(tmp_path / "out")] == ["x0.bin", "x1.bin", "x2.bin", "z"]


def begin(out: Path, given: Sequence[Record], caption_files: bool) -> None:
    """As a killed process leaves it: nothing is closed but what the system closes."""
    writer = FolderWriter(out, caption_files=caption_files)
    for record in given:
        writer.write(record, (4, 4))
    assert not out.exists()


@pytest.mark.parametrize("caption_files", [False, True])
@pytest.mark.parametrize("harm", ["none", "half a line", "half an image", "no image", "no mask", "garbage"])
def test_a_killed_writer_goes_on_where_it_was(tmp_path, harm, caption_files):
    given = records()
    begin(tmp_path / "out", given[:5], caption_files)
    partial = tmp_path / "out.partial"
    log = next(partial.glob(".written*"))
    match harm:
        case "half a line":
            log.write_bytes(log.read_bytes()[:-9])
        case "half an image":  # of the next one, which has no line yet
            (partial / "sub/f.png").write_bytes(given[5].image[:20])
        case "no image":
            (partial / "sub/d.webp").write_bytes(b"")
        case "no mask":
            (partial / "masks/sub/e.png").unlink()
        case "garbage":
            log.write_bytes(log.read_bytes() + b'\0\0\0"\n')
    with FolderWriter(tmp_path / "out", resume=True, caption_files=caption_files) as writer:
        assert writer.written == {"half a line": 4, "no image": 3, "no mask": 4}.get(harm, 5)
        for record in given[writer.written :]:
            writer.write(record, (4, 4))
    write(tmp_path / "straight", given, caption_files=caption_files)
    contents = [
        {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "out", tmp_path / "straight")
    ]
    assert contents[0] == contents[1]
    assert read(tmp_path / "out") == given


def test_names_are_the_same_after_a_kill(tmp_path):
    given = [
        Record(id, encoded(i), ".png", (Caption("x"),)) for i, id in enumerate(["A.png", "a.png", "a.PNG"])
    ]
    begin(tmp_path / "out", given[:1], False)
    write(tmp_path / "out", given, resume=True)
    write(tmp_path / "straight", given)
    tables = [(tmp_path / name / "metadata.jsonl").read_bytes() for name in ("out", "straight")]
    assert tables[0] == tables[1]
    assert len(read(tmp_path / "out")) == 3


def test_killed_while_it_closed(tmp_path, monkeypatch):
    given = records()
    writer = FolderWriter(tmp_path / "out")
    for record in given:
        writer.write(record, (4, 4))
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    monkeypatch.undo()
    write(tmp_path / "out", given, resume=True)
    assert read(tmp_path / "out") == given


def test_an_exception_leaves_the_unfinished_folder_to_be_resumed(tmp_path):
    broken = [records()[0], dataclasses.replace(records()[1], extra={"what": object()})]
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(tmp_path / "out", broken)
    assert not (tmp_path / "out").exists()
    assert FolderWriter(tmp_path / "out", resume=True).written == 1


def test_nothing_that_is_there_is_written_over(tmp_path):
    begin(tmp_path / "out", records()[:1], False)
    with pytest.raises(FileExistsError, match=r"out\.partial is there, unfinished; resume it"):
        FolderWriter(tmp_path / "out")
    with pytest.raises(FileExistsError, match="begun with caption_files=False; resume it so"):
        FolderWriter(tmp_path / "out", resume=True, caption_files=True)
    write(tmp_path / "out", records(), resume=True)
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="out is there already"):
            FolderWriter(tmp_path / "out", resume=resume)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", records())
    assert read(tmp_path / "empty") == records()
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file is there already"):
        FolderWriter(tmp_path / "file")
