"""`lit-sd generate` draws from a run's folder."""

import os
import subprocess
import sys
from pathlib import Path

from finished_run import made_run  # noqa: F401
from PIL import Image
from typer.testing import CliRunner

from lit_sd.cli import app


def call(*arguments: str):
    return CliRunner().invoke(app, ["generate", *arguments])


def test_pictures_are_named_by_prompt_and_seed_and_lie_where_asked(
    finished_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "pictures"
    options = ["--seed", "5", "--count", "2", "--steps", "2", "--guidance", "1", "--negative", "blurry"]
    result = call("--run", str(finished_run), "--prompt", "a photo of sks cat", *options, "--out", str(out))
    assert result.exit_code == 0, result.output
    paths = [out / f"a-photo-of-sks-cat_{seed:04d}.png" for seed in (5, 6)]
    assert result.output.split() == [str(path) for path in paths]
    assert all(Image.open(path).size == (64, 64) for path in paths)


def test_by_default_they_lie_in_the_runs_folder_and_seed_0_is_the_first(finished_run: Path) -> None:
    result = call(
        "--run", str(finished_run / "checkpoints" / "last.ckpt"), "--prompt", "a cat", "--steps", "1"
    )
    assert result.exit_code == 0, result.output
    assert (finished_run / "generated" / "a-cat_0000.png").is_file()


def test_a_folder_without_a_checkpoint_is_told_in_one_line(tmp_path: Path) -> None:
    result = call("--run", str(tmp_path), "--prompt", "a cat")
    assert result.exit_code == 2
    assert "holds no checkpoint" in result.output
    assert "Traceback" not in result.output


def test_what_lies_in_the_way_is_told_before_anything_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call("--run", str(tmp_path), "--prompt", "a cat", "--out", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "--out" in result.output


def test_another_base_model_is_refused(finished_run: Path, tiny_model_dir) -> None:
    result = call("--run", str(finished_run), "--prompt", "a cat", "--model", str(tiny_model_dir("sd21")))
    assert result.exit_code == 2
    assert "base model" in result.output


def test_help_needs_no_torch() -> None:
    code = "import sys; from lit_sd.cli import app; app(['generate', '--help'], standalone_mode=False); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for option in ("--run", "--prompt", "--negative", "--seed", "--steps", "--guidance", "--count", "--out"):
        assert option in done.stdout
