"""Each rule refuses the picture that was made for it, and lets its neighbour pass."""

from pathlib import Path

import pytest
from PIL import Image
from small_data import decisions, encoded, picture, refused, run, write_folder

LATIN = "a café at night".encode("latin-1")


def half(image: Image.Image) -> bytes:
    data = encoded(image, "JPEG", quality=95)
    return data[: len(data) // 2]


def speckled() -> Image.Image:
    image = Image.new("RGB", (64, 64), "white")
    image.putpixel((5, 5), (0, 0, 0))
    return image


def tinted() -> Image.Image:
    """A faint picture: a fifth of it is 8 levels darker, so that it deviates by 8 * sqrt(0.2 * 0.8) = 3.2."""
    image = Image.new("RGB", (60, 60), (200, 200, 200))
    image.paste((192, 192, 192), (0, 0, 12, 60))
    return image


words = "a photo of a cat, " * 8
CASES = {
    "unreadable": [
        (half(picture(1)), "half"),
        (b"", "empty"),
        (b"milk, eggs", "a list"),
        (picture(2), "whole"),
    ],
    "too_small": [
        (picture(1, 31, 64), "narrow"),
        (picture(2, 64, 31), "low"),
        (picture(3, 32, 64), "enough"),
    ],
    "extreme_aspect": [
        (picture(1, 194, 64), "wide"),
        (picture(2, 64, 194), "tall"),
        (picture(3, 192, 64), "at 3"),
    ],
    "blank": [
        (Image.new("RGB", (64, 64), (9, 90, 200)), "blue"),
        (speckled(), "a speck"),
        (Image.new("RGBA", (64, 64), (255, 0, 0, 0)), "clear"),
        (tinted(), "faint"),
    ],
    "caption_missing": [(picture(1), None), (picture(2), " \n"), (picture(3), "here")],
    "caption_encoding": [(picture(1), "a caf� at night"), (picture(2), "a caf\u00e9 — at night 🌃")],
    "caption_short": [(picture(1), "x"), (picture(2), "ab"), (picture(3), "cat")],
    "caption_repetitive": [
        (picture(1), "cat cat cat cat cat cat"),
        (picture(2), words),
        (picture(3), "aaaaaaaaaaaaaa"),
        (picture(4), "a red cat and a blue cat and a green cat"),
    ],
}


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_refuses_what_it_is_for_and_not_its_neighbour(rule: str, tmp_path: Path) -> None:
    examples = {f"{i}.png": example for i, example in enumerate(CASES[rule])}
    data = write_folder(tmp_path / "in", examples)
    last = list(examples)[-1]
    assert refused(data, tmp_path / "out") == dict.fromkeys(list(examples)[:-1], rule)
    if rule != "unreadable":
        assert refused(data, tmp_path / "out", off=(rule,)) == {}
    assert decisions(data, tmp_path / "out")[last]["kept"]


def test_without_its_rule_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"bad.png": (b"", "bad picture"), "good.png": (picture(1), "good")})
    with pytest.raises(ValueError, match=r"1 examples can't be read.*bad\.png \(the file is empty\)"):
        run(data, tmp_path / "out", off=("unreadable",))


def test_long_captions_are_refused_only_where_that_is_asked_for(tmp_path: Path) -> None:
    long = " ".join(f"word{i}" for i in range(60))
    data = write_folder(tmp_path / "in", {"a.png": (picture(1), long), "b.png": (picture(2), "short one")})
    assert refused(data, tmp_path / "out") == {}
    assert refused(data, tmp_path / "out", max_tokens=77) == {"a.png": "caption_long"}


def test_encodings_are_repaired_unless_normalisation_is_off(tmp_path: Path) -> None:
    examples = {
        "a.png": (picture(1), "a cafÃ© here"),
        "b.png": (picture(2), LATIN),
        "c.png": (picture(3), "plain"),
    }
    data = write_folder(tmp_path / "in", examples)
    assert refused(data, tmp_path / "out") == {}
    assert refused(data, tmp_path / "out", normalise=False) == dict.fromkeys(
        ("a.png", "b.png"), "caption_encoding"
    )


def test_an_example_counts_with_the_first_rule_and_tells_the_others(tmp_path: Path) -> None:
    data = write_folder(
        tmp_path / "in", {"a.png": (Image.new("RGB", (90, 8)), "x"), "b.png": (picture(1), "good")}
    )
    row = decisions(data, tmp_path / "out")["a.png"]
    assert (row["rule"], row["detail"]) == ("too_small", {"side": 8})
    assert set(row["also"]) == {"extreme_aspect", "blank", "caption_short"}


def test_a_faulty_caption_goes_and_the_example_stays_while_it_has_another(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"a.png": (picture(1), None), "b.png": (picture(2), None)})
    rows = '{"file_name": "a.png", "text": ["x", "a red cat"]}\n{"file_name": "b.png", "text": ["x", "y"]}\n'
    (data / "metadata.jsonl").write_text(rows)
    assert refused(data, tmp_path / "out") == {"b.png": "caption_short"}


def test_another_threshold_decides_anew_without_a_second_scan(tmp_path: Path, monkeypatch) -> None:
    data = write_folder(tmp_path / "in", {"a.png": (picture(1, 40, 40), "one"), "b.png": (picture(2), "two")})
    assert refused(data, tmp_path / "out") == {}
    monkeypatch.setattr("lit_sd.prepare.scan.read_chunk", lambda *_: pytest.fail("it scans again"))
    assert refused(data, tmp_path / "out", min_side=48) == {"a.png": "too_small"}
    assert refused(data, tmp_path / "out") == {}


def test_a_changed_file_is_scanned_again(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"a.png": (picture(1), "one"), "b.png": (picture(2), "two")})
    assert refused(data, tmp_path / "out") == {}
    write_folder(data, {"a.png": (picture(1, 20, 20), "one")})
    assert refused(data, tmp_path / "out") == {"a.png": "too_small"}


def test_other_options_of_the_reader_scan_again(tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"a.png": (picture(1), None)})
    (data / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "a good caption", "label": "x"}\n')
    assert refused(data, tmp_path / "out") == {}
    assert refused(data, tmp_path / "out", read={"caption_column": "label"}) == {"a.png": "caption_short"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"off": ("blnk",)}, r"--off blnk: there is no such rule; nearest: blank"),
        ({"max_aspect": 0.5}, r"--max-aspect=0\.5: expected 1 or more"),
        ({"near": 30}, r"--near=30: expected 0 to 16"),
        ({"emphasis": "{caption} {rarest}"}, r"--emphasis.*expected \{caption\} and \{rare\}"),
        ({"emphasis": "{rare}"}, r"expected \{caption\} in it"),
        ({"tags": "lines"}, r"--tags=lines: expected auto, comma or words"),
    ],
)
def test_options_out_of_range_are_told(options: dict, said: str, tmp_path: Path) -> None:
    data = write_folder(tmp_path / "in", {"a.png": (picture(1), "one")})
    with pytest.raises(ValueError, match=said):
        run(data, tmp_path / "out", **options)
