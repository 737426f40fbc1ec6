"""Records as bytes and back; which examples count, and what is said of the others (F03, F06)."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from lit_sd.data.caption_rules import Caption
from lit_sd.data.packed.packing import Kept, Names, Policy, measure, pack, read_header, unpack
from lit_sd.data.source import Record, content_digest

FULL = Record(
    id="a/b \udcff 🐈.JPG",
    image=b"image\0bytes",
    suffix=".jpg",
    captions=(Caption("ein Kätzchen 🐈", 2.0), Caption("a cat")),
    mask=b"mask",
    control=b"",
    weight=0.5,
    extra={"url": "http://x", "width": 7, "tags": ["a", 1, None]},
)


@pytest.mark.parametrize("record", [FULL, Record("plain", b"x", ".png")], ids=["full", "plain"])
def test_a_record_comes_back_as_it_was(record):
    assert unpack(pack(record, (4, 6))) == record
    assert unpack(memoryview(pack(record, (4, 6)))) == record


def test_the_header_is_json_behind_its_length_and_the_files_follow_as_they_came():
    data = pack(FULL, (4, 6))
    end = 4 + int.from_bytes(data[:4], "little")
    header = json.loads(data[4:end])
    assert data[end:] == b"image\0bytesmask"
    assert header == read_header(data)
    assert header["captions"][0] == {"text": "ein Kätzchen 🐈", "weight": 2.0}
    assert (header["height"], header["width"], header["weight"]) == (4, 6, 0.5)
    assert bytes.fromhex(header["digest"]) == content_digest(b"image\0bytes", b"mask", b"")
    assert header["url"] == "http://x"


def test_a_part_of_a_record_is_none():
    with pytest.raises(ValueError, match="expected a record of"):
        unpack(pack(FULL, (4, 6))[:-1])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Record("x", b"", "", extra={"a": {1, 2}}), "x: .*set.*plain values"),
        (Record("x", b"", "", weight=-1.0), "x: expected a weight of 0 or more, got -1"),
        (Record("x", b"", "", weight=float("nan")), "got nan"),
    ],
)
def test_what_can_not_be_packed_is_named(record, message):
    with pytest.raises(ValueError, match=message):
        pack(record, (1, 1))


def encoded(size: tuple[int, int] = (6, 4), kind: str = "PNG") -> bytes:
    """A file of (width, height)."""
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_measured(kind):
    assert measure(encoded(kind=kind), whole=False) == measure(encoded(kind=kind), whole=True) == (4, 6)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_header_is_enough_unless_all_is_wanted(kind):
    half = encoded((600, 400), kind)[:-60]
    assert measure(half, whole=False) == (400, 600)
    with pytest.raises(OSError, match=r"(?i)truncated"):
        measure(half, whole=True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"text", "its content is no image"),
        (encoded((1, 40)), "it is 40 high and 1 wide, more than 32 to 1"),
    ],
)
def test_why_an_image_can_not_be_trained_on(data, reason):
    with pytest.raises(OSError, match=reason):
        measure(data, whole=False)


def test_names_are_looked_up_when_they_are_asked_for():
    asked = []

    def name_of(i):
        asked.append(i)
        return f"n{i}"

    names = Names(10**8, name_of)
    assert len(names) == 10**8
    assert names[-1] == "n99999999"
    assert names[2:4] == ["n2", "n3"]
    assert asked == [10**8 - 1, 2, 3]
    with pytest.raises(IndexError):
        names[10**8]
    assert list(Names(2, name_of)) == ["n0", "n1"]
    assert list(Names(2, name_of, lambda: ["p", "q"])) == ["p", "q"]


def test_kept_examples_are_counted_without_the_skipped_ones():
    kept = Kept(8, [0, 4, 3, 7, 3])  # 1 2 5 6 are left
    assert len(kept) == 4
    assert [kept.position(i) for i in range(4)] == [1, 2, 5, 6]
    assert kept.mask(2, 6).tolist() == [True, False, False, True]
    assert kept.index(np.arange(9)).tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4]
    for bad in (-1, 4):
        with pytest.raises(IndexError):
            kept.position(bad)


def test_ranges_of_kept_examples():
    stored = np.arange(10, 18)
    for skipped in ([], [0, 3, 4, 7], [1]):
        kept = Kept(8, skipped)
        left = [10 + i for i in range(8) if i not in skipped]
        for start in range(len(left) + 1):
            for stop in (None, *range(len(left) + 2)):
                rows = kept.select(start, stop, lambda first, last: stored[first:last])
                assert rows.tolist() == left[start:stop]


def test_captions_by_policy():
    own = (Caption("own"), Caption("too", 0.5))
    assert Policy().captions(own) == own
    assert Policy().captions((Caption(" "), *own)) == own
    assert Policy("p").captions(own) == Policy("p").captions(()) == (Caption("p"),)
    fill = Policy("p", "prompt")
    assert fill.captions(own) == own
    assert fill.captions((Caption(""),)) == (Caption("p"),)


def test_few_faults_are_noted_and_more_refused():
    skip = Policy(missing_captions="skip", bad_files="skip", max_bad_share=0.25)
    assert skip.judge("here", 8, ["a (broken)", "b (empty)"], ["c"]) == [
        "2 of 8 images can't be read: a (broken), b (empty); they are skipped",
        "1 of 6 images have no caption: c (data.missing_captions=skip)",
    ]
    with pytest.raises(ValueError, match=r"here: 3 of 8 .*: a, b, c; .*max_bad_share=0\.25"):
        skip.judge("here", 8, ["a", "b", "c"], [])
    with pytest.raises(ValueError, match=r"(?s)1 of 8 .*: a; .*bad_files=skip\n1 of 7 .*: c; .*missing_capt"):
        Policy().judge("here", 8, ["a"], ["c"])
    assert Policy("one prompt").judge("here", 2, [], ["a", "b"]) == []


def test_that_no_image_has_a_caption_is_always_an_error():
    for policy, way in (
        (Policy(missing_captions="empty"), "data.prompt="),
        (Policy("p", "prompt"), "data.missing_captions=error"),
    ):
        with pytest.raises(ValueError, match=f"none of the 2 images has a caption; set {way}"):
            policy.judge("here", 2, [], ["a", "b"])


def test_options_out_of_range():
    with pytest.raises(ValueError, match=r"data.missing_captions=prompt needs data.prompt"):
        Policy(missing_captions="prompt")
    for option, choices in (("bad_files", "error, skip"), ("missing_captions", "error, skip, empty, prompt")):
        policy = Policy()
        object.__setattr__(policy, option, "drop")  # past the type checks of the test run
        with pytest.raises(ValueError, match=f"data.{option}='drop'; expected one of {choices}"):
            policy.__post_init__()
