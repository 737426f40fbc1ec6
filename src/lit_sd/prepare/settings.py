"""What one can choose of `lit-sd prepare`: the rules, their thresholds, and what comes of captions."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lit_sd.spelling import hint

RULES: dict[str, str] = {
    "unreadable": "the image, its mask or control image is broken or missing, or their proportions differ",
    "too_small": "the smaller side is below --min-side",
    "extreme_aspect": "the longer side is more than --max-aspect times the shorter",
    "blank": "near-uniform: all but the outermost 1 % of its pixels deviate by less than --min-deviation",
    "caption_missing": "there is no caption, or a blank one",
    "caption_encoding": "the caption holds characters that were lost or garbled, and can't be repaired",
    "caption_short": "the caption is shorter than --min-characters or --min-words",
    "caption_repetitive": "the caption says the same over and over: its entropy is below --min-entropy",
    "caption_long": "the caption has more than --max-tokens tokens; off unless that is set",
    "leak": "the image, or one nearly the same, is in the validation data of --val",
    "exact_duplicate": "another image has the same pixels; the largest file is kept",
    "near_duplicate": "a larger image that is kept looks the same, or one as large",
}
"""Every rule, in the order in which they judge: an example counts with the first that refuses it."""

CAPTION_RULES = ("caption_encoding", "caption_short", "caption_repetitive", "caption_long")
PERSON = "person"
"""Stands where a rule's name stands, for what a person refused in the spot check."""

TOKEN_LIMIT = 77
"""Tokens that CLIP's text encoders read, with the start and the end token."""


@dataclass(frozen=True)
class Settings:
    """Choices that decide what becomes of each example; what was scanned does not depend on them.

    Attributes:
        off: names of rules that don't judge.
        min_side: pixels that the smaller side needs.
        max_aspect: longest side over shortest.
        min_deviation: levels of 255 by which the pixels have to deviate.
        min_characters: of a caption, in bytes of UTF-8, so that one Chinese character is long enough.
        min_words: of a caption.
        min_entropy: of the words of a caption, as a share of what as many different words have.
        max_tokens: of a caption; None refuses none.
        near: bits of 64 by which the perceptual hashes of two near duplicates differ at most.
        near_colour: levels of 255 by which their colours differ at most, on average.
        normalise: captions are repaired and tidied.
        tags: how captions fall into tags: "comma", "words", or "auto", as most of them look.
        balance: 0 leaves weights alone, 1 draws all tags alike.
        balance_max: the largest weight, where 1 is the mean.
        emphasis: template of the written captions, with `{caption}` and `{rare}`.
        spot_check: how many examples a person is asked about.
        seed: of that sample.
    """

    off: tuple[str, ...] = ()
    min_side: int = 256
    max_aspect: float = 3.0
    min_deviation: float = 3.0
    min_characters: int = 3
    min_words: int = 1
    min_entropy: float = 0.5
    max_tokens: int | None = None
    near: int = 4
    near_colour: float = 16.0
    normalise: bool = True
    tags: str = "auto"
    balance: float = 0.0
    balance_max: float = 10.0
    emphasis: str | None = None
    spot_check: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        for name in self.off:
            if name not in RULES:
                yield f"--off {name}: there is no such rule{hint(name, RULES)}"
        ranges = {
            "--min-side": (self.min_side, 0, None),
            "--max-aspect": (self.max_aspect, 1, None),
            "--min-deviation": (self.min_deviation, 0, 255),
            "--min-entropy": (self.min_entropy, 0, 1),
            "--near": (self.near, 0, 16),
            "--near-colour": (self.near_colour, 0, 255),
            "--balance": (self.balance, 0, 1),
            "--balance-max": (self.balance_max, 1, None),
            "--spot-check": (self.spot_check, 0, 5000),
        }
        for option, (value, low, high) in ranges.items():
            if not low <= value <= (value if high is None else high):
                upper = "or more" if high is None else f"to {high}"
                yield f"{option}={value}: expected {low} {upper}"
        if self.tags not in ("auto", "comma", "words"):
            yield f"--tags={self.tags}: expected auto, comma or words"
        if self.emphasis is not None and (fault := emphasis_fault(self.emphasis)):
            yield f"--emphasis={self.emphasis!r}: {fault}"

    def judges(self, rule: str) -> bool:
        """Whether a rule is on."""
        return rule not in self.off and (rule != "caption_long" or self.max_tokens is not None)

    def key(self, *more: str) -> str:
        """Tells what these choices give from what others give; `more` is what else decides."""
        chosen = {name: value for name, value in asdict(self).items() if name not in ("spot_check", "seed")}
        text = json.dumps([chosen, *more], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def emphasis_fault(template: str) -> str | None:
    """What is wrong with a template for emphasised captions, or None."""
    try:
        template.format(caption="", rare="")
    except (KeyError, IndexError, ValueError, AttributeError):
        return "expected {caption} and {rare} as the only names in braces"
    return None if "{caption}" in template else "expected {caption} in it, which is the caption as it stands"


def chosen_settings(options: Mapping[str, Any]) -> Settings:
    """The settings among a command's options.

    Raises:
        ValueError: one is out of its range.
    """
    names = {field.name for field in fields(Settings)}
    given = {name: value for name, value in options.items() if name in names}
    return Settings(**given | {"off": tuple(sorted(set(given.get("off", ()))))})


def storage_options(text: str | None) -> dict[str, Any] | None:
    """Options of fsspec's file systems from a JSON object. They may be secret, so messages leave them out.

    Raises:
        ValueError: the text is none.
    """
    if text is None:
        return None
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        found = f"no JSON: {error.msg} at character {error.pos + 1}"
    else:
        if isinstance(found, dict):
            return found
        found = f"JSON of another kind, {type(found).__name__}"
    raise ValueError(f"--storage-options: expected a JSON object like '{{\"anon\": true}}', got {found}")


def reader_options(texts: Sequence[str]) -> dict[str, Any]:
    """Options of a reader from texts like `caption_column=label`.

    Raises:
        ValueError: a text is none.
    """
    import yaml

    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--read {text}: expected NAME=VALUE")
        found[name] = yaml.safe_load(value)
    return found
