"""How programs end that can't use what they were given."""

import subprocess
import sys
from pathlib import Path

import pytest
from finished_run import ROOT

from lit_sd.refusal import refusing


@pytest.mark.parametrize(
    "error", [ValueError("too few"), FileNotFoundError("no such folder"), ImportError("x")]
)
def test_a_message_and_status_2(error: Exception, capsys, monkeypatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as stop, refusing():
        raise error
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"{error}\n"


def test_all_of_it_for_who_looks_for_the_cause(monkeypatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="too few"), refusing():
        raise ValueError("too few")


def test_what_is_nobodys_input_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), refusing():
        raise ZeroDivisionError


def test_train_says_in_one_line_that_a_folder_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "model=openmoji", "data.root=none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"data.root={tmp_path / 'none'} does not exist" in done.stderr
