"""A folder is read with its faults: the examples, in the order, that training gets of one without."""

import os
import pickle
from pathlib import Path

import pytest
from small_data import encoded, picture, write_folder

from lit_sd.data.folder import FolderSource
from lit_sd.data.folder_writer import FolderWriter
from lit_sd.prepare.examples import Unreadable
from lit_sd.prepare.folder_input import FolderInput


def opened(root: Path, tmp_path: Path, **options) -> FolderInput:
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return FolderInput(root, work, "data", **options)


def everything(data: FolderInput) -> list:
    return list(data.read(0, len(data)))


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """Subfolders, upper case, the same stem twice, tables of both kinds, a mask, a control image and ids."""
    root = write_folder(
        tmp_path / "in",
        {
            "b/two.PNG": (picture(1), None),
            "a/one.jpg": (encoded(picture(2), "JPEG"), "a text file"),
            "a.png": (picture(3), None),
            "z/same.png": (picture(4), None),
            "z/same.jpg": (encoded(picture(5), "JPEG"), "for both"),
            "z/mask.png": (picture(6).convert("L"), None),
            "z/lines.png": (picture(7), None),
            "é.png": (picture(8), "an accent"),
        },
    )
    (root / "a.TXT").write_text("upper case")
    (root / "z" / "metadata.jsonl").write_text(
        '{"file_name": "same.png", "text": [{"text": "first", "weight": 2}, "second"], "weight": 0.5, '
        '"mask": "mask.png", "control": "./lines.png", "id": "named", "stars": 4}\n'
        '{"file_name": "same.png", "text": "third"}\n'
    )
    (root / "b" / "metadata.csv").write_text('file_name,caption\ntwo.PNG,"of a table, quoted"\n')
    for name in (".hidden.png", "notes.md", "__MACOSX/x.png", ".dir/y.png"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"passed over")
    return root


def test_it_gives_what_training_gets(rich: Path, tmp_path: Path) -> None:
    source = FolderSource(rich)
    data = opened(rich, tmp_path)
    found = everything(data)
    assert [record.id for record in found] == list(source.ids())
    assert found == [source.record(i) for i in range(len(source))]
    assert data.notes == ["1 files that are neither images nor captions are passed over"]
    assert list(data.read(2, 4)) == found[2:4]


def test_it_reads_in_other_processes(rich: Path, tmp_path: Path) -> None:
    data = opened(rich, tmp_path)
    found = everything(data)
    assert everything(pickle.loads(pickle.dumps(data))) == found


def test_its_fingerprint_changes_with_any_file(rich: Path, tmp_path: Path) -> None:
    before = opened(rich, tmp_path).fingerprint()
    assert opened(rich, tmp_path).fingerprint() == before
    os.utime(rich / "a.TXT", ns=(1, 1))
    later = opened(rich, tmp_path).fingerprint()
    assert later != before
    (rich / "notes.md").unlink()
    assert opened(rich, tmp_path).fingerprint() not in (before, later)


def test_faulty_tables_are_told_and_passed_over(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", {"a.png": (picture(1), "beside"), "b.png": (picture(2), None)})
    (root / "metadata.jsonl").write_text(
        'no json\n{"text": "nameless"}\n{"file_name": "gone.png", "text": "x"}\n'
        '{"file_name": "b.png", "text": ["good", 7], "weight": -1, "mask": 3}\n'
    )
    data = opened(root, tmp_path)
    first, second = everything(data)
    assert [caption.text for caption in first.captions] == ["beside"]
    assert ([caption.text for caption in second.captions], second.weight, second.mask) == (["good"], 1, None)
    assert data.notes == [
        "1 rows of tables name images that are not in the folder",
        "metadata.jsonl, line 1: it has no file_name, and is passed over",
        "metadata.jsonl, line 2: it has no file_name, and is passed over",
        "metadata.jsonl, line 4: mask is no path, and is passed over",
        "metadata.jsonl, line 4: '7' is no caption, and is passed over",
        "metadata.jsonl, line 4: the weight -1 is none, and 1 is taken",
    ]


def test_tables_in_other_encodings_are_read(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", {f"{name}/a.png": (picture(1), None) for name in "uvw"})
    row = '{"file_name": "a.png", "text": "a café"}\n'
    (root / "u" / "metadata.jsonl").write_bytes(row.encode("utf-16"))
    (root / "v" / "metadata.jsonl").write_bytes(b"\xef\xbb\xbf" + row.encode())
    (root / "w" / "metadata.csv").write_bytes('file_name;text\r\na.png;"a café"\r\n'.encode("utf-16"))
    assert [record.captions[0].text for record in everything(opened(root, tmp_path))] == ["a café"] * 3


def test_a_missing_mask_makes_the_example_unreadable_and_no_other(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", {"a.png": (picture(1), None), "b.png": (picture(2), "b")})
    (root / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x", "mask": "gone.png"}\n')
    first, second = everything(opened(root, tmp_path))
    assert isinstance(first, Unreadable)
    assert "gone.png" in first.error
    assert second.id == "b.png"


def test_names_that_are_no_unicode_are_read(tmp_path: Path) -> None:
    root = tmp_path / "in"
    root.mkdir()
    try:
        (root / os.fsdecode(b"caf\xe9.png")).write_bytes(encoded(picture(1)))
    except OSError:
        pytest.skip("this file system has names in Unicode only")
    (record,) = everything(opened(root, tmp_path))
    assert record.id == "caf\\udce9.png"
    assert record.image == encoded(picture(1))


def test_options_of_the_reader(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", {"a.png": (picture(1), "of txt")})
    (root / "a.tags").write_text("one\ntwo\n")
    (root / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "of text", "label": "of label"}\n')

    def captions(**options) -> list[str]:
        (record,) = everything(opened(root, tmp_path, **options))
        return [caption.text for caption in record.captions]

    assert captions() == ["of text"]
    assert captions(caption_column="label") == ["of label"]
    assert captions(caption_ext="tags") == ["one two"]
    assert captions(caption_ext=".tags", caption_lines="each") == ["one", "two"]


def test_no_images_and_no_folder_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        opened(tmp_path / "empty", tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        opened(tmp_path / "none", tmp_path)


def test_what_our_own_writer_wrote_is_read_back(rich: Path, tmp_path: Path) -> None:
    found = everything(opened(rich, tmp_path))
    with FolderWriter(tmp_path / "written") as writer:
        for record in found:
            writer.write(record, (64, 64))
    again = {record.id: record for record in everything(opened(tmp_path / "written", tmp_path))}
    assert again == {record.id: record for record in found}


def test_loops_of_links_end(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "in", {"sub/a.png": (picture(1), "a")})
    (root / "sub" / "up").symlink_to(root, target_is_directory=True)
    (root / "broken.png").symlink_to(root / "nowhere.png")
    broken, whole = everything(opened(root, tmp_path))
    assert isinstance(broken, Unreadable)
    assert whole.id == "sub/a.png"
