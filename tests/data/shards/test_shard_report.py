"""What is said of shards that aren't as they should be (F15), and of captions that are missing (F04)."""

import json

import pytest
from tiny_shards import img2dataset_shard, jpeg, png, tar

from lit_sd.data import webdataset as shards_module
from lit_sd.data.webdataset import ShardSource


@pytest.fixture(autouse=True)
def shard_by_shard(monkeypatch):
    """Small sets are shuffled as one; here as large ones are."""
    monkeypatch.setattr(shards_module, "WHOLE", 0)


IDS = [f"{shard:05d}/{10 * shard + i:09d}" for shard in range(3) for i in range(7)]


@pytest.fixture
def three(tmp_path):
    """Three shards of seven."""
    for i in range(3):
        img2dataset_shard(tmp_path / f"three/{i:05d}.tar", 7, 10 * i)
    return tmp_path / "three"


@pytest.fixture
def faulty(tmp_path):
    """Eight good examples and of each fault one."""
    img2dataset_shard(tmp_path / "00000.tar", 5)
    files = {f"{i}.png": png(i) for i in range(3)} | {f"{i}.txt": b"x" for i in range(5)}
    files |= {"3.jpg": jpeg(3, 64, 64)[:-900]}  # half a JPEG; and 4 has no image
    tar(tmp_path / "00001.tar", files)
    whole = img2dataset_shard(tmp_path / "00002.tar", 3).read_bytes()
    (tmp_path / "00002.tar").write_bytes(whole[:1100])
    (tmp_path / "00003.tar").write_bytes(b"no tar at all")
    return [str(tmp_path / f"{i:05d}.tar") for i in range(5)]


def test_everything_that_is_wrong_is_told_at_once(faulty):
    with pytest.raises(ValueError, match=r"data\.root=.*00004") as error:
        ShardSource(faulty).check()
    text = str(error.value)
    for told in (
        "3 of 5 shards can't be used: 00004 (there is no such shard), 00002 (it is cut off or damaged at",
        "00003 (it is no tar file)",
        "3 of 11 images can't be read: 00001/3 (image file is truncated",
        "00001/4 (it has no image, only .txt)",
        "00002/000000000 (its .jpg is cut off)",
        "data.bad_files=skip",
    ):
        assert told in text


def test_what_is_wrong_is_skipped_and_counted(faulty):
    with pytest.raises(ValueError, match=r"3 of 5 shards.*max_bad_share=0\.5"):
        ShardSource(faulty, bad_files="skip").check()
    source = ShardSource(faulty, bad_files="skip", max_bad_share=0.6)
    wanted = [f"00000/{i:09d}" for i in range(5)] + [f"00001/{i}" for i in range(3)]
    assert list(source.ids()) == wanted
    assert [source.record(i).id for i in range(8)] == wanted
    assert source.blocks().tolist() == [0, 5, 8]
    assert any("3 of 5 shards can't be used" in note for note in source.notes)
    assert any("3 of 11 images can't be read" in note for note in source.notes)
    assert any("the files of 4 examples don't lie together in 00001" in note for note in source.notes)


def test_a_shard_that_ends_early_gives_what_is_whole(three):
    data = (three / "00002.tar").read_bytes()
    (three / "00002.tar").write_bytes(data[: len(data) // 2])
    with pytest.raises(
        ValueError, match=r"1 of 3 shards end early: 00002 \(it is cut off or damaged at byte"
    ):
        ShardSource(three).check()
    source = ShardSource(three, bad_files="skip")
    assert list(source.ids()) == IDS[: len(source)]
    assert 14 < len(source) < 20
    assert any("1 of 3 shards end early" in note for note in source.notes)


def test_without_verify_a_broken_image_is_found_when_it_is_loaded(faulty, tmp_path):
    source = ShardSource(tmp_path / "00001.tar", verify=False, bad_files="skip")
    assert list(source.ids()) == ["00001/0", "00001/1", "00001/2", "00001/3"]
    with pytest.raises(OSError, match=r"images: 00001/3: can't be read as an image"):
        source.load(3)


def test_nothing_but_faults_is_never_skipped(tmp_path):
    with pytest.raises(ValueError, match=r"1 of 1 shards can't be used"):
        ShardSource(tmp_path / "0.tar", bad_files="skip").check()
    with pytest.raises(ValueError, match="no image is left"):
        ShardSource(tar(tmp_path / "1.tar", {"README": b""})).check()


@pytest.fixture
def sparse(tmp_path):
    """Four images: two without caption."""
    files = {
        "0.png": png(0),
        "0.txt": b"zero",
        "1.png": png(1),
        "2.png": png(2),
        "2.txt": b" ",
        "3.png": png(3),
    }
    return tar(tmp_path / "0.tar", files | {"3.json": b'{"caption": "three"}'})


def texts(source) -> list[str]:
    return ["|".join(c.text for c in source.record(i).captions) for i in range(len(source))]


def test_single_missing_captions_follow_the_policy(sparse):
    with pytest.raises(ValueError, match=r"2 of 4 images have no caption: 0/1, 0/2; .*missing_captions=skip"):
        ShardSource(sparse).check()
    skipping = ShardSource(sparse, missing_captions="skip")
    assert list(skipping.ids()) == ["0/0", "0/3"]
    assert texts(skipping) == skipping.captions() == ["zero", "three"]
    assert skipping.blocks().tolist() == [0, 2]
    assert skipping.record(1).image == png(3)
    empty = ShardSource(sparse, missing_captions="empty")
    assert texts(empty) == ["zero", "", "", "three"]
    assert empty.notes == ["2 of 4 images have no caption: 0/1, 0/2 (data.missing_captions=empty)"]
    assert texts(ShardSource(sparse, missing_captions="prompt", prompt="p")) == ["zero", "p", "p", "three"]
    assert texts(ShardSource(sparse, prompt="p")) == ShardSource(sparse, prompt="p").captions() == ["p"] * 4


def test_that_no_caption_is_found_names_the_endings(tmp_path):
    path = tar(tmp_path / "0.tar", {"0.png": png(0), "0.short": b"zero", "1.png": png(1), "1.short": b"one"})
    for policy in ("error", "skip", "empty"):
        with pytest.raises(ValueError, match=r"none of the 2 images has a caption.*found 2 \.png, 2 \.short"):
            ShardSource(path, missing_captions=policy).check()
    assert texts(ShardSource(path, caption_key="short")) == ["zero", "one"]


def test_a_key_of_the_json_may_be_the_caption(tmp_path):
    told = {"caption": "alt text", "llava": ["long", "short"]}
    path = tar(
        tmp_path / "0.tar", {"0.png": png(0), "0.txt": b"alt text", "0.json": json.dumps(told).encode()}
    )
    assert texts(ShardSource(path)) == ["alt text"]
    assert texts(ShardSource(path, caption_key="llava")) == ["long|short"]
    assert texts(ShardSource(path, caption_key="caption")) == ["alt text"]


def test_shards_without_images_are_told(three):
    tar(three / "00003.tar", {"notes.md": b"x"})
    source = ShardSource(three)
    source.check()
    assert source.notes == ["1 shards hold no image: 00003"]
