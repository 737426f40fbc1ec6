"""What one draw makes of an image's captions, by hand and by frequency."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from lit_sd.data.caption_rules import Caption, CaptionRule

TAGS = [Caption("cat, sitting, blue eyes, outdoors")]


def draws(rule: CaptionRule, captions: list[Caption], count: int = 400) -> list[str]:
    return [rule.draw(captions, np.random.default_rng([7, i])) for i in range(count)]


def about(count: int, expected: float, total: int) -> bool:
    """Within four standard deviations of a binomial."""
    p = expected / total
    return abs(count - expected) <= 4 * (total * p * (1 - p)) ** 0.5


def test_off_is_the_caption_as_it_is():
    text = "a {b|c} cat,  __x__ ,sat {caption}"
    assert set(draws(CaptionRule(), [Caption(text)], 5)) == {text}
    assert CaptionRule().draw([], np.random.default_rng(0)) == ""


def test_of_several_captions_each_is_drawn_by_its_weight():
    captions = [Caption("never", 0.0), Caption("a", 3.0), Caption("b"), Caption("nor", 0.0)]
    counts = Counter(draws(CaptionRule(), captions))
    assert set(counts) == {"a", "b"}
    assert about(counts["a"], 300, 400)


def test_tags_are_shuffled_behind_the_kept_ones():
    rule = CaptionRule(shuffle_tags=True, keep_tags=1)
    counts = Counter(draws(rule, TAGS, 600))
    rest = permutations(["sitting", "blue eyes", "outdoors"])
    assert set(counts) == {", ".join(["cat", *tags]) for tags in rest}
    assert all(about(count, 100, 600) for count in counts.values())


def test_tags_are_dropped_one_by_one_but_for_the_kept_ones():
    texts = draws(CaptionRule(tag_dropout=0.25, keep_tags=2), TAGS)
    assert set(texts) == {
        "cat, sitting, blue eyes, outdoors",
        "cat, sitting, blue eyes",
        "cat, sitting, outdoors",
        "cat, sitting",
    }
    assert about(sum("outdoors" in text for text in texts), 300, 400)
    assert about(texts.count("cat, sitting"), 25, 400)  # each apart: 400/16
    assert set(draws(CaptionRule(tag_dropout=1), TAGS, 3)) == {""}


@pytest.mark.parametrize(
    ("rule", "captions", "fixed"),
    [
        (CaptionRule(), ["a cat"], "a cat"),
        (CaptionRule(), [], ""),
        (
            CaptionRule(templates="photo of {caption}", prefix="sks", suffix="!"),
            ["a cat"],
            "sks photo of a cat!",
        ),
        (CaptionRule(), ["a cat", "a dog"], None),
        (CaptionRule(templates=["{caption}", "a {caption}"]), ["a cat"], None),
        (CaptionRule(shuffle_tags=True), ["a, b"], None),
        (CaptionRule(tag_dropout=0.5), ["a, b"], None),
        (CaptionRule(wildcards=True), ["{a|b}"], None),
    ],
)
def test_a_text_that_no_draw_changes_needs_none(rule, captions, fixed):
    stored = [Caption(text) for text in captions]
    assert rule.fixed(stored) == fixed
    drawn = {rule.draw(stored, np.random.default_rng(seed)) for seed in range(50)}
    assert drawn == {fixed} if fixed is not None else len(drawn) > 1


def test_another_separator():
    rule = CaptionRule(shuffle_tags=True, keep_tags=9, separator=";")
    assert rule.draw([Caption("a, b;c ;; d")], np.random.default_rng(0)) == "a, b; c; d"


def test_one_setting_moves_no_other_draws():
    """Each setting alone takes the same draws as all of them together."""
    captions = [Caption("a, b, {x|y}, c"), Caption("d, e, {x|y}, f")]
    parts = {
        "shuffle": CaptionRule(shuffle_tags=True),
        "drop": CaptionRule(tag_dropout=0.5),
        "fill": CaptionRule(wildcards=True),
        "frame": CaptionRule(templates=["1 {caption}", "2 {caption}"]),
    }
    everything = CaptionRule(
        shuffle_tags=True, tag_dropout=0.5, wildcards=True, templates=["1 {caption}", "2 {caption}"]
    )
    for i in range(40):
        alone = {name: rule.draw(captions, np.random.default_rng(i)) for name, rule in parts.items()}
        number, _, text = everything.draw(captions, np.random.default_rng(i)).partition(" ")
        plain = CaptionRule().draw(captions, np.random.default_rng(i))
        word = "x" if "x" in alone["fill"] else "y"
        stayed = {tag.replace("{x|y}", word) for tag in alone["drop"].split(", ") if tag}
        shuffled = alone["shuffle"].replace("{x|y}", word).split(", ")
        assert alone["frame"] == f"{number} {plain}"
        assert text == ", ".join(tag for tag in shuffled if tag in stayed)


def test_the_generator_is_used_the_same_number_of_times_whatever_the_rule():
    after = set()
    for rule in (CaptionRule(), CaptionRule(shuffle_tags=True, tag_dropout=0.5, templates="x {caption}")):
        for captions in ([], TAGS, TAGS * 3):
            rng = np.random.default_rng(3)
            rule.draw(captions, rng)
            after.add(rng.random())
    assert len(after) == 1


def test_alternatives_and_named_ones_stand_within_one_another():
    rule = CaptionRule(
        wildcards={"colour": ["red", "{dark|light} blue"], "thing": ["__colour__ car", "tree"]}
    )
    counts = Counter(draws(rule, [Caption("a {big {old|new}|} __thing__")], 1000))
    things = ["red car", "dark blue car", "light blue car", "tree"]
    assert set(counts) == {f"a {size}{thing}" for size in ("big old ", "big new ", "") for thing in things}
    assert about(sum("tree" in text for text in counts.elements()), 500, 1000)
    assert about(sum("big" in text for text in counts.elements()), 500, 1000)
    assert about(sum("light" in text for text in counts.elements()), 125, 1000)


@pytest.mark.parametrize(
    ("text", "given"),
    [("a {cat", "a {cat"), ("b} c|d", "b} c|d"), ("{just one}", "just one"), ("__who__ __a", "__who__ __a")],
)
def test_what_is_no_wildcard_stays(text, given):
    rule = CaptionRule(wildcards={"a": ["b"]})
    assert rule.draw([Caption(text)], np.random.default_rng(0)) == given
    assert rule.unknown_names(["__a__", text]) == (["who"] if "who" in text else [])


def test_commas_within_braces_part_no_tags():
    rule = CaptionRule(shuffle_tags=True, keep_tags=9, wildcards=True)
    assert set(draws(rule, [Caption("cat, {red, round|blue} ball")], 60)) == {
        "cat, red, round ball",
        "cat, blue ball",
    }


def test_a_caption_cannot_keep_it_busy_for_long():
    rule = CaptionRule(wildcards={"a0": ["x"], **{f"a{i + 1}": [f"__a{i}__ __a{i}__"] for i in range(40)}})
    assert "__" in rule.draw([Caption("__a40__")], np.random.default_rng(0))
    assert rule.texts([Caption("__a40__")]) is None
    assert rule.draw([Caption("{" * 5000)], np.random.default_rng(0)) == "{" * 5000


def test_templates_prefix_and_suffix():
    rule = CaptionRule(templates=["a photo of {caption}", "art: {caption}!"], prefix="sks ", suffix=", 4k")
    counts = Counter(draws(rule, [Caption("{x}")]))
    assert set(counts) == {"sks a photo of {x}, 4k", "sks art: {x}!, 4k"}
    assert about(counts["sks art: {x}!, 4k"], 200, 400)
    rng = np.random.default_rng(0)
    assert CaptionRule(prefix="sks cat,", suffix="outdoors").draw(TAGS[:0], rng) == "sks cat, outdoors"
    assert CaptionRule(templates="a {caption} toy").draw([Caption("red")], rng) == "a red toy"


def test_all_texts_are_listed_where_they_are_few():
    rule = CaptionRule(wildcards={"c": ["red", "blue"]}, templates=["1 {caption}", "2 {caption}"], prefix="p")
    captions = [Caption("a {x|y}"), Caption("__c__"), Caption("never", 0.0)]
    texts = rule.texts(captions)
    assert rule.enumerable
    assert sorted(texts) == sorted(f"p {i} {text}" for i in (1, 2) for text in ("a x", "a y", "red", "blue"))
    assert set(draws(rule, captions)) == set(texts)
    assert CaptionRule().texts([]) == [""]


def test_many_or_unknown_texts_are_not_listed():
    assert CaptionRule(wildcards=True).texts([Caption("{a|b}" * 6)]) is not None
    assert CaptionRule(wildcards=True).texts([Caption("{a|b}" * 7)]) is None
    for rule in (CaptionRule(shuffle_tags=True), CaptionRule(tag_dropout=0.1)):
        assert not rule.enumerable
        assert rule.texts(TAGS) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep_tags": -1}, "keep_tags=-1"),
        ({"tag_dropout": 1.5}, r"tag_dropout=1\.5"),
        ({"tag_dropout": float("nan")}, "tag_dropout=nan"),
        ({"separator": ""}, "separator"),
        ({"templates": ["a photo of {}"]}, r"templates: expected \{caption\} in each, got 'a photo of \{\}'"),
        ({"wildcards": {"a b": ["x"]}}, "wildcards: 'a b' is no name"),
        ({"wildcards": {"a": []}}, "wildcards: expected a list of texts for a"),
        ({"wildcards": {"a": "xyz"}}, "wildcards: expected a list of texts for a, got 'xyz'"),
        ({"wildcards": {"a": ["__b__"]}}, "wildcards: a names .'b'."),
        ({"wildcards": {"a": ["__b__"], "b": ["x {y|__a__}"]}}, "wildcards lead back to themselves: "),
    ],
)
def test_fields_out_of_their_range(fields, message):
    with pytest.raises(ValueError, match=message):
        CaptionRule(**fields)


def test_a_rule_is_built_from_plain_yaml():
    from hydra.utils import instantiate

    node = {
        "_target_": "lit_sd.data.caption_rules.CaptionRule",
        "wildcards": {"c": ["red"]},
        "templates": ["a {caption}"],
        "keep_tags": 1,
    }
    rule = instantiate(node, _convert_="all")
    assert rule == CaptionRule(wildcards={"c": ("red",)}, templates=("a {caption}",), keep_tags=1)
