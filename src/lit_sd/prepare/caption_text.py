"""Captions as text: what is wrong with one, what can be repaired, and numbers that tell it from noise.

`ftfy` and the tokenizer are imported where they are used: the first belongs to an extra, the second takes a
second.
"""

import math
import re
import unicodedata
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

from lit_sd.data.captions import decode_text

INVISIBLE_BUT_MEANT = {"‌", "‍"}
"""Zero-width joiners: Persian and Indian scripts and composed emoji are spelled with them."""
STRAY = " ,;|–—-"


class CaptionFacts(NamedTuple):
    """Numbers of one caption; `variety` is the entropy of its words over that of as many different ones, and
    `entropy` that of its characters, in bits.
    """

    bytes: int
    characters: int
    words: int
    tokens: int
    variety: float
    entropy: float
    broken: bool


def read_text(data: bytes) -> str:
    """Text of a file in UTF-8, or another Unicode encoding with its mark. Bytes that are none become lone
    surrogates, of which `normalise` makes Latin-1.
    """
    text = decode_text(data)
    return data.decode("utf-8", "surrogateescape") if text is None else text


def recoded(text: str) -> str:
    """The text with what `read_text` could not read taken for Latin-1 (Windows' own kind of it)."""
    if not any("\udc80" <= letter <= "\udcff" for letter in text):
        return text
    try:
        data = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def normalise(text: str) -> str:
    """The caption tidied: UTF-8 that was read as Latin-1 is repaired; then NFC, no control characters, single
    spaces, and no separators that separate nothing.
    """
    text = unicodedata.normalize("NFC", repaired(valid(recoded(text))))
    text = "".join(" " if c.isspace() else c for c in text if c.isspace() or not is_control(c))
    text = " ".join(text.split())
    text = re.sub(r"\s+([,;])", r"\1", text)
    text = re.sub(r"([,;])(?:\s*[,;])+", r"\1", text)
    return text.strip(STRAY)


def valid(text: str) -> str:
    """The text with surrogates joined in pairs; single ones, which no file can hold, become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def repaired(text: str) -> str:
    """The text with its mojibake read as what it was.

    Raises:
        ModuleNotFoundError: ftfy is not installed.
    """
    return "".join(ftfy().fix_encoding(line) for line in text.splitlines(keepends=True))


def is_control(character: str) -> bool:
    """Whether a character only steers how text is shown."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in INVISIBLE_BUT_MEANT


def is_broken(text: str) -> bool:
    """Whether characters were lost, or look as if bytes were read in the wrong encoding."""
    lost = "�" in text or any(unicodedata.category(c) in ("Cc", "Cs") and not c.isspace() for c in text)
    return lost or ftfy().badness.is_bad(text) or repaired(text) != text


def caption_facts(text: str) -> CaptionFacts:
    """What the rules have to know of a caption."""
    words = re.findall(r"\w+", text.lower())
    spread = math.log2(len(words)) if len(words) > 1 else 1.0
    return CaptionFacts(
        bytes=len(text.encode()),
        characters=len(text),
        words=len(words),
        tokens=count_tokens(text),
        variety=entropy(words) / spread if len(words) > 1 else 1.0,
        entropy=entropy(text),
        broken=is_broken(text),
    )


def entropy(symbols: str | list[str]) -> float:
    """Shannon's, in bits a symbol."""
    counts = Counter(symbols)
    total = counts.total()
    return sum(count / total * math.log2(total / count) for count in counts.values())


def count_tokens(text: str) -> int:
    """CLIP's tokens of a caption, with the start and the end."""
    return len(tokenizer()(text, verbose=False).input_ids)


@cache
def tokenizer() -> Any:
    """CLIP's tokenizer, built once in a process."""
    from lit_sd.models.tokenizer import clip_tokenizer

    return clip_tokenizer()


@cache
def ftfy() -> Any:
    """The library that repairs encodings, imported where it is first needed."""
    try:
        import ftfy as module
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "captions are repaired by ftfy, which is not installed; pip install 'lit-sd[data]'"
        ) from error
    return module
