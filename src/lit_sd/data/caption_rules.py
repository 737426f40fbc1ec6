"""How a draw's caption comes of the captions that are stored with an image."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np

SOME = 64
"""Texts of one image that `CaptionRule.texts` lists at most."""

MAX_CHOICES = 1000
"""Choices made within one caption at most; what is left then stays as it is."""

_PLACE = "{caption}"
_GROUP = re.compile(r"\{([^{}]*)\}")  # the innermost
_NAME = re.compile(r"__([^\W_](?:[\w/-]*?[^\W_])?)__")
_CLOSING = tuple(",.;:!?)")


class Caption(NamedTuple):
    """One caption of an image; of several, each draw takes one, as often as its weight says."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True)
class CaptionRule:
    """Turns an image's captions into the text of one draw. In this order: one of them is chosen, by weight;
    its tags are shuffled and dropped; its wildcards are filled in; it is put into a template; prefix and
    suffix are added. Each is off by default, and none moves another's draws.

    Attributes:
        shuffle_tags: put the tags into a random order.
        separator: what stands between tags.
        keep_tags: so many first tags stay where they are and are never dropped.
        tag_dropout: probability with which each other tag is left out.
        wildcards: true replaces `{red|green|blue}` by one of the three. A mapping `{colour: [red, green]}`
            also replaces `__colour__` by one of its list. Both may stand within one another.
        templates: texts with `{caption}` in them, of which each draw takes one.
        prefix: put before, with a space between.
        suffix: put behind, with a space between unless it begins with a punctuation mark.

    Raises:
        ValueError: a field is out of its range.
    """

    shuffle_tags: bool = False
    separator: str = ","
    keep_tags: int = 0
    tag_dropout: int | float = 0.0
    wildcards: bool | Mapping[str, Sequence[str]] = False
    templates: str | Sequence[str] = ()
    prefix: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        templates = (self.templates,) if isinstance(self.templates, str) else tuple(self.templates)
        object.__setattr__(self, "templates", templates)
        for template in templates:
            if _PLACE not in template:
                raise ValueError(f"templates: expected {_PLACE} in each, got {template!r}")
        if not self.separator:
            raise ValueError("separator: expected what stands between tags, got an empty text")
        if self.keep_tags < 0:
            raise ValueError(f"keep_tags={self.keep_tags}: expected 0 or more")
        if not 0 <= self.tag_dropout <= 1:
            raise ValueError(f"tag_dropout={self.tag_dropout}: expected a probability, from 0 to 1")
        if not isinstance(self.wildcards, bool):
            _check_wildcards(self.wildcards)
            options = {name: tuple(texts) for name, texts in self.wildcards.items()}
            object.__setattr__(self, "wildcards", options)

    def draw(self, captions: Sequence[Caption], rng: np.random.Generator) -> str:
        """The text of one draw; empty, where there are no captions and nothing is put around them.

        The generator is used the same number of times whatever the rule and the captions.
        """
        pick, template, for_tags, for_words = rng.random(4)
        text = _picked(captions, pick)
        if self._moves_tags:
            text = self._drawn_tags(text, np.random.default_rng(int(for_tags * 2**53)))
        if self.wildcards:
            text = self._drawn_words(text, np.random.default_rng(int(for_words * 2**53)))
        return self._framed(text, int(template * len(self.templates)))

    def fixed(self, captions: Sequence[Caption]) -> str | None:
        """The text that every draw gives; None where draws may differ."""
        if self._moves_tags or self.wildcards or len(captions) > 1 or len(self.templates) > 1:
            return None
        return self._framed(_picked(captions, 0.0), 0)

    @property
    def enumerable(self) -> bool:
        """Whether the texts that draws can give are known ahead, so that `texts` may list them."""
        return not self._moves_tags

    def texts(self, captions: Sequence[Caption]) -> list[str] | None:
        """Every text that a draw can give; None where that are more than `SOME`, or they aren't known."""
        if not self.enumerable:
            return None
        found: dict[str, None] = {}
        drawn = [caption.text for caption in captions if caption.weight > 0]
        for text in drawn or [_picked(captions, 0.0)]:
            filled = self._all_words(text) if self.wildcards else [text]
            if filled is None:
                return None
            for number in range(max(1, len(self.templates))):
                found |= dict.fromkeys(self._framed(each, number) for each in filled)
            if len(found) > SOME:
                return None
        return list(found)

    def unknown_names(self, texts: Iterable[str]) -> list[str]:
        """Names written as `__name__` in captions that `wildcards`, where it is on, lacks: they stay as they
        are.
        """
        if not self.wildcards:
            return []
        return sorted({name for text in texts for name in _NAME.findall(text)} - self._named.keys())

    @property
    def _moves_tags(self) -> bool:
        return self.shuffle_tags or self.tag_dropout > 0

    @property
    def _named(self) -> Mapping[str, Sequence[str]]:
        return {} if isinstance(self.wildcards, bool) else self.wildcards

    def _drawn_tags(self, text: str, rng: np.random.Generator) -> str:
        tags = [tag for part in self._parts(text) if (tag := part.strip())]
        kept, free = tags[: self.keep_tags], tags[self.keep_tags :]
        stays = rng.random(len(free)) >= self.tag_dropout
        order = rng.permutation(len(free)) if self.shuffle_tags else range(len(free))
        return f"{self.separator.strip()} ".join(kept + [free[i] for i in order if stays[i]])

    def _parts(self, text: str) -> list[str]:
        """Split at the separators, but for those within a wildcard's braces."""
        parts, depth = [""], 0
        for piece in re.split(r"([{}]|" + re.escape(self.separator) + ")", text):
            if piece == self.separator and not depth:
                parts.append("")
                continue
            if self.wildcards and piece in ("{", "}"):
                depth = max(0, depth + (1 if piece == "{" else -1))
            parts[-1] += piece
        return parts

    def _next_choice(self, text: str) -> tuple[int, int, Sequence[str]] | None:
        if group := _GROUP.search(text):
            return *group.span(), group[1].split("|")
        names = (name for name in _NAME.finditer(text) if name[1] in self._named)
        name = next(names, None)
        return None if name is None else (*name.span(), self._named[name[1]])

    def _drawn_words(self, text: str, rng: np.random.Generator) -> str:
        for _ in range(MAX_CHOICES):
            if (choice := self._next_choice(text)) is None:
                break
            start, end, options = choice
            text = text[:start] + options[int(rng.integers(len(options)))] + text[end:]
        return " ".join(text.split())

    def _all_words(self, text: str) -> list[str] | None:
        found: dict[str, None] = {}
        waiting = [text]
        for _ in range(MAX_CHOICES):
            if not waiting:
                return list(found)
            text = waiting.pop()
            if (choice := self._next_choice(text)) is None:
                found[" ".join(text.split())] = None
                continue
            start, end, options = choice
            waiting += [text[:start] + option + text[end:] for option in reversed(options)]
        return None

    def _framed(self, text: str, template: int) -> str:
        if self.templates:
            text = self.templates[template].replace(_PLACE, text)
        text = " ".join(part for part in (self.prefix.strip(), text) if part)
        suffix = self.suffix.strip()
        return text + (" " if text and suffix and not suffix.startswith(_CLOSING) else "") + suffix


def _picked(captions: Sequence[Caption], pick: float) -> str:
    """The caption at `pick` of the way, from 0 to 1, through all weights."""
    if not captions:
        return ""
    target = pick * math.fsum(caption.weight for caption in captions)
    for caption in captions:
        target -= caption.weight
        if target < 0:
            return caption.text
    return max(captions, key=lambda caption: caption.weight).text  # rounding took it past the last


def _check_wildcards(wildcards: Mapping[str, Sequence[str]]) -> None:
    for name, texts in wildcards.items():
        if not _NAME.fullmatch(f"__{name}__") or "__" in name:
            raise ValueError(f"wildcards: {name!r} is no name; expected letters, digits and single - or _")
        if not texts or isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"wildcards: expected a list of texts for {name}, got {texts!r}")
    uses = {name: {n for text in texts for n in _NAME.findall(text)} for name, texts in wildcards.items()}
    for name, used in uses.items():
        if unknown := used - wildcards.keys():
            raise ValueError(f"wildcards: {name} names {sorted(unknown)}, of which there is no list")
    try:
        TopologicalSorter(uses).prepare()
    except CycleError as error:
        raise ValueError(f"wildcards lead back to themselves: {' -> '.join(error.args[1])}") from error
