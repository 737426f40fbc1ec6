"""A small byte-level BPE vocabulary in CLIPTokenizer's format, learned from captions.

All 256 bytes are in it, so that any text can be spelled (Sennrich et al. 2016, arXiv:1508.07909, on bytes
as GPT-2 has them); words of the captions become one token each where they are frequent enough.
"""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTokenizer

from lit_sd.data.openmoji import PHOTOGRAPHS, OpenMoji
from lit_sd.models.tokenizer import END, START

POSITIONS = 77


def learn_vocabulary(captions: Iterable[str], size: int) -> CLIPTokenizer:
    """A CLIPTokenizer of at most `size` tokens whose merges come from `captions`.

    Raises:
        ValueError: `size` does not hold the 512 byte tokens (each within a word and at its end) and the two
        special ones.
    """
    if size < 514:
        raise ValueError(f"a vocabulary of {size} cannot spell every text; expected 514 tokens or more")
    learner = Tokenizer(BPE(end_of_word_suffix="</w>", continuing_subword_prefix=""))
    learner.normalizer = Lowercase()
    pattern = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    learner.pre_tokenizer = Sequence(
        [Split(pattern, behavior="removed", invert=True), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = sorted(ByteLevel.alphabet())
    learner.train_from_iterator(
        captions,
        BpeTrainer(
            vocab_size=size - 2 - len(alphabet),
            min_frequency=2,
            initial_alphabet=alphabet,
            end_of_word_suffix="</w>",
            show_progress=False,
        ),
    )
    with TemporaryDirectory() as folder:
        merges: Any = [tuple(line.split()) for line in _merges_of(learner, Path(folder))]
    tokens = [
        *alphabet,
        *(letter + "</w>" for letter in alphabet),
        *dict.fromkeys("".join(pair) for pair in merges),
    ]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*tokens, START, END]))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=POSITIONS)


def _merges_of(learner: Tokenizer, folder: Path) -> list[str]:
    """The merges as `left right` lines, in order; the library hands them out as a file alone."""
    learner.model.save(str(folder))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#version")]


def openmoji_tokenizer(size: int) -> CLIPTokenizer:
    """The vocabulary of the embedded base, from the captions it is trained on. Raises as
    `learn_vocabulary`.
    """
    captions = OpenMoji("train", size=1, cache="").captions()
    return learn_vocabulary([*captions, *PHOTOGRAPHS.values()], size)
