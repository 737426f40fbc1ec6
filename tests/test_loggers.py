"""W&B without a key or a network, and one run for each job of a sweep."""

import sys
import types

import pytest

from lit_sd import loggers


@pytest.fixture
def library(monkeypatch):
    """A stand-in for the wandb library."""
    made = types.SimpleNamespace(
        api=types.SimpleNamespace(api_key=None, settings=lambda name: "http://localhost:9"),
        run=None,
        finished=0,
    )
    made.finish = lambda: setattr(made, "finished", made.finished + 1)
    monkeypatch.setitem(sys.modules, "wandb", made)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return made


def test_no_key(library):
    assert not loggers.reachable()


def test_no_network(library, monkeypatch):
    library.api.api_key = "x" * 40

    def refuse(address, timeout):
        assert address == ("localhost", 9)
        raise OSError("unreachable")

    monkeypatch.setattr(loggers.socket, "create_connection", refuse)
    assert not loggers.reachable()


def test_key_and_network(library, monkeypatch):
    library.api.api_key = "x" * 40
    monkeypatch.setattr(loggers.socket, "create_connection", lambda address, timeout: types.SimpleNamespace(close=lambda: None))
    assert loggers.reachable()


@pytest.mark.parametrize("mode", ["offline", "disabled", "dryrun"])
def test_mode_comes_first(library, monkeypatch, mode):
    library.api.api_key = "x" * 40
    monkeypatch.setenv("WANDB_MODE", mode)
    assert not loggers.reachable()


def test_each_job_has_a_run_of_its_own(library):
    library.run = object()
    loggers._finish_earlier_run()
    assert library.finished == 1


def test_logs_offline(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers, "reachable", lambda: False)
    logger = loggers.wandb(tmp_path / "job", project="p", tags=["t"])
    logger.log_metrics({"loss": 1.0}, step=1)
    assert logger.experiment.offline
    assert logger.experiment.name == "job"
    logger.experiment.finish()
    assert len(list((tmp_path / "job" / "wandb").glob("offline-run-*"))) == 1
