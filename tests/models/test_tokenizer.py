import pytest

from lit_sd.models.tokenizer import clip_tokenizer

# Ids of OpenAI's CLIP vocabulary, as published in its vocab.json.
A, PHOTO, OF, CAT, START, END = 320, 1125, 539, 2368, 49406, 49407


def test_ids_are_those_of_clip():
    tokenizer = clip_tokenizer()
    assert tokenizer("a photo of a cat").input_ids == [START, A, PHOTO, OF, A, CAT, END]
    assert len(tokenizer) == 49408
    assert tokenizer.pad_token_id == END


def test_text_comes_back_whatever_the_language():
    tokenizer = clip_tokenizer()
    for text in ("sks", "crème brûlée", "猫 と 犬", "🙂", "100% (really)"):
        ids = tokenizer(text).input_ids
        assert max(ids) < 49408
        assert tokenizer.decode(ids[1:-1]).replace(" ", "") == text.replace(" ", "").lower()


def test_a_small_vocabulary_spells_with_bytes_and_keeps_special_tokens_last():
    tokenizer = clip_tokenizer(merges=0)
    ids = tokenizer("ab c").input_ids
    byte_a, byte_b, byte_c = (ord(letter) - ord("!") for letter in "abc")
    assert ids == [512, byte_a, 256 + byte_b, 256 + byte_c, 513]


def test_padding_with_exclamation_mark_is_id_0():
    tokenizer = clip_tokenizer(pad_token="!")
    ids = tokenizer("cat", padding="max_length").input_ids
    assert len(ids) == 77
    assert ids[:3] == [START, CAT, END]
    assert set(ids[3:]) == {0}


def test_cut_text_keeps_its_end_token():
    ids = clip_tokenizer()("cat " * 120, truncation=True, max_length=77).input_ids
    assert ids == [START, *[CAT] * 75, END]


def test_saved_and_loaded_again_it_is_the_same(tmp_path):
    from transformers import CLIPTokenizer

    clip_tokenizer(merges=500, pad_token="!").save_pretrained(tmp_path)
    again = CLIPTokenizer.from_pretrained(tmp_path)
    text = ["the cat sat", "x"]
    want = clip_tokenizer(merges=500, pad_token="!")(text, padding="max_length").input_ids
    assert again(text, padding="max_length").input_ids == want


def test_too_many_merges_are_refused():
    with pytest.raises(ValueError, match="48894"):
        clip_tokenizer(merges=50_000)
