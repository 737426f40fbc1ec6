from pathlib import Path

import pytest
import yaml

from lit_sd.data.caches.choice import CacheChoice


def test_off_is_what_yaml_makes_of_it():
    assert CacheChoice(yaml.safe_load("cache: off")["cache"]).mode == "off"
    assert CacheChoice().mode == "off"


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CacheChoice("disk", folder="some/where").path == tmp_path / "some" / "where"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CacheChoice("disk", folder=Path("~/x")).path == tmp_path / "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": True}, r"data\.cache=True: expected one of off, memory, disk"),
        ({"mode": "memory"}, r"data\.cache_mb=0: expected more than 0"),
        ({"mode": "disk"}, r"data\.cache_dir is not set"),
        ({"mode": "disk", "folder": " "}, r"data\.cache_dir is not set"),
        ({"batch": 0}, r"data\.cache_batch=0: expected 1 or more"),
    ],
)
def test_what_is_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        CacheChoice(**options)
