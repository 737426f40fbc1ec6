"""Text states from a cache on disk, the same as when all captions of a batch are encoded together."""

import pytest
import torch
from picture_source import PictureSource

from lit_sd.data.cache import States
from lit_sd.data.caches.texts import TextCache, pack_states, texts_of, unpack_states
from lit_sd.data.caption_rules import Caption, CaptionRule
from lit_sd.together import Together
from lit_sd.types import Conditioning


class Encoder:
    """States of a caption are random by its text, of one window for each 4 letters."""

    def __init__(self, dtype=torch.float32, pooled=True):
        self.dtype, self.pooled, self.calls = dtype, pooled, []

    def window(self, text):
        generator = torch.Generator().manual_seed(sum(map(ord, text)) + len(text))
        return torch.randn(2, 3, generator=generator).to(self.dtype)

    def __call__(self, captions):
        self.calls.append(list(captions))
        most = max(max(1, -(-len(caption) // 4)) for caption in captions)
        hidden = [
            torch.cat([self.window(caption[4 * i : 4 * i + 4]) for i in range(most)]) for caption in captions
        ]
        pooled = torch.stack([self.window(caption[:4])[0] for caption in captions]) if self.pooled else None
        return Conditioning(torch.stack(hidden), pooled)


def filled(folder, captions, encode, encoder="clip", dtype="float32"):
    cache = TextCache(folder, encoder, dtype)
    cache.fill(captions, encode, Together())
    return cache


def same(found, expected):
    assert found.hidden.dtype == expected.hidden.dtype
    assert torch.equal(found.hidden, expected.hidden)
    assert (found.pooled is None) == (expected.pooled is None)
    assert found.pooled is None or torch.equal(found.pooled, expected.pooled)


CAPTIONS = ["", "cat", "a dog", "a long caption", "cat"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pooled", [True, False])
def test_equal_to_encoding_all_together(tmp_path, dtype, pooled):
    encode = Encoder(dtype, pooled)
    cache = filled(tmp_path, CAPTIONS, encode)
    assert encode.calls == [[""], ["cat"], ["a dog"], ["a long caption"]]
    encode.calls.clear()
    for captions in (CAPTIONS, ["cat", "a dog"], ["cat"], ["a long caption"]):
        found = cache.text(captions, encode)
        assert encode.calls == []
        same(found, Encoder(dtype, pooled)(captions))


def test_what_is_missing_is_encoded_together_and_not_kept(tmp_path):
    encode = Encoder()
    cache = filled(tmp_path, ["", "cat"], encode)
    encode.calls.clear()
    captions = ["new, tags", "cat", "tags, new", "new, tags"]
    for _ in range(2):
        same(cache.text(captions, encode), Encoder()(captions))
    assert encode.calls == [["new, tags", "tags, new"]] * 2


def test_without_an_empty_caption_it_is_encoded_when_needed(tmp_path):
    encode = Encoder()
    cache = filled(tmp_path, ["cat", "a long caption"], encode)
    same(cache.text(["cat", "a long caption"], encode), Encoder()(["cat", "a long caption"]))
    assert encode.calls[-1] == [""]


def test_only_what_is_new_is_encoded(tmp_path):
    """F11: keyed by caption and encoders."""
    encode = Encoder()
    assert filled(tmp_path, CAPTIONS, encode).encoded == 4
    assert filled(tmp_path, CAPTIONS, encode).encoded == 0
    assert filled(tmp_path, [*CAPTIONS, "one more"], encode).encoded == 1
    assert filled(tmp_path, CAPTIONS, encode, encoder="another").encoded == 4
    assert filled(tmp_path, CAPTIONS, encode, dtype="float16").encoded == 4


def test_float16_comes_back_in_the_encoders_own_dtype(tmp_path):
    encode = Encoder()
    found = filled(tmp_path, CAPTIONS, encode, dtype="float16").text(CAPTIONS, encode)
    assert found.hidden.dtype == torch.float32
    assert torch.equal(found.hidden, Encoder()(CAPTIONS).hidden.half().float())


def test_captions_of_any_characters(tmp_path):
    odd = ["emoji \U0001f600", "lone \udcff surrogate", "new\nline", "zero \0"]
    cache = filled(tmp_path, odd, Encoder())
    assert len({cache.key(caption) for caption in odd}) == 4
    same(cache.text(odd, Encoder()), Encoder()(odd))


def test_pictures_are_not_kept_here(tmp_path):
    cache = TextCache(tmp_path, "clip")
    pixels = torch.zeros(2, 3, 8, 8)
    assert cache.moments(pixels, lambda p: (p[:, :1] + 1, p[:, :1]))[0].sum() == 128


class TestEntries:
    def test_what_overflows_is_refused(self):
        states = States(torch.full((2, 3), 1e6), None)
        with pytest.raises(ValueError, match=r"not finite in torch\.float16; set data\.cache_dtype=float32"):
            pack_states(states, "float16")

    def test_what_is_damaged_is_refused(self):
        value = pack_states(States(torch.zeros(2, 3), torch.zeros(4)), "float32")
        with pytest.raises(ValueError, match="is damaged"):
            unpack_states(value[:-4])


class TestTexts:
    def test_all_that_may_be_drawn(self):
        rule = CaptionRule(templates=["a {caption}", "the {caption}"])
        one, other = PictureSource([(8, 8)] * 2), PictureSource([(8, 8)], rule=rule)
        assert list(texts_of([one, other])) == ["", "picture 0", "picture 1", "a picture 0", "the picture 0"]

    def test_shuffled_tags_are_not_known_ahead(self):
        source = PictureSource([(8, 8)], rule=CaptionRule(shuffle_tags=True))
        assert list(texts_of([source])) == [""]

    def test_too_many_are_left_to_the_time_when_they_are_drawn(self):
        source = PictureSource([(8, 8)] * 2, rule=CaptionRule(wildcards=True))
        source.texts[0] = "{1|2|3|4|5} {1|2|3|4|5} {1|2|3|4|5}"
        assert list(texts_of([source])) == ["", "picture 1"]
        assert source.captions_of(0) == (Caption(source.texts[0]),)


def test_pruned_it_holds_what_is_asked_for(tmp_path):
    """Three captions and the empty one, of two encoders; then two of one."""
    filled(tmp_path, CAPTIONS, Encoder(), encoder="other")
    cache = filled(tmp_path, CAPTIONS, Encoder())
    assert len(cache.parts) == 2 * 4
    assert cache.prune(iter(["", "cat"])) == 6
    encode = Encoder()
    assert filled(tmp_path, ["cat", "", "a dog"], encode).encoded == 1
    assert encode.calls == [["a dog"]]
