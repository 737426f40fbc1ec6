"""Where captions come from, and what is said when there are none (F04, F05)."""

import json
from pathlib import Path

import pytest
from PIL import Image

from lit_sd.data.captions import find_captions, length_report
from lit_sd.data.folder import FolderSource


def folder_of(path: Path, names: list[str]) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path / name)
    return path


def test_text_files_lie_beside_the_images(tmp_path):
    folder_of(tmp_path, ["a.png", "sub/b.v2.JPG", "sub/c.png"])
    (tmp_path / "a.txt").write_text("\ufeffa cat,\n  sitting \n", encoding="utf-8")
    (tmp_path / "sub/b.v2.txt").write_text("ein Kätzchen", encoding="utf-8")
    (tmp_path / "sub/c.caption").write_text("third")
    source = FolderSource(tmp_path)
    assert source.ids() == ["a.png", "sub/b.v2.JPG", "sub/c.png"]
    assert source.captions() == ["a cat, sitting", "ein Kätzchen", "third"]


def test_metadata_comes_first_and_text_files_fill_in(tmp_path):
    folder_of(tmp_path, ["a.png", "b.png", "sub/c.png"])
    rows = [{"file_name": "a.png", "text": "from the table"}, {"file_name": "./sub/c.png", "text": "third"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "a.txt").write_text("from the file")
    (tmp_path / "b.txt").write_text("second")
    assert FolderSource(tmp_path).captions() == ["from the table", "second", "third"]
    (tmp_path / "b.caption").write_text("other")
    (tmp_path / "a.caption").write_text("explicit")
    (tmp_path / "sub/c.caption").write_text("x")
    assert FolderSource(tmp_path, caption_ext=".caption").captions() == ["explicit", "other", "x"]


def test_metadata_in_a_subfolder_counts_from_there(tmp_path):
    folder_of(tmp_path, ["sub/c.png"])
    (tmp_path / "sub/metadata.jsonl").write_text('{"file_name": "c.png", "label": "a cup"}')
    assert FolderSource(tmp_path, caption_column="label").captions() == ["a cup"]
    with pytest.raises(ValueError, match=r"line 1.*text, caption, prompt.*file_name, label.*caption_column"):
        FolderSource(tmp_path).check()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 2: not a JSON object"),
        ('{"text": "x"}', "line 2: expected.*file_name"),
        ('{"file_name": "a.png", "text": 3}', "line 2: text should be a string, got 3"),
        ('{"file_name": "gone.png", "text": "x"}', "names 1 images that are not in the folder: gone.png"),
    ],
)
def test_faulty_metadata_names_file_and_line(tmp_path, line, message):
    folder_of(tmp_path, ["a.png"])
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n' + line)
    with pytest.raises(ValueError, match=message):
        FolderSource(tmp_path).check()


def test_captions_under_another_extension_are_an_error_that_names_it(tmp_path):
    folder_of(tmp_path, ["1.png", "2.png", "3.png"])
    for i in "123":
        (tmp_path / f"{i}.txt").write_text("a cat")
    for policy in ("error", "skip", "empty"):
        with pytest.raises(
            ValueError, match=r"none of the 3 images.*\.caption.*3 \.txt.*data\.caption_ext=txt"
        ):
            FolderSource(tmp_path, caption_ext="caption", missing_captions=policy).check()


def test_no_captions_at_all_asks_for_a_prompt(tmp_path):
    folder_of(tmp_path, ["1.png"])
    with pytest.raises(ValueError, match=r"found beside them: no other files\. Set data\.prompt="):
        FolderSource(tmp_path).check()
    assert FolderSource(tmp_path, prompt="").captions() == [""]


@pytest.mark.parametrize(
    ("policy", "captions"),
    [("skip", ["one"]), ("empty", ["one", "", ""]), ("prompt", ["one", "a cat", "a cat"])],
)
def test_single_missing_captions(tmp_path, policy, captions):
    folder_of(tmp_path, ["1.png", "2.png", "3.png"])
    (tmp_path / "1.txt").write_text("one")
    (tmp_path / "3.txt").write_text(" \n")  # blank is missing
    prompt = "a cat" if policy == "prompt" else None
    source = FolderSource(tmp_path, missing_captions=policy, prompt=prompt)
    assert source.captions() == captions
    assert any("2 of 3" in note and "2.png, 3.png" in note for note in source.notes)
    with pytest.raises(ValueError, match=r"2 of 3 images have no caption: 2\.png, 3\.png"):
        FolderSource(tmp_path).check()


def test_one_prompt_for_all(tmp_path):
    folder_of(tmp_path, ["1.png", "2.png"])
    (tmp_path / "1.txt").write_text("one")
    assert FolderSource(tmp_path, prompt="a photo of sks cat").captions() == ["a photo of sks cat"] * 2


def test_a_caption_in_another_encoding_is_named(tmp_path):
    folder_of(tmp_path, ["1.png"])
    (tmp_path / "1.txt").write_bytes("Kätzchen".encode("latin-1"))
    with pytest.raises(ValueError, match=r"1\.txt.*UTF-8"):
        find_captions(tmp_path, ["1.png"], ["1.txt"])


def test_captions_that_will_be_cut_are_counted_in_one_line():
    """Words and two more stand for tokens: 120 words are 122, 75 are 77 and just fit."""
    captions = ["short", "w " * 75, "v " * 120, "short"]
    line = length_report(captions, lambda caption: len(caption.split()) + 2)
    assert line.startswith("1 of 4 captions (25%) are longer than 77 tokens")
    assert "the longest has 122" in line
    assert length_report(captions[:2], lambda caption: len(caption.split()) + 2) is None
