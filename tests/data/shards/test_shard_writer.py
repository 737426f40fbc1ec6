"""Writing shards: the same bytes for the same examples, complete ones only, and on after a kill."""

import json
import os
import sys
import tarfile

import pytest
from tiny_shards import encoded, jpeg, picture, png

from lit_sd.data.caption_rules import Caption
from lit_sd.data.shards.index import load_index
from lit_sd.data.shards.writer import ShardWriter
from lit_sd.data.source import Record

pytest.importorskip("webdataset", reason="shards are written with webdataset")


def record(i: int, **options) -> Record:
    return Record(f"{i}.png", png(i), ".png", (Caption(f"picture {i}"), Caption("x", 0.5)), **options)


def write(out, numbers, **options) -> None:
    with ShardWriter(out, **options) as writer:
        for i in numbers:
            writer.write(record(i), (16, 16))


def tree(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def shards(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def test_the_layout_is_that_of_webdataset(tmp_path):
    with ShardWriter(tmp_path / "out") as writer:
        mask, control = encoded(picture(1).convert("L")), jpeg(2)
        photo = Record("cats/a.JPEG", jpeg(0), ".jpeg", (Caption("a cat"),), mask, control, 2.0, {"url": "u"})
        writer.write(photo, (16, 16))
        writer.write(Record("b.png", png(1), ".png"), (16, 16))
    with tarfile.open(tmp_path / "out/00000.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
        facts = {(member.mtime, member.uid, member.gid, member.mode) for member in tar.getmembers()}
    first, second = json.loads(files.pop("000000000.json")), json.loads(files.pop("000000001.json"))
    assert files == {
        "000000000.jpeg": jpeg(0),
        "000000000.txt": b"a cat",
        "000000000.mask.png": mask,
        "000000000.control.jpg": control,
        "000000001.png": png(1),
    }
    assert facts == {(0, 0, 0, 0o644)}
    assert first["id"] == "cats/a.JPEG"
    assert (first["height"], first["width"], first["weight"], first["url"]) == (16, 16, 2.0, "u")
    assert second["captions"] == []
    assert json.loads((tmp_path / "out/index.json").read_text())["shardlist"] == [
        {"url": "00000.tar", "nsamples": 2, "filesize": (tmp_path / "out/00000.tar").stat().st_size}
    ]


def test_a_shard_is_full_by_number_or_by_size(tmp_path):
    write(tmp_path / "a", range(7), shard_size=3)
    listed = json.loads((tmp_path / "a/index.json").read_text())["shardlist"]
    assert [(row["url"], row["nsamples"]) for row in listed] == [
        ("00000.tar", 3),
        ("00001.tar", 3),
        ("00002.tar", 1),
    ]
    write(tmp_path / "b", range(4), shard_mb=1.5 * len(png(0)) / 2**20)
    listed = json.loads((tmp_path / "b/index.json").read_text())["shardlist"]
    assert [row["nsamples"] for row in listed] == [2, 2]
    with pytest.raises(ValueError, match="shard_size=0"):
        ShardWriter(tmp_path / "c", shard_size=0)


def test_equal_examples_give_equal_bytes(tmp_path):
    write(tmp_path / "a", range(5), shard_size=2)
    write(tmp_path / "b", range(5), shard_size=2)
    assert len(shards(tmp_path / "a")) == 3
    assert shards(tmp_path / "a") == shards(tmp_path / "b")


def test_until_it_is_closed_nothing_is_there(tmp_path):
    writer = ShardWriter(tmp_path / "deep/out", shard_size=2)
    for i in range(3):
        writer.write(record(i), (16, 16))
    assert not (tmp_path / "deep/out").exists()
    writer.close()
    writer.close()
    assert not (tmp_path / "deep/out.partial").exists()
    assert [name for name in tree(tmp_path / "deep/out") if "lock" in name] == []


def write_and_die(out, count: int, gently: bool) -> None:
    """Writes some examples in a process that ends by an exception, or at once."""
    child = os.fork()
    if child == 0:
        try:
            with ShardWriter(out, shard_size=2) as writer:
                for i in range(count):
                    writer.write(record(i), (16, 16))
                if not gently:
                    os._exit(0)
                raise KeyboardInterrupt
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("gently", [True, False])
@pytest.mark.parametrize("done", [0, 1, 2, 5, 6])
def test_after_a_kill_it_goes_on_and_gives_the_same(tmp_path, done, gently):
    write(tmp_path / "straight", range(6), shard_size=2)
    write_and_die(tmp_path / "out", done, gently)
    assert not (tmp_path / "out").exists()
    with ShardWriter(tmp_path / "out", resume=True, shard_size=2) as writer:
        assert writer.written == done // 2 * 2
        for i in range(writer.written, 6):
            writer.write(record(i), (16, 16))
        assert writer.written == 6
    assert shards(tmp_path / "out") == shards(tmp_path / "straight")
    assert (
        tree(tmp_path / "out")["index.json"].replace(b'"out"', b'"straight"')
        == (tree(tmp_path / "straight")["index.json"])
    )


def test_a_shard_without_its_index_is_written_again(tmp_path):
    write_and_die(tmp_path / "out", 6, True)
    (tmp_path / "out.partial/shard-index/00001.npz").write_bytes(b"half")
    with ShardWriter(tmp_path / "out", resume=True, shard_size=2) as writer:
        assert writer.written == 2
        assert list(shards(tmp_path / "out.partial")) == ["00000.tar"]


def test_what_is_there_is_not_overwritten(tmp_path):
    write(tmp_path / "out", range(2))
    for resume in (False, True):
        with pytest.raises(FileExistsError, match="out is there already"):
            ShardWriter(tmp_path / "out", resume=resume)
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(FileExistsError, match=r"other\.partial is there"):
        ShardWriter(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", range(1))


def test_two_can_not_write_at_once(tmp_path):
    with ShardWriter(tmp_path / "out") as writer:
        with pytest.raises(OSError, match="another process is packing"):
            ShardWriter(tmp_path / "out", resume=True)
        writer.write(record(0), (16, 16))


def test_its_index_is_that_of_a_reader_and_outlives_a_copy(tmp_path):
    write(tmp_path / "out", range(3), shard_size=2)
    index = load_index(tmp_path / "out/shard-index/00000.npz")
    assert index.ids == ["0.png", "1.png"]
    assert index.sizes.tolist() == [[16, 16]] * 2
    assert index.entry.verified
    assert index.entry.mtime_ns is None


def test_what_can_not_be_read_back_is_told(tmp_path):
    with (
        pytest.raises(ValueError, match=r"can't be read back.*no image"),
        ShardWriter(tmp_path / "out") as writer,
    ):
        writer.write(Record("a.jpg", b"milk, eggs", ".jpg"), (16, 16))


def test_without_webdataset_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lit-sd\[data\]'"):
        ShardWriter(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
