"""W&B without a key or a network, and one run for each job of a sweep."""

import sys
import types

import pytest

from lit_sd import loggers

DEFAULTS = {"project": "p", "name": None, "offline": None, "tags": [], "group": None}


@pytest.fixture
def library(monkeypatch, tmp_path):
    """A stand-in for the wandb library."""
    settings = types.SimpleNamespace(api_key=None, base_url="http://localhost:9")
    made = types.SimpleNamespace(
        setup=lambda: types.SimpleNamespace(settings=settings),
        settings=settings,
        run=None,
        finished=0,
    )
    made.finish = lambda: setattr(made, "finished", made.finished + 1)
    monkeypatch.setitem(sys.modules, "wandb", made)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


def test_no_key(library):
    assert not loggers.reachable()


def test_no_network(library, monkeypatch):
    library.settings.api_key = "x" * 40

    def unreachable(address, timeout):
        assert address == ("localhost", 9)
        raise OSError("unreachable")

    monkeypatch.setattr(loggers.socket, "create_connection", unreachable)
    assert not loggers.reachable()


def test_key_and_network(library, monkeypatch):
    library.settings.api_key = "x" * 40
    monkeypatch.setattr(
        loggers.socket,
        "create_connection",
        lambda address, timeout: types.SimpleNamespace(close=lambda: None),
    )
    assert loggers.reachable()


def test_key_of_wandb_login(library, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text(f"machine localhost login user password {'x' * 40}\n")
    monkeypatch.setattr(loggers.socket, "create_connection", refuse)
    with pytest.raises(AssertionError, match="asked"):
        loggers.reachable()
    (tmp_path / "netrc").write_text("machine elsewhere login user password x\n")
    assert not loggers.reachable()


def refuse(address, timeout):
    raise AssertionError(f"asked {address}")


def test_real_library_has_what_is_asked(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:9")
    monkeypatch.setattr(loggers.socket, "create_connection", refuse)
    with pytest.raises(AssertionError, match=r"asked \('localhost', 9\)"):
        loggers.reachable()
    __import__("wandb").teardown()  # else later tests of this process would be online


@pytest.mark.parametrize(
    ("asked", "mode"),
    [("online", "online"), ("offline", "offline"), ("disabled", "disabled"), ("dryrun", "offline")],
)
def test_the_users_mode_comes_first_and_is_not_explained(
    library, monkeypatch, tmp_path, capsys, caplog, asked, mode
):
    """Key and network are not looked at, and the mode is not said to come from there."""
    library.settings.api_key = "x" * 40
    monkeypatch.setattr(loggers.socket, "create_connection", refuse)
    monkeypatch.setenv("WANDB_MODE", asked)
    made = logger_of(tmp_path, monkeypatch)
    assert made["mode"] == mode
    assert made["offline"] == (mode == "offline")
    assert "no key" not in caplog.text + capsys.readouterr().err


@pytest.mark.parametrize(("key", "mode"), [(None, "offline"), ("x" * 40, "online")])
def test_without_one_key_and_network_decide(library, monkeypatch, tmp_path, key, mode):
    library.settings.api_key = key
    told = []
    monkeypatch.setattr(loggers, "rank_zero_info", told.append)
    connected = types.SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(loggers.socket, "create_connection", lambda address, timeout: connected)
    assert logger_of(tmp_path, monkeypatch)["mode"] == mode
    assert [line.split(",")[0] for line in told] == (
        ["W&B: no key or no network"] if mode == "offline" else []
    )


@pytest.mark.parametrize(("offline", "mode"), [(True, "offline"), (False, "online")])
def test_the_config_wins_over_all(library, monkeypatch, tmp_path, offline, mode):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert logger_of(tmp_path, monkeypatch, offline=offline)["mode"] == mode


def logger_of(folder, monkeypatch, **options):
    """What Lightning's logger is made with."""
    made = {}
    monkeypatch.setattr(loggers.WandbLogger, "__init__", lambda self, **given: made.update(given))
    loggers.wandb(folder, **DEFAULTS | options)
    return made


def test_each_job_has_a_run_of_its_own(library):
    library.run = object()
    loggers._finish_earlier_run()
    assert library.finished == 1


def test_logs_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(loggers, "reachable", lambda: False)
    logger = loggers.wandb(tmp_path / "job", **DEFAULTS | {"tags": ["t"]})
    logger.log_metrics({"loss": 1.0}, step=1)
    assert logger.experiment.offline
    assert logger.experiment.name == "job"
    logger.experiment.finish()
    assert len(list((tmp_path / "job" / "wandb").glob("offline-run-*"))) == 1
