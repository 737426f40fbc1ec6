"""Banded lookup finds every near pair, and stays cheap where everything looks alike (against brute force);
what is kept of a cluster, by hand.
"""

from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from lit_sd.prepare import near
from lit_sd.prepare.database import DECISIONS, Database, bits_apart
from lit_sd.prepare.duplicates import refuse_duplicates
from lit_sd.prepare.near import (
    Bucket,
    Clusters,
    Likeness,
    buckets,
    cut,
    find_clusters,
    find_leaks,
    keepers,
)
from lit_sd.prepare.settings import Settings

ALL = "SELECT key, phash, colour, parts FROM images"
GREY = bytes(12)


def filled(path: Path, hashes: list[int], colours: list[bytes] | None = None, first: int = 0) -> Database:
    database = Database(path / "facts.sqlite")
    rows = [(first + i, str(i), value, colours[i] if colours else GREY) for i, value in enumerate(hashes)]
    database.many("INSERT INTO images(key, id, phash, colour, parts) VALUES (?, ?, ?, ?, 0)", rows)
    return database


def clustered_hashes(count: int, seed: int) -> list[int]:
    """Random hashes, and near them others that differ by 1 to 7 bits; some of them negative numbers."""
    rng = np.random.default_rng(seed)
    bases = rng.integers(-(2**63), 2**63 - 1, count // 3)
    found = [int(base) for base in bases]
    while len(found) < count:
        value = int(rng.choice(bases)) & (2**64 - 1)
        for bit in rng.choice(64, rng.integers(1, 8), replace=False):
            value ^= 1 << int(bit)
        found.append(value - 2**64 if value >= 2**63 else value)
    return found


def brute_pairs(hashes: list[int], distance: int) -> set[tuple[int, int]]:
    """Pairs by comparing all, with Python's own arithmetic."""
    return {
        (i, j)
        for i, j in combinations(range(len(hashes)), 2)
        if bin((hashes[i] ^ hashes[j]) & (2**64 - 1)).count("1") <= distance
    }


@pytest.mark.parametrize("distance", [0, 1, 4, 6])
@pytest.mark.parametrize("direct", [1024, 4])
def test_the_pairs_are_those_of_brute_force(distance: int, direct: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(near, "DIRECT", direct)  # 4 cuts nearly all buckets once more
    hashes = clustered_hashes(400, seed=distance)
    found = set()
    for bucket in buckets(filled(tmp_path, hashes), ALL, distance):
        for one, other in combinations(bucket.keys.tolist(), 2):
            if bits_apart(hashes[one], hashes[other]) <= distance:
                found.add((min(one, other), max(one, other)))
    expected = brute_pairs(hashes, distance)
    assert len(expected) > 20 or distance == 0
    assert found == expected


def bucket_of(hashes: list[int], colours: npt.ArrayLike | None = None) -> Bucket:
    grey = np.zeros((len(hashes), 12)) if colours is None else colours
    return Bucket(np.arange(len(hashes)), np.array(hashes, np.uint64), np.array(grey, np.uint8))


CHAIN = [(1 << 4 * i) - 1 for i in range(9)]
"""Each hash has 4 bits more than the one before, so 8 bits lie between the first and the third."""


@pytest.mark.parametrize("direct", [1024, 4])
@pytest.mark.parametrize(
    ("order", "kept"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 2, 2, 4, 4, 6, 6, 8]),
        ([8, 7, 6, 5, 4, 3, 2, 1, 0], [8, 8, 6, 6, 4, 4, 2, 2, 0]),
        ([1, 0, 2, 3, 4, 5, 6, 7, 8], [1, 1, 1, 3, 3, 5, 5, 7, 7]),
        ([4, 0, 8, 1, 7, 2, 6, 3, 5], [4, 0, 8, 0, 8, 2, 6, 4, 4]),
    ],
)
def test_of_a_chain_goes_only_what_is_near_to_what_is_kept(
    direct: int, order: list[int], kept: list[int], monkeypatch
) -> None:
    monkeypatch.setattr(near, "DIRECT", direct)  # 4 looks them up by band
    found = keepers(bucket_of([CHAIN[i] for i in order]), Likeness(4, 16.0))
    assert [order[i] for i in found] == kept


@pytest.mark.parametrize(("colour", "kept"), [(9, [0, 1, 2]), (16, [0, 0, 2]), (20, [0, 0, 0])])
def test_a_chain_of_colours_is_cut_too(colour: float, kept: list[int]) -> None:
    levels = [[level] * 12 for level in (100, 110, 120)]
    assert keepers(bucket_of([5, 5, 5], levels), Likeness(4, colour)).tolist() == kept


