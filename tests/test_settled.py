"""Which values of a config are paths, and that they count from the launch folder."""

from pathlib import Path

import pytest
from test_config import composed

from lit_sd.settled import absolute, absolute_paths


@pytest.fixture
def launched(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("where", ["s3://bucket/{00..99}.tar", "https://host/a.tar", "pipe:cat a.tar"])
def test_what_is_fetched_is_no_path(launched, where):
    assert absolute(where) == where


def test_paths_count_from_the_launch_folder(launched):
    cfg = composed("data=webdataset", "data.root=[here/a.tar,s3://there/b.tar]", "data.cache_dir=kept")
    data = absolute_paths(cfg).data
    assert list(data.root) == [str(launched / "here/a.tar"), "s3://there/b.tar"]
    assert data.cache_dir == str(launched / "kept")


def test_a_hubs_name_is_a_path_where_that_lies_here(launched):
    assert absolute_paths(composed("data=hub", "data.root=owner/name")).data.root == "owner/name"
    (launched / "owner/name").mkdir(parents=True)
    there = absolute_paths(composed("data=hub", "data.root=owner/name")).data.root
    assert there == str(launched / "owner/name")


def test_further_sources_have_paths_too(launched):
    lmdb = "{_target_: lit_sd.data.lmdb.LmdbSource, root: packed}"
    hub = "{_target_: lit_sd.data.hub.HubSource, root: owner/name}"
    cfg = composed("data.root=images", f"+data.sources.more={lmdb}", f"+data.sources.far={hub}")
    sources = absolute_paths(cfg).data.sources
    assert sources.more.root == str(launched / "packed")
    assert sources.far.root == "owner/name"
