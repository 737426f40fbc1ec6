"""No shard of a streamed dataset is fetched in vain, and none that was thrown out is missed."""

import os

import pytest
from tiny_hub import keep_caches_in, opened, parquet, png

from lit_sd.data import hub_shards
from lit_sd.data.hub_rows import Facts
from lit_sd.data.hub_shards import StreamedRows


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    keep_caches_in(tmp_path, monkeypatch)


@pytest.fixture
def fetched(monkeypatch):
    """Numbers of the shards that were packed, in order."""
    found: list[int] = []
    fetch = StreamedRows._fetch

    def recorded(self, shard: int) -> None:
        found.append(shard)
        fetch(self, shard)

    monkeypatch.setattr(StreamedRows, "_fetch", recorded)
    return found


def test_learning_reads_each_shard_once_and_later_only_what_is_asked_for(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    assert fetched == [0, 1, 2]
    again = opened(root, tmp_path, True)
    assert (again.record(4).image, again.record(0).image) == (png(4), png(0))
    assert fetched == [0, 1, 2]


def test_a_resumed_run_fetches_the_shard_it_lands_in(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    for shard in (tmp_path / "cache").glob("*/shards/*"):
        hub_shards._throw_out(shard)
    fetched.clear()
    source = opened(root, tmp_path, True)
    assert source.sizes(3, 5).tolist() == [[11, 17], [12, 16]]
    assert source.ids()[8] == "000000008"
    assert fetched == []
    assert source.record(8).image == png(8)
    assert source.digest(5) == source.record(5).digest
    assert fetched == [2]


def test_learning_goes_on_where_it_was_stopped(tmp_path, fetched, monkeypatch):
    root = parquet(tmp_path / "in")
    save = Facts.save

    def stop_at_the_third(self, path) -> None:
        if path.stem == "000002":
            raise KeyboardInterrupt
        save(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Facts, "save", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            opened(root, tmp_path, True).check()
    source = opened(root, tmp_path, True)
    assert len(source) == 9
    assert fetched == [0, 1, 2, 2]


def test_little_room_throws_out_what_was_not_used_for_longest(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    file_bytes = max(path.stat().st_size for path in (tmp_path / "cache").glob("*/shards/*/data.mdb"))

    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "cache").glob("*/shards/*"))

    small = opened(root, tmp_path, True, cache_gb=2.5 * file_bytes / 1e9)
    for folder in (tmp_path / "cache").glob("*/shards/000000"):
        hub_shards._throw_out(folder)
    fetched.clear()
    for place, number in ((1, 3), (2, 5)):
        small.record(number)
        manifest = next((tmp_path / "cache").glob(f"*/shards/00000{place}/manifest.json"))
        os.utime(manifest, (place, place))  # long ago, in this order
    opened(root, tmp_path, True).record(4)  # so shard 1 was used after shard 2
    assert small.record(0).image == png(0)
    assert (fetched, there()) == ([0], ["000000", "000001"])
    assert small.record(5).image == png(5)  # thrown out, but this process has it open
    assert fetched == [0]
    assert opened(root, tmp_path, True, cache_gb=1e-9).record(8).image == png(8)
    assert (fetched, there()) == ([0, 2], ["000002"])


def test_a_fork_fetches_again_what_was_thrown_out(tmp_path):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    assert source.record(0).image == png(0)
    for shard in (tmp_path / "cache").glob("*/shards/*"):
        hub_shards._throw_out(shard)
    child = os.fork()
    if child == 0:
        os._exit(0 if source.record(1).image == png(1) and source.record(8).image == png(8) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_damaged_shards_are_fetched_again(tmp_path, fetched):
    root = parquet(tmp_path / "in")
    opened(root, tmp_path, True).check()
    os.truncate(next((tmp_path / "cache").glob("*/shards/000001/data.mdb")), 100)
    next((tmp_path / "cache").glob("*/shards/000002/manifest.json")).unlink()
    fetched.clear()
    source = opened(root, tmp_path, True)
    assert [source.record(i).image for i in range(9)] == [png(i) for i in range(9)]
    assert fetched == [1, 2]


def test_a_shard_that_is_another_now_is_refused(tmp_path):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    source.check()
    other = parquet(tmp_path / "other", image=lambda i: {"bytes": png(i + 1), "path": None})
    for shard in (tmp_path / "cache").glob("*/shards/*"):
        hub_shards._throw_out(shard)
    for path in other.iterdir():
        path.rename(tmp_path / "in" / path.name)
    with pytest.raises(OSError, match=r"shard 1 of 3 has changed since it was measured"):
        source.record(3)
    assert len(opened(tmp_path / "in", tmp_path, True)) == 9  # learnt anew, as another dataset


def test_a_shard_that_can_not_be_read_is_told(tmp_path):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    path = tmp_path / "in" / "train-00001-of-00003.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(OSError, match=r"shard 1 of 3 can't be read"):
        source.check()


def test_what_another_process_reads_is_left_to_it(tmp_path, fetched):
    source = opened(parquet(tmp_path / "in"), tmp_path, True)
    rows = source._open()
    with rows._lock(1):
        assert not rows._learn_one(1, 0)
        assert rows._learn_one(0, 0)
    assert rows._learn_one(0, 0)  # which is known now
    assert fetched == [0]
