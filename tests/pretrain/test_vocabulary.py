import pytest

from lit_sd.pretrain.vocabulary import learn_vocabulary, openmoji_tokenizer

CAPTIONS = ["woman firefighter medium skin tone", "man firefighter dark skin tone", "cat face"] * 2


@pytest.fixture(scope="module")
def tokenizer():
    return learn_vocabulary(CAPTIONS, 1000)


def test_words_of_captions_are_one_token_each(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("woman firefighter medium skin tone").input_ids)
    assert tokens == [
        "<|startoftext|>",
        *(f"{w}</w>" for w in ["woman", "firefighter", "medium", "skin", "tone"]),
        "<|endoftext|>",
    ]


@pytest.mark.parametrize("text", ["sks", "xylophone, please!", "zürich", "漢字", "a 42 %"])
def test_any_text_is_spelled_and_read_back(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.unk_token_id not in ids[1:-1]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == text.replace(" ", "")


def test_a_long_text_keeps_its_end_token(tokenizer):
    ids = tokenizer("cat " * 100, truncation=True, padding="max_length").input_ids
    assert len(ids) == 77
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_a_vocabulary_without_all_bytes_is_refused():
    with pytest.raises(ValueError, match="514 tokens or more"):
        learn_vocabulary(CAPTIONS, 513)


def test_the_base_knows_its_words():
    tokenizer = openmoji_tokenizer(4096)
    assert len(tokenizer("a photo of sks cat").input_ids) <= 9
    assert len(tokenizer) <= 4096
