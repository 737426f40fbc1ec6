"""A cache on disk without what nothing asks for."""

import numpy as np
import pytest

from lit_sd.data.caches.parts import Parts
from lit_sd.data.caches.pruning import prune_parts
from lit_sd.data.caches.writer import KEY, PartWriter


def key(i: int) -> bytes:
    """Ends with zero bytes, which numpy's own text type drops."""
    return i.to_bytes(2, "big") + b"\xff" * 12 + b"\0\0"


def keys(numbers):
    return np.frombuffer(b"".join(map(key, numbers)), KEY)


@pytest.fixture
def folder(tmp_path):
    """Parts with 0 to 2, 3 to 5 and 6 to 8; 4 is also in the last one."""
    for numbers in (range(3), range(3, 6), [*range(6, 9), 4]):
        with PartWriter(tmp_path, "k") as writer:
            for i in numbers:
                writer.write(key(i), b"value %d" % i)
    return tmp_path


def held(folder):
    parts = Parts(folder, "k")
    parts.refresh()
    values = parts.values([key(i) for i in range(9)])
    return {i: bytes(value) for i, value in enumerate(values) if value is not None}


def test_what_is_asked_for_stays(folder):
    """The first part stays as it is; 4 and 7 of the others are in a new one, 4 once."""
    (first,) = [path for path in folder.iterdir() if keys([1])[0] in np.load(path / "keys.npy")]
    assert prune_parts(folder, "k", keys([0, 1, 2, 4, 7, 99])) == 4
    assert held(folder) == {i: b"value %d" % i for i in (0, 1, 2, 4, 7)}
    assert len(list(folder.iterdir())) == 2
    assert first.is_dir()
    assert prune_parts(folder, "k", keys([0, 1, 2, 4, 7])) == 0


def test_nothing_asked_for_leaves_nothing(folder):
    assert prune_parts(folder, "k", keys([])) == 10
    assert list(folder.iterdir()) == []


def test_a_failure_drops_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError("no room")

    monkeypatch.setattr(PartWriter, "close", full)
    with pytest.raises(OSError, match="no room"):
        prune_parts(folder, "k", keys([4]))
    assert held(folder) == {i: b"value %d" % i for i in range(9)}


def test_a_writer_that_lives_keeps_its_part(folder):
    with PartWriter(folder, "k") as writer:
        writer.write(key(5), b"new")
        assert prune_parts(folder, "k", keys([0])) == 9
    assert held(folder) == {0: b"value 0", 5: b"new"}
