import pytest
import torch

from lit_sd.data.cache import MemoryCache
from lit_sd.types import Conditioning


def counting_encoder():
    seen = []

    def encode(pixels):
        seen.append(len(pixels))
        return pixels[:, :1, ::2, ::2] * 2, pixels[:, :1, ::2, ::2] + 1

    return encode, seen


def test_only_what_is_new_is_encoded_and_rows_keep_their_places():
    encode, seen = counting_encoder()
    cache, pixels = MemoryCache(1), torch.randn(4, 3, 4, 4)
    first = cache.moments(pixels[:3], encode)
    again = cache.moments(pixels[[2, 3, 0, 2]], encode)
    assert seen == [1, 1, 1, 1]
    torch.testing.assert_close(first[0], encode(pixels[:3])[0])
    for found, expected in zip(again, encode(pixels[[2, 3, 0, 2]]), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_changed_pixel_is_another_picture():
    encode, seen = counting_encoder()
    cache, pixels = MemoryCache(1), torch.zeros(1, 3, 4, 4)
    cache.moments(pixels, encode)
    pixels[0, 0, 0, 0] = 1e-3
    cache.moments(pixels, encode)
    assert seen == [1, 1]


def test_a_full_cache_goes_on_encoding():
    encode, seen = counting_encoder()
    item = 2 * 4 * 4  # two moments of 2 x 2 float32
    cache, pixels = MemoryCache(item * 1.5 / 2**20), torch.randn(2, 3, 4, 4)
    cache.moments(pixels, encode)
    mean, _ = cache.moments(pixels, encode)
    assert seen == [1, 1, 1]
    torch.testing.assert_close(mean, encode(pixels)[0])


def test_captions_with_and_without_a_pooled_vector():
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


def test_no_memory_is_refused():
    with pytest.raises(ValueError, match="holds nothing"):
        MemoryCache(0)
