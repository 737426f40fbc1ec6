"""What a run prints last."""

import os
import shlex
import sys
from pathlib import Path

from finished_run import composed

from lit_sd.closing import closing, program, shown


def lines(folder: Path, can_draw: bool = True, *overrides: str) -> list[str]:
    cfg = composed("data.root=photos", f"paths.output_dir={folder}", *overrides)
    return closing(cfg, 7, can_draw).splitlines()


def test_it_names_what_is_there_and_three_commands(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("samples", "checkpoints", "export"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "last.ckpt").touch()
    told = lines(tmp_path / "run", True, "data.prompt=a photo of sks cat")
    assert told[0] == "Done after 7 updates."
    assert [line.split() for line in told[1:4]] == [
        ["pictures", "run/samples"],
        ["checkpoint", "run/checkpoints/last.ckpt"],
        ["export", "run/export"],
    ]
    assert told[4] == "Next:"
    draw, judge, again = (shlex.split(line) for line in told[5:])
    assert draw[1:] == ["generate", "--run", "run", "--prompt", "a photo of sks cat, in the snow"]
    assert judge[1:] == ["evaluate.py", "ckpt=run/checkpoints/last.ckpt"]
    assert again[1:] == ["train.py", "data.root=FOLDER_OF_YOUR_PHOTOS"]


def command(folder: Path, monkeypatch, *started: str) -> list[str]:
    """The last command that a run started with these words recommends."""
    (folder / "run" / "checkpoints").mkdir(parents=True)
    (folder / "run" / "checkpoints" / "last.ckpt").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("lit_sd.closing.overrides", lambda: list(started))
    return shlex.split(lines(folder / "run", True)[-1])[1:]


def test_the_next_run_gets_a_folder_of_its_own_and_each_word_once(tmp_path: Path, monkeypatch) -> None:
    started = ["strategy=lora", "paths.output_dir=run", "ckpt=old", "optimizer.lr=1", "++optimizer.lr=2"]
    told = command(tmp_path, monkeypatch, *started)
    assert told == ["train.py", "strategy=lora", "optimizer.lr=2", "data.root=FOLDER_OF_YOUR_PHOTOS"]


def test_who_has_trained_on_own_photos_is_told_how_to_go_on(tmp_path: Path, monkeypatch) -> None:
    told = command(tmp_path, monkeypatch, "data.root=mine", "ckpt=old", "trainer.max_steps=4")
    assert told == ["train.py", "data.root=mine", "trainer.max_steps=MORE", "ckpt=run/checkpoints/last.ckpt"]


def test_a_job_of_a_sweep_recommends_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("lit_sd.closing.is_job_of_sweep", lambda: True)
    assert "Next:" not in lines(tmp_path)


def test_what_is_not_there_is_not_named(tmp_path: Path) -> None:
    assert not any(line.split()[0] in ("pictures", "checkpoint", "export") for line in lines(tmp_path)[1:])


def test_a_model_that_does_not_draw_is_resumed_instead(tmp_path: Path) -> None:
    told = " ".join(lines(tmp_path, False))
    assert "generate" not in told
    assert "trainer.max_steps=MORE" in told


def test_programs_are_called_so_that_the_shell_finds_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    own = Path(sys.executable).parent / "python"
    assert Path(program("python")).absolute() == own
    monkeypatch.setenv("PATH", str(own.parent) + os.pathsep + str(tmp_path))
    assert program("python") == "python"
    assert program("no-such-program") == "no-such-program"


def test_paths_are_written_short_where_they_lie_below(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / "a" / "b") == "a/b"
    assert shown(tmp_path.parent / "c") == str(tmp_path.parent / "c")
