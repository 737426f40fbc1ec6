"""Digests of what a source holds: files that have not changed are not read again."""

import pickle

import numpy as np
import pytest
from picture_source import PictureSource, noise

from lit_sd.data.caches.digests import Facts, Stamps, gather_facts
from lit_sd.data.source import content_digest
from lit_sd.together import Together

SIZES = [(16, 24), (32, 16), (8, 8)]


def rows(facts: Facts) -> list:
    return [facts[i] for i in range(len(facts))]


def test_digest_and_size_of_each(tmp_path):
    source = PictureSource(SIZES)
    facts = gather_facts(source, tmp_path)
    assert rows(facts) == [
        (content_digest(data), size) for data, size in zip(source.pictures, SIZES, strict=True)
    ]
    assert facts.sizes(np.array([2, 0])).tolist() == [[8, 8], [16, 24]]
    assert rows(pickle.loads(pickle.dumps(facts))) == rows(facts)


def test_only_what_has_changed_is_read_again(tmp_path):
    source = PictureSource(SIZES)
    first = rows(gather_facts(source, tmp_path))
    assert source.reads == 3
    assert rows(gather_facts(source, tmp_path)) == first
    assert source.reads == 3
    source.edit(1, noise(9, SIZES[1]))
    second = rows(gather_facts(source, tmp_path))
    assert source.reads == 4
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]


def test_a_touched_file_is_read_and_is_the_same(tmp_path):
    source = PictureSource(SIZES)
    first = rows(gather_facts(source, tmp_path))
    source.edit(0, source.pictures[0])
    assert rows(gather_facts(source, tmp_path)) == first
    assert source.reads == 4


def test_a_kind_without_stamps_is_asked_each_time(tmp_path):
    source = PictureSource(SIZES)
    source.versions = None
    gather_facts(source, tmp_path)
    source.pictures[0] = noise(9, SIZES[0])
    assert gather_facts(source, tmp_path)[0][0] == content_digest(source.pictures[0])


def test_a_file_that_is_gone_is_said(tmp_path):
    class Gone(PictureSource):
        def stamp(self, index):
            return None if index else "here"

        def record(self, index):
            if index:
                raise OSError(f"{index} is gone")
            return super().record(index)

    for _ in range(2):
        with pytest.raises(OSError, match="1 is gone"):
            gather_facts(Gone(SIZES), tmp_path)


def test_two_sources_of_equal_names_are_told_apart(tmp_path):
    """Both folders have a 0.png: their facts may not overwrite each other."""
    one, other = PictureSource(SIZES), PictureSource(SIZES)
    other.pictures = [noise(i + 100, size) for i, size in enumerate(SIZES)]
    other.versions = [7] * 3
    facts = [gather_facts(source, tmp_path) for source in (one, other)]
    assert [rows(f)[0][0] for f in facts] == [content_digest(s.pictures[0]) for s in (one, other)]


def test_parts_of_ranks_are_joined_in_order(tmp_path):
    """Three ranks, one after the other: each hands in what the others do."""

    class Taken(Together):
        """Runs all ranks' work in this process."""

        def __init__(self):
            super().__init__()
            self.world_size = 3

        def run(self, what, work):
            results = []
            for self.rank in range(3):
                results.append(work())
            self.rank = 0
            return results

        def share(self, total):
            return range(total)

    source = PictureSource(SIZES)
    facts = gather_facts(source, tmp_path, Taken())
    assert rows(facts) == 3 * rows(gather_facts(source, tmp_path))
    assert not list(tmp_path.glob(".*"))


def test_stamps_that_end_in_zero_bytes(tmp_path):
    stamps = np.zeros((3, 16), np.uint8)
    stamps[:, 0] = 1, 2, 3
    digests = np.full((3, 16), 5, np.uint8)
    table = Stamps(tmp_path / "stamps.npy")
    table.add(np.concatenate([stamps, digests], 1)[[2, 0]])
    found, known = Stamps(tmp_path / "stamps.npy").look_up(stamps)
    assert known.tolist() == [True, False, True]
    assert (found[known] == 5).all()


def test_another_table_is_refused(tmp_path):
    np.save(tmp_path / "stamps.npy", np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"stamps\.npy: expected a table of stamps"):
        Stamps(tmp_path / "stamps.npy")
