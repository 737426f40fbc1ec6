"""Captions and JSON beside an image: ours, img2dataset's, and what is neither."""

import json

import pytest
from tiny_shards import encoded, jpeg, picture, png

from lit_sd.data.caption_rules import Caption
from lit_sd.data.shards.texts import captions_of, extra_of, image_suffix, packed_json, parse_json, weight_of
from lit_sd.data.source import Record

RECORD = Record(
    id="cats/a cat.jpg",
    image=b"image",
    suffix=".jpg",
    captions=(Caption("a  cat \U0001f408", 2.0), Caption("an animal", 0.5)),
    weight=0.25,
    extra={"url": "https://h", "id": "of another"},
)


def test_what_is_packed_is_what_the_format_says():
    content = json.loads(packed_json(RECORD, (30, 40)))
    assert content == {
        "id": "cats/a cat.jpg",
        "captions": [{"text": "a  cat \U0001f408", "weight": 2.0}, {"text": "an animal", "weight": 0.5}],
        "width": 40,
        "height": 30,
        "weight": 0.25,
        "digest": RECORD.digest.hex(),
        "url": "https://h",
        "extra": {"id": "of another"},
    }
    assert captions_of(b"a cat", content, None) == RECORD.captions, "those of the JSON, with their spaces"
    assert extra_of(content) == RECORD.extra
    assert weight_of(content) == 0.25


def test_what_can_not_be_packed_is_refused():
    with pytest.raises(ValueError, match=r"a\.jpg: .*plain values"):
        packed_json(Record("a.jpg", b"", ".jpg", extra={"x": object()}), (1, 1))
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"a\.jpg: expected a weight"):
            packed_json(Record("a.jpg", b"", ".jpg", weight=weight), (1, 1))


@pytest.mark.parametrize(
    ("text", "content", "key", "wanted"),
    [
        (b"\xef\xbb\xbfa cat\r\n on a  mat\n", None, None, ["a cat on a mat"]),
        ("caf\xe9 \U0001f408".encode(), {"caption": "other"}, None, ["caf\xe9 \U0001f408"]),
        (b" \n", {"caption": "of the JSON"}, None, ["of the JSON"]),
        (None, {"text": "x"}, None, ["x"]),
        (None, {"caption": None, "captions": ["a", " ", "b"]}, None, ["a", "b"]),
        (None, {"captions": [{"text": "a", "weight": 3}]}, None, [("a", 3.0)]),
        (None, {"caption": "a", "llava": "b"}, "llava", ["b"]),
        (None, {"caption": "a"}, "llava", []),
        (None, {"caption": None}, None, []),
        (None, None, None, []),
    ],
)
def test_where_captions_come_from(text, content, key, wanted):
    found = captions_of(text, content, key)
    assert found == tuple(Caption(*each) if isinstance(each, tuple) else Caption(each) for each in wanted)


@pytest.mark.parametrize("stored", [7, ["a", 7], [{"weight": 1}], [{"text": "a", "weight": "much"}], [["a"]]])
def test_what_is_no_caption_is_named(stored):
    with pytest.raises(ValueError, match="expected a caption, got"):
        captions_of(None, {"caption": stored}, None)


def test_weights_and_extra_of_others_json_are_theirs():
    told = {"caption": "a", "weight": 7, "sha256": "0"}
    assert weight_of(told) == 1.0
    assert weight_of(None) == 1.0
    assert extra_of(told) == told
    assert extra_of(None) == {}


def test_a_weight_that_is_none_is_refused():
    content = json.loads(packed_json(RECORD, (30, 40)))
    for weight in (-1, "2", True, None, float("inf")):
        with pytest.raises(ValueError, match="its weight is"):
            weight_of(content | {"weight": weight})


@pytest.mark.parametrize("data", [b"{", b"[1]", b"\xff", b""])
def test_what_is_no_json_object_is_refused(data):
    with pytest.raises(ValueError, match=r"its \.json"):
        parse_json(data)


def test_the_suffix_follows_the_name_or_else_the_content():
    assert image_suffix(b"whatever", ".JPEG") == "jpeg"
    assert image_suffix(png()) == "png"
    assert image_suffix(jpeg(), ".heic") == "jpg"
    assert image_suffix(encoded(picture(), "WEBP"), "") == "webp"
