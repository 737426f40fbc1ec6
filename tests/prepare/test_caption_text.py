"""Captions: what is repaired, what stays, and numbers by hand."""

import math

import pytest

from lit_sd.models.tokenizer import clip_tokenizer
from lit_sd.prepare.caption_text import caption_facts, entropy, is_broken, normalise, read_text


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a cat", "a cat"),
        ("  a\tcat \n on   a mat ", "a cat on a mat"),
        ("cafe\u0301", "caf\u00e9"),  # NFC
        ("a cafÃ© at nightâ€¦", "a café at night…"),
        ("Ð¿Ñ€Ð¸Ð²ÐµÑ‚", "привет"),
        ("CAFÉ» — “été…”", "CAFÉ» — “été…”"),  # looks odd, and is right
        ("a\x00 cat\x1b\ufeff", "a cat"),
        ("1girl,, solo ,  , red hair,", "1girl, solo, red hair"),
        ("| a cat - ", "a cat"),
        ("a well-known cat - and a dog.", "a well-known cat - and a dog."),
        ("a family 👨\u200d👩\u200d👧", "a family 👨\u200d👩\u200d👧"),  # joined by U+200D
        ("می\u200cخواهم", "می\u200cخواهم"),  # spelled with U+200C
        ("{red|blue} cat, __place__", "{red|blue} cat, __place__"),  # wildcards stay
        ("a \ud83d\ude00 face", "a 😀 face"),  # a pair of surrogates
        ("lost \ud83d", "lost \ufffd"),
        ("猫", "猫"),
        (" ,;- ", ""),
    ],
)
def test_normalising(text: str, clean: str) -> None:
    assert normalise(text) == clean
    assert normalise(clean) == clean


@pytest.mark.parametrize("text", ["caf\ufffd", "cafÃ©", "a\x07cat", "\ud83d alone"])
def test_broken(text: str) -> None:
    assert is_broken(text)


@pytest.mark.parametrize("text", ["café", "CAFÉ» “été…”", "猫 and 🐈", "Straße", "Ã"])
def test_not_broken(text: str) -> None:
    assert not is_broken(text)


@pytest.mark.parametrize(
    "data",
    ["a café".encode(), b"\xef\xbb\xbfa caf\xc3\xa9", "a café".encode("utf-16"), "a café".encode("latin-1")],
)
def test_every_encoding_ends_as_the_same_text(data: bytes) -> None:
    assert normalise(read_text(data)) == "a café"


def test_what_was_no_unicode_is_broken_until_it_is_normalised() -> None:
    raw = read_text(b"na\xefve \x93words\x94")
    assert is_broken(raw)
    assert normalise(raw) == "naïve “words”"
    assert not is_broken(normalise(raw))


def test_entropy_by_hand() -> None:
    assert entropy("aabb") == 1
    assert entropy("aaaa") == 0
    assert entropy(["a", "a", "b", "c"]) == 1.5
    assert entropy("") == 0


def test_facts_by_hand() -> None:
    facts = caption_facts("a cat, a café")
    assert (facts.bytes, facts.characters, facts.words) == (14, 13, 4)
    assert facts.variety == pytest.approx(1.5 / math.log2(4))
    assert facts.tokens == len(clip_tokenizer()("a cat, a café").input_ids)
    assert caption_facts("cat").variety == 1
    assert caption_facts("cat cat").variety == 0