@pytest.mark.parametrize("direct", [1024, 4])
@pytest.mark.parametrize("distance", [0, 3, 6])
def test_what_is_refused_is_what_one_finds_who_compares_all(
    direct: int, distance: int, tmp_path: Path, monkeypatch
) -> None:
    """Largest first, each against all that are kept so far, with Python's own arithmetic."""
    monkeypatch.setattr(near, "DIRECT", direct)
    hashes = clustered_hashes(400, seed=9)
    sizes = np.random.default_rng(3).permutation(400) + 1
    database = filled(tmp_path, hashes)
    database.connection.executescript(DECISIONS)
    database.many("UPDATE images SET width = 1, length = 1, height = ? WHERE key = ?", enumerate_sizes(sizes))
    refuse_duplicates(database, Settings(near=distance, off=("exact_duplicate",)))
    pairs = brute_pairs(hashes, distance)
    kept: list[int] = []
    expected = {}
    for key in np.argsort(-sizes).tolist():
        alike = [other for other in kept if (min(key, other), max(key, other)) in pairs]
        if alike:
            expected[key] = alike[0]
        else:
            kept.append(key)
    assert len(expected) > 20 or distance == 0
    told = database.all("SELECT key, json_extract(detail, '$.key') FROM verdicts")
    assert dict(told) == expected


def enumerate_sizes(sizes: np.ndarray) -> list[tuple[int, int]]:
    return [(size, key) for key, size in enumerate(sizes.tolist())]


def test_bands_cover_all_bits_once() -> None:
    for bands in range(1, 18):
        widths = [len(band) for band in cut(list(range(64)), bands)]
        assert sum(widths) == 64
        assert max(widths) - min(widths) <= 1


def test_other_colours_make_another_picture(tmp_path: Path) -> None:
    red, reddish, blue = bytes([220, 40, 60] * 4), bytes([210, 50, 60] * 4), bytes([85, 170, 240] * 4)
    database = filled(tmp_path, [5, 5, 5], [red, blue, reddish])
    clusters = Clusters(tmp_path / "forest", 3)
    find_clusters(database, ALL, Likeness(4, 16), clusters)
    assert dict(clusters.members()) == {0: 0, 2: 0}


def test_many_alike_are_not_compared_pair_by_pair(tmp_path: Path, monkeypatch) -> None:
    count, compared = 3000, []
    close = Likeness.close

    def counted(self, bucket, among, to):
        compared.append(len(among))
        return close(self, bucket, among, to)

    monkeypatch.setattr(Likeness, "close", counted)
    clusters = Clusters(tmp_path / "forest", count)
    find_clusters(filled(tmp_path, [-1] * count), ALL, Likeness(4, 16), clusters)
    assert {root for _, root in clusters.members()} == {0}
    assert count <= sum(compared) < 200 * count  # of 4.5 million pairs, in each of 5 bands


def test_a_cluster_of_copies_is_compared_once(monkeypatch) -> None:
    compared = []
    close = Likeness.close

    def counted(self, bucket, among, to):
        compared.append(len(among))
        return close(self, bucket, among, to)

    monkeypatch.setattr(Likeness, "close", counted)
    assert keepers(bucket_of([7] * 3000), Likeness(4, 16)).tolist() == [0] * 3000
    assert compared == [2999, 0, 0, 0, 0]  # the first band finds them all, the other four have none left


def test_leaks_are_told_by_what_they_repeat_and_how_far_they_are(tmp_path: Path) -> None:
    hashes = [0b0, 0b111, 0b11111, 0b1111 << 30, 1 << 63]  # of keys -2 to 2, as SQLite's signed numbers
    hashes = [value - 2**64 if value >= 2**63 else value for value in hashes]
    database = filled(tmp_path, hashes, first=-2)
    found = set()
    find_leaks(database, ALL, Likeness(4, 16), lambda *leak: found.add(leak))
    # -2: no bits; -1: 3 bits. 0 has 5 bits, 2 more than -1; 1 has 4 others; 2 has 1 other.
    assert {key for key, _, _ in found} == {0, 1, 2}
    assert {leak for leak in found if leak[0] == 0} == {(0, -1, 2)}
    assert {leak for leak in found if leak[0] == 1} == {(1, -2, 4)}
    assert (2, -2, 1) in found
