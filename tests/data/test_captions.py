"""Where captions come from, and what is said when there are none (F04, F05)."""

import json
import math
from pathlib import Path

import pytest
from PIL import Image

from lit_sd.data.caption_rules import Caption
from lit_sd.data.captions import decode_text, length_report
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


def test_captions_in_another_encoding_are_all_named_at_once(tmp_path):
    folder_of(tmp_path, ["1.png", "2.png", "3.png", "4.png"])
    for i in "13":
        (tmp_path / f"{i}.txt").write_bytes("a “Kätzchen”".encode("cp1252"))
    (tmp_path / "2.txt").write_text("a cat")
    (tmp_path / "4.txt").write_bytes("a cat".encode("utf-16-le"))  # without its mark
    with pytest.raises(
        ValueError, match=r"3 files .* not UTF-8 text: 1\.txt, 3\.txt, 4\.txt; .*data\.bad_captions=latin-1"
    ):
        FolderSource(tmp_path).check()
    source = FolderSource(tmp_path, bad_captions="latin-1")
    assert source.captions() == ["a “Kätzchen”", "a cat", "a “Kätzchen”", "a cat"]
    assert any("1.txt, 3.txt, 4.txt; they are read as Latin-1" in note for note in source.notes)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_unicode_is_read_with_its_mark_and_emoji_survive(tmp_path, encoding):
    folder_of(tmp_path, ["1.png", "2.png", "3.png"])
    text = "猫 a cat 🐈\u200d⬛, é"
    (tmp_path / "1.txt").write_bytes(text.encode(encoding))
    (tmp_path / "metadata.jsonl").write_bytes(
        json.dumps({"file_name": "2.png", "text": text}, ensure_ascii=False).encode(encoding)
    )
    (tmp_path / "metadata.csv").write_bytes(f'file_name,text\n3.png,"{text}"'.encode(encoding))
    assert FolderSource(tmp_path).captions() == [text] * 3


def test_big_endian_utf_16_and_what_is_no_text():
    assert decode_text(b"\xfe\xff\x00a\xd8\x3d\xdc\x08") == "a🐈"
    assert decode_text(b"\xff\xfea") is None  # half a letter
    assert decode_text(b"\xe4") is None
    assert decode_text(b"") == ""


def test_a_line_separator_within_a_caption_parts_no_rows(tmp_path):
    folder_of(tmp_path, ["1.png"])
    row = json.dumps({"file_name": "1.png", "text": "a\u2028b\x85c"}, ensure_ascii=False)
    (tmp_path / "metadata.jsonl").write_text(row + "\r\n", encoding="utf-8", newline="")
    assert FolderSource(tmp_path).captions() == ["a b c"]


def test_each_line_may_be_a_caption_of_its_own(tmp_path):
    folder_of(tmp_path, ["1.png"])
    (tmp_path / "1.txt").write_text("a  cat\n\n a pet \n")
    assert FolderSource(tmp_path).captions() == ["a cat a pet"]
    source = FolderSource(tmp_path, caption_lines="each")
    assert source.captions() == ["a cat", "a pet"]
    assert source.record(0).captions == (Caption("a cat"), Caption("a pet"))


def test_upper_case_names_of_text_files(tmp_path):
    folder_of(tmp_path, ["IMG.JPG", "b.png"])
    (tmp_path / "IMG.TXT").write_text("one")
    (tmp_path / "b.Caption").write_text("two")
    assert FolderSource(tmp_path).captions() == ["one", "two"]


def test_rows_may_hold_several_captions_with_weights(tmp_path):
    folder_of(tmp_path, ["1.png", "2.png", "3.png", "4.png"])
    rows = [
        {"file_name": "1.png", "text": ["a", " b\n"], "weight": 0.5, "artist": "me", "year": 1999},
        {"file_name": "2.png", "text": [{"text": "c", "weight": 3}, {"text": "d"}, "e", ""]},
        {"file_name": "3.png", "caption": "f"},
        {"file_name": "3.png", "caption": "g"},
        {"file_name": "3.png", "caption": "f"},
        {"file_name": "4.png", "text": None},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "4.txt").write_text("h")
    source = FolderSource(tmp_path)
    assert [source.record(i).captions for i in range(4)] == [
        (Caption("a"), Caption("b")),
        (Caption("c", 3.0), Caption("d"), Caption("e")),
        (Caption("f"), Caption("g")),
        (Caption("h"),),
    ]
    assert source.captions() == list("abcdefgh")
    assert source.record(0).weight == 0.5
    assert source.record(0).extra == {"artist": "me", "year": 1999}
    assert source.draw_weights().tolist() == [0.5, 1, 1, 1]
    assert source.draw_weights(1, 2).tolist() == [1]


