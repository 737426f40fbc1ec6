import pytest
import torch

from lit_sd.data.cache import MemoryCache, States, fingerprints, joined
from lit_sd.types import Conditioning


def counting_encoder():
    seen = []

    def encode(pixels):
        seen.append(len(pixels))
        return pixels[:, :1, ::2, ::2] * 2, pixels[:, :1, ::2, ::2] + 1

    return encode, seen


def text_encoder(chunk=3):
    """A caption's states are its length, one window of two tokens for each `chunk` letters; as a model does,
    it fills up shorter ones with windows of no text.
    """
    calls = []

    def encode(captions):
        calls.append(list(captions))
        windows = max(max(1, -(-len(caption) // chunk)) for caption in captions)
        rows = [
            [float(len(caption[i * chunk : (i + 1) * chunk]))] * 2
            for caption in captions
            for i in range(windows)
        ]
        hidden = torch.tensor(rows).reshape(len(captions), 2 * windows, 1)
        return Conditioning(hidden, torch.tensor([[10.0 * len(c)] for c in captions]))

    return encode, calls


class TestMoments:
    def test_only_what_is_new_is_encoded_and_rows_keep_their_places(self):
        encode, seen = counting_encoder()
        cache, pixels = MemoryCache(1), torch.randn(4, 3, 4, 4)
        first = cache.moments(pixels[:3], encode)
        again = cache.moments(pixels[[2, 3, 0, 2]], encode)
        assert seen == [1, 1, 1, 1]
        torch.testing.assert_close(first[0], encode(pixels[:3])[0])
        for found, expected in zip(again, encode(pixels[[2, 3, 0, 2]]), strict=True):
            torch.testing.assert_close(found, expected)

    def test_a_changed_pixel_is_another_picture(self):
        encode, seen = counting_encoder()
        cache, pixels = MemoryCache(1), torch.zeros(1, 3, 4, 4)
        cache.moments(pixels, encode)
        pixels[0, 0, 0, 0] = 1e-3
        cache.moments(pixels, encode)
        assert seen == [1, 1]

    def test_a_full_cache_goes_on_encoding(self):
        encode, seen = counting_encoder()
        item = 2 * 4 * 4  # two moments of 2 x 2 float32
        cache, pixels = MemoryCache(item * 1.5 / 2**20), torch.randn(2, 3, 4, 4)
        cache.moments(pixels, encode)
        mean, _ = cache.moments(pixels, encode)
        assert seen == [1, 1, 1]
        torch.testing.assert_close(mean, encode(pixels)[0])

    def test_no_memory_is_refused(self):
        with pytest.raises(ValueError, match=r"data\.cache_mb=0: expected more than 0"):
            MemoryCache(0)


class TestFingerprints:
    def test_equal_where_all_is_equal(self):
        pixels = torch.randn(3, 3, 8, 8)
        a, b, c = fingerprints(pixels)
        assert fingerprints(pixels[[2, 0, 1]].clone()) == [c, a, b]
        assert fingerprints(pixels.to(memory_format=torch.channels_last)) == [a, b, c]

    def test_every_change_is_seen(self):
        """One value by its last bit, two values exchanged, a flip, other proportions, the sign of zero."""
        picture = torch.randn(1, 3, 8, 16)
        changed = [picture]
        for i in range(0, picture.numel(), 7):
            other = picture.clone().view(-1)
            other[i] = torch.nextafter(other[i], torch.tensor(9.0))
            changed.append(other.view_as(picture))
        swapped = picture.clone()
        swapped[0, 0, 0, :2] = picture[0, 0, 0, :2].flip(0)
        changed += [swapped, picture.flip(3)]
        seen = [fingerprints(p)[0] for p in changed]
        seen += fingerprints(picture.reshape(1, 3, 16, 8))
        zero = torch.zeros(1, 3, 2, 2)
        assert fingerprints(zero) != fingerprints(-zero)
        assert len(set(seen)) == len(seen) == 3 + 55 + 1

    def test_no_two_of_many_are_alike(self):
        """Pictures of two greys, as from bytes: differences are large powers of two in their bits."""
        bits = torch.arange(2**12)[:, None] >> torch.arange(12) & 1
        pixels = bits.view(-1, 3, 2, 2).float() * 2 - 1
        assert len(set(fingerprints(pixels))) == 2**12


class TestText:
    def test_captions_with_and_without_a_pooled_vector(self):
        calls = []

        def encode(captions):
            calls.append(captions)
            hidden = torch.tensor([[[float(len(c))]] for c in captions])
            return Conditioning(hidden, hidden[:, 0] * 10)

        cache = MemoryCache(1)
        cond = cache.text(["a", "bbb", "a"], encode)
        assert calls == [["a"], ["bbb"]]
        assert cond.hidden.flatten().tolist() == [1, 3, 1]
        assert cond.pooled.flatten().tolist() == [10, 30, 10]
        plain = MemoryCache(1).text(["a"], lambda c: Conditioning(torch.ones(1, 1, 1)))
        assert plain.pooled is None

    def test_captions_of_several_windows_as_encoded_together(self):
        captions = ["", "ab", "abcdefg", "abcd"]
        encode, calls = text_encoder()
        expected = encode(captions)
        assert expected.hidden.shape == (4, 6, 1)
        cache = MemoryCache(1)
        for _ in range(2):
            found = cache.text(captions, encode)
            assert torch.equal(found.hidden, expected.hidden)
            assert torch.equal(found.pooled, expected.pooled)
        assert calls[1:] == [[""], ["ab"], ["abcdefg"], ["abcd"]]
        short = cache.text(["ab", "abc"], encode)
        assert torch.equal(short.hidden, encode(["ab", "abc"]).hidden)

    def test_the_empty_caption_is_asked_for_where_windows_are_to_be_filled(self):
        encode, calls = text_encoder()
        MemoryCache(1).text(["ab", "abcd"], encode)
        assert calls == [["ab"], ["abcd"], [""]]


def test_joining_fills_up_with_the_empty_window():
    long, short = (States(torch.full((tokens, 2), float(tokens)), None) for tokens in (6, 2))
    cond = joined([short, long], lambda: States(torch.zeros(2, 2), None))
    assert cond.hidden[0, :, 0].tolist() == [2, 2, 0, 0, 0, 0]
    assert cond.hidden[1, :, 0].tolist() == [6] * 6
    assert cond.pooled is None
