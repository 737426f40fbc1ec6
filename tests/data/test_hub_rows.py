"""What set-up learns of rows on this machine is learnt once."""

import pytest
from tiny_hub import keep_caches_in, opened, png, saved, size

from lit_sd.data import hub_rows
from lit_sd.data.hub import HubSource


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    keep_caches_in(tmp_path, monkeypatch)


def test_headers_are_read_once(tmp_path, monkeypatch):
    root = saved(tmp_path / "in")
    first = opened(root, tmp_path)
    first.check()
    monkeypatch.setattr(hub_rows, "judge", lambda *_: pytest.fail("read again"))
    again = opened(root, tmp_path)
    assert again.sizes().tolist() == first.sizes().tolist()
    assert again.identity() == first.identity()
    with pytest.raises(pytest.fail.Exception):
        HubSource(root).check()  # nowhere to keep it
    assert [path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()] == ["facts"]


def test_many_rows_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_rows, "STEP", 2)
    monkeypatch.setattr(hub_rows, "_AT_ONCE", 2)
    root = saved(tmp_path / "in", image=lambda i: {"bytes": b"bad" if i == 5 else png(i), "path": None})
    source = opened(root, tmp_path, bad_files="skip")
    assert source.sizes().tolist() == [list(size(i)) for i in range(9) if i != 5]
    assert "000000005" in source.notes[0]
