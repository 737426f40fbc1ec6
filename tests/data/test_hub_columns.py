"""Which columns of a Hugging Face dataset make an example, and which can't."""

import pytest
from datasets import Dataset, List, Value
from tiny_hub import IMAGE, keep_caches_in, opened, parquet, png, saved

from lit_sd.data.caption_rules import Caption


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    keep_caches_in(tmp_path, monkeypatch)


EXTRAS = {
    "mask": IMAGE,
    "edge": IMAGE,
    "often": Value("float32"),
    "key": Value("int64"),
    "raw": Value("binary"),
}
EXTRA_CELLS = {
    "text": lambda i: [f"a{i}", None, f"b{i}"],
    "mask": lambda i: None if i == 1 else {"bytes": png(i + 1), "path": None},
    "edge": lambda i: {"bytes": png(i, "JPEG"), "path": None},
    "often": lambda i: i / 2,
    "key": lambda i: 100 - i,
    "raw": lambda i: png(i, "JPEG"),
}


@pytest.mark.parametrize("streaming", [False, True])
def test_all_columns(tmp_path, streaming):
    root = parquet(tmp_path / "in", features=EXTRAS | {"text": List(Value("string"))}, **EXTRA_CELLS)
    source = opened(
        root,
        tmp_path,
        streaming,
        mask_column="mask",
        control_column="edge",
        weight_column="often",
        id_column="key",
    )
    assert list(source.ids()) == [str(100 - i) for i in range(9)]
    assert source.draw_weights().tolist() == [i / 2 for i in range(9)]
    assert source.draw_weights(7).tolist() == [3.5, 4.0]
    record = source.record(3)
    assert (record.id, record.weight) == ("97", 1.5)
    assert record.captions == (Caption("a3"), Caption("b3"))
    assert (record.mask, record.control) == (png(4), png(3, "JPEG"))
    assert source.record(1).mask is None
    raw = opened(root, tmp_path, streaming, image_column="raw", prompt="p")
    assert (raw.record(5).image, raw.record(5).suffix) == (png(5, "JPEG"), ".jpg")


def test_captions_with_weights(tmp_path):
    pairs = List({"text": Value("string"), "weight": Value("float64")})
    root = saved(
        tmp_path / "in",
        {"text": pairs},
        text=lambda i: [{"text": "a", "weight": 2.0}, {"text": "b", "weight": None}],
    )
    assert opened(root, tmp_path).record(0).captions == (Caption("a", 2.0), Caption("b", 1.0))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_column": "img"},
            r"image_column=img: there is no .*; there is image, text; nearest: image",
        ),
        (
            {"caption_column": "zzz"},
            r"data\.caption_column=zzz: there is no such column; there is .*, text$",
        ),
        ({"image_column": "text"}, r"data\.image_column=text: expected encoded images .*, got Value"),
        ({"caption_column": "image"}, r"data\.caption_column=image: expected texts, or lists of texts, got"),
        ({"weight_column": "text"}, r"data\.weight_column=text: expected numbers"),
        ({"id_column": "image"}, r"data\.id_column=image: expected texts or whole numbers"),
        ({"image_column": "a", "mask_column": "b"}, r"(?s)image_column=a.*\n.*mask_column=b"),
    ],
)
def test_columns_that_are_not_there_or_hold_something_else(tmp_path, streaming, options, message):
    root = parquet(tmp_path / "in", (1,))
    with pytest.raises(ValueError, match=message):
        opened(root, tmp_path, streaming, **options).check()


def test_images_as_arrays_are_refused(tmp_path):
    Dataset.from_dict({"image": [[[1, 2], [3, 4]]], "text": ["x"]}).save_to_disk(tmp_path / "in")
    with pytest.raises(ValueError, match=r"expected encoded images \(a feature of kind Image, or bi"):
        opened(tmp_path / "in", tmp_path).check()