CSV = 'file_name,text,weight,site\r\na.png,"a cat, sat\non a ""mat""",2,x\r\n\r\nsub/b.png, a dog ,,\r\n'


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_tables_may_be_csv(tmp_path, mark):
    """As RFC 4180 has it: quotes, doubled quotes, a line break within quotes, CRLF."""
    folder_of(tmp_path, ["a.png", "sub/b.png"])
    (tmp_path / "metadata.csv").write_text(mark + CSV, encoding="utf-8", newline="")
    source = FolderSource(tmp_path)
    assert source.captions() == ['a cat, sat on a "mat"', "a dog"]
    assert source.draw_weights().tolist() == [2, 1]
    assert source.record(0).extra == {"site": "x"}


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_tables_of_other_spreadsheets(tmp_path, delimiter):
    folder_of(tmp_path, ["a.png"])
    (tmp_path / "metadata.csv").write_text(f'"text"{delimiter}file_name\n"a, b"{delimiter}a.png\n')
    assert FolderSource(tmp_path).captions() == ["a, b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "a.png,a cat, sitting",
            "metadata.csv, line 3: 3 fields under 2 names; put texts .* in double quotes",
        ),
        ('a.png,"a cat', "metadata.csv, line 3: unexpected end of data"),
        ("gone.png,x", "names 1 images that are not in the folder: gone.png"),
        (",x", "metadata.csv, line 3: expected"),
    ],
)
def test_a_faulty_csv_names_file_and_line(tmp_path, line, message):
    folder_of(tmp_path, ["a.png"])
    (tmp_path / "metadata.csv").write_text(f"file_name,text\na.png,x\n{line}")
    with pytest.raises(ValueError, match=message):
        FolderSource(tmp_path).check()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"weight": -1}, "line 1: weight should be a number of 0 or more, got -1"),
        ({"weight": "many"}, "line 1: weight should be a number of 0 or more, got 'many'"),
        ({"weight": True}, "line 1: weight should be"),
        ({"weight": math.inf}, "line 1: weight should be"),
        ({"weight": math.nan}, "line 1: weight should be"),
        ({"text": ["a", 3]}, "line 1: text should hold texts or .*, got 3"),
        ({"text": [{"weight": 3}]}, "line 1: text should hold texts or"),
        ({"text": [{"text": "a", "weight": "x"}]}, "line 1: weight should be"),
        ({"text": [{"text": "a", "weight": 0}]}, "line 1: all captions have weight 0"),
        ({"text": "half \ud83d"}, "line 1: text should hold texts"),
        ({"mask": 3}, "line 1: mask should be the path of an image, got 3"),
        (
            {"mask": "m.png", "control": "c.png"},
            "names 2 masks or control images that are not .*: c.png, m.png",
        ),
        ({"weight": 0}, "every image has weight 0"),
    ],
)
def test_faulty_values_name_file_and_line(tmp_path, row, message):
    folder_of(tmp_path, ["a.png"])
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": "x"} | row))
    with pytest.raises(ValueError, match=message):
        FolderSource(tmp_path).check()


def test_a_table_without_captions_may_still_say_how_often_to_draw(tmp_path):
    folder_of(tmp_path, ["a.png", "b.png"])
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "b.png", "weight": 3}')
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    source = FolderSource(tmp_path)
    assert (source.captions(), source.draw_weights().tolist()) == (["one", "two"], [1, 3])
    assert FolderSource(tmp_path, prompt="x").draw_weights().tolist() == [1, 3]


def test_with_one_prompt_for_all_foreign_tables_do_not_matter(tmp_path):
    folder_of(tmp_path, ["a.png"])
    (tmp_path / "metadata.csv").write_text("image;label\na.png;3\n")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": 3}')
    assert FolderSource(tmp_path, prompt="x").captions() == ["x"]


def test_limits_count_examples_of_which_tables_may_name_more(tmp_path):
    folder_of(tmp_path, ["a.png", "b.png", "c.png"])
    rows = [{"file_name": name, "text": name} for name in ("a.png", "b.png", "c.png")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert FolderSource(tmp_path, limit=2).captions() == ["a.png", "b.png"]


def test_captions_that_will_be_cut_are_counted_in_one_line():
    """Words and two more stand for tokens: 120 words are 122, 75 are 77 and just fit."""
    captions = ["short", "w " * 75, "v " * 120, "short"]
    line = length_report(captions, lambda caption: len(caption.split()) + 2)
    assert line.startswith("1 of 4 captions (25%) are longer than 77 tokens")
    assert "the longest has 122" in line
    assert length_report(captions[:2], lambda caption: len(caption.split()) + 2) is None
