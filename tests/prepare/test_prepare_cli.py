"""`lit-sd prepare` and `lit-sd inspect` as one types them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from small_data import encoded, picture, write_folder
from typer.testing import CliRunner

from lit_sd.cli import app
from lit_sd.data.folder import FolderSource
from lit_sd.data.lmdb import LmdbSource
from lit_sd.prepare.settings import RULES


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    examples = {f"{i}.png": (picture(i), f"the picture {i}") for i in range(3)}
    return write_folder(tmp_path / "in", examples | {"black.png": (Image.new("RGB", (64, 64)), "black")})


def test_a_folder_is_cleaned_and_written(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call("prepare", str(data), str(out), "--to", "folder", "--min-side", "64", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert "kept 3, refused 1" in result.output
    assert FolderSource(out).ids() == ["0.png", "1.png", "2.png"]
    assert {path.name for path in (tmp_path / "out.prepare").iterdir()} >= {
        "report.html",
        "report.json",
        "decisions.jsonl",
    }


def test_what_is_kept_without_a_caption_is_told(data: Path, tmp_path: Path) -> None:
    (data / "1.txt").unlink()
    words = ["--to", "lmdb", "--min-side", "64", "--workers", "1", "--off", "caption_missing"]
    said = call("prepare", str(data), str(tmp_path / "out"), *words).output
    assert "3 examples are in" in said
    assert "1 of them have no caption: train with data.missing_captions=empty, or data.prompt" in said
    again = call("prepare", str(data), str(tmp_path / "none"), *words[:-2]).output
    assert "2 examples are in" in again
    assert "no caption" not in again


def test_every_option_reaches_the_run(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--off", "blank", "--off", "too_small", "--max-aspect", "2", "--near", "2", "--near-colour", "9"]
    more += ["--min-deviation", "1", "--min-characters", "2", "--min-words", "1", "--min-entropy", "0.4"]
    more += [
        "--max-tokens",
        "70",
        "--no-normalise",
        "--tags",
        "words",
        "--balance",
        "0.5",
        "--balance-max",
        "5",
    ]
    more += ["--emphasis", "{caption}, {rare}", "--spot-check", "2", "--seed", "3", "--workers", "1"]
    more += [
        "--read",
        "caption_ext=txt",
        "--from",
        "folder",
        "--val",
        str(data),
        "--off",
        "leak",
        "--dry-run",
    ]
    result = call("prepare", str(data), str(out), "--to", "lmdb", "--work", str(tmp_path / "w"), *more)
    assert result.exit_code == 0, result.output
    assert not out.exists()
    settings = json.loads((tmp_path / "w" / "report.json").read_text())["settings"]
    assert settings == {
        "off": ["blank", "leak", "too_small"],
        "min_side": 256,
        "max_aspect": 2.0,
        "min_deviation": 1.0,
        "min_characters": 2,
        "min_words": 1,
        "min_entropy": 0.4,
        "max_tokens": 70,
        "near": 2,
        "near_colour": 9.0,
        "normalise": False,
        "tags": "words",
        "balance": 0.5,
        "balance_max": 5.0,
        "emphasis": "{caption}, {rare}",
        "spot_check": 2,
        "seed": 3,
    }
    assert (tmp_path / "w" / "spot_check.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{in}", "{out}", "--to", "zip"], "--to zip: there is no such form"),
        (["{out}", "{in}2", "--to", "lmdb"], "does not exist"),
        (["{in}", "{out}", "--to", "lmdb", "--off", "blanc"], "nearest: blank"),
        (["{in}", "{in}/out", "--to", "lmdb"], "which is read"),
        (["{in}", "{out}", "--to", "lmdb", "--answers", "{in}/none.json"], "none.json does not exist"),
        (["{in}", "{out}", "--to", "lmdb", "--val", "{in}/none"], "none does not exist"),
        (["{in}", "{out}", "--to", "lmdb", "--read", "x"], "--read x: expected NAME=VALUE"),
        (["{in}", "{out}", "--to", "lmdb", "--from", "tar"], "--from tar: there is no such kind"),
        (["{in}", "{out}", "--to", "lmdb", "--max-aspect", "nan"], "--max-aspect=nan"),
        (["{in}", "{out}", "--to", "lmdb", "--mask-root", "{in}/none"], "none does not exist"),
        (
            ["s.tar", "{out}", "--to", "lmdb", "--mask-root", "{in}"],
            "--mask-root is for folders, but s.tar is",
        ),
        (["s.tar", "{out}", "--to", "lmdb", "--repeat-folders"], "--repeat-folders is for folders"),
        (["{in}", "{out}", "--to", "lmdb", "--storage-options", "{}"], "--storage-options are for shards"),
        (["{in}", "{out}", "--to", "lmdb", "--storage-options", "[1]"], "got JSON of another kind, list"),
        (["{in}", "{out}", "--to", "lmdb", "--storage-options", "{anon}"], "got no JSON: Expecting property"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(
    arguments: list[str], said: str, data: Path, tmp_path: Path
) -> None:
    words = [word.replace("{in}", str(data)).replace("{out}", str(tmp_path / "out")) for word in arguments]
    result = call("prepare", *words)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_words_for_the_cache_are_checked_before_anything_is_read(data: Path, tmp_path: Path) -> None:
    result = call("prepare", str(data), str(tmp_path / "out"), "--to", "lmdb", "--cache", "strategy=lroa")
    assert result.exit_code == 2
    assert "strategy=lroa: no such choice; nearest: lora" in result.output
    assert not (tmp_path / "out.prepare").exists()


def test_masks_and_repeats_of_a_folder_are_packed(data: Path, tmp_path: Path) -> None:
    write_folder(data, {"5_more/9.png": (picture(9), "one more")})
    masks = {name: (picture(20), None) for name in ("0.png", "1.png", "2.png", "black.png", "5_more/9.png")}
    write_folder(data / "masks", masks)
    write_folder(tmp_path / "edges", masks)
    more = ["--mask-root", str(data / "masks"), "--control-root", str(tmp_path / "edges"), "--repeat-folders"]
    out = tmp_path / "out"
    result = call("prepare", str(data), str(out), "--to", "lmdb", "--min-side", "64", "--workers", "1", *more)
    assert result.exit_code == 0, result.output
    assert "kept 4, refused 1" in result.output
    source = LmdbSource(out)
    assert list(source.ids()) == ["0.png", "1.png", "2.png", "5_more/9.png"]
    record = source.record(3)
    assert (record.mask, record.control, record.weight) == (encoded(picture(20)), encoded(picture(20)), 5)
    looked = call("inspect", str(data), "--out", str(tmp_path / "look"), "--workers", "1", *more)
    assert looked.exit_code == 0, looked.output
    assert "folder of 5 examples" in looked.output
    assert "draws of the images by folder: 5_more x5" in looked.output


def test_inspect_reports_and_packs_nothing(data: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("inspect", str(data), "--resolution", "64", "--bucket-step", "16", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert "folder of 4 examples" in result.output
    assert "bucket 64x64: 4" in result.output
    assert (tmp_path / "in.inspect" / "report.html").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"in", "in.inspect"}


def test_interrupted_it_says_how_to_go_on(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"0.png": (picture(0), "one")})
    slow = (
        "import sys, time, lit_sd.prepare.scan as scan\n"
        "def read_chunk(*_):\n    print('reading', flush=True)\n    time.sleep(60)\n"
        "scan.read_chunk = read_chunk\n"
        "from lit_sd.cli import app\n"
        f"app(['prepare', {str(data)!r}, {str(tmp_path / 'out')!r}, '--to', 'lmdb', '--workers', '1'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reading\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "run the same command again, and it goes on where it stopped" in errors
    assert "Traceback" not in errors


def test_help_is_quick_and_names_every_rule() -> None:
    code = "import sys; from lit_sd.cli import app; app(['prepare', '--help'], standalone_mode=False); "
    code += "sys.exit(bool({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
    env = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    for rule in RULES:
        assert rule in done.stdout
    for option in ("--to", "--from", "--val", "--off", "--spot-check", "--answers", "--balance", "--dry-run"):
        assert option in done.stdout
