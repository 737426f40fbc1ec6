"""Values against what a parameter takes: what fits, and the line for what does not."""

import pytest

from lit_sd.kinds import DictOf, ListOf, Literal, describe, faults_of, fits

NAMES = frozenset({Literal("unet"), Literal("text_encoder")})
INTS = frozenset({ListOf(frozenset({"int"}))})
RATES = frozenset({DictOf(NAMES, frozenset({"float"})), "null"})


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (INTS, [[], [1, 2], (3,), ["${seed}"]], [["1"], [1, None], 1, "1", {"a": 1}]),
        (RATES, [None, {}, {"unet": 1}, {"unet": "${lr}"}], [{"unt": 0.1}, {"unet": "fast"}, [0.1]]),
        (frozenset({ListOf(None)}), [["a", 1, None]], ["a"]),
        (frozenset({ListOf(NAMES), "str"}), ["any", ["unet"]], [["unt"], 3]),
        (frozenset({"object"}), [{"_target_": "x"}, {"a": 1}], ["a", [1]]),
    ],
)
def test_members_and_keys_count(kind, good, bad) -> None:
    assert [value for value in good if not fits(value, kind)] == []
    assert [value for value in bad if fits(value, kind)] == []


def test_the_member_that_is_wrong_is_named_with_the_nearest_choice() -> None:
    assert faults_of("x.seeds", [0, "a", None], INTS) == [
        "x.seeds[1]: expected int, got str 'a'",
        "x.seeds[2]: expected int, got null",
    ]
    assert faults_of("x.components", ["unet", "text_encodr"], frozenset({ListOf(NAMES)})) == [
        "x.components[1]: expected one of text_encoder, unet, got str 'text_encodr'; nearest: text_encoder"
    ]
    assert faults_of("x.lr", {"text_encodr": 0.1, "unet": "fast"}, RATES) == [
        "x.lr.text_encodr: no such key; nearest: x.lr.text_encoder",
        "x.lr.unet: expected float, got str 'fast'",
    ]


def test_where_several_lists_may_be_meant_the_whole_is_named() -> None:
    either = frozenset({ListOf(frozenset({"int"})), ListOf(frozenset({"str"}))})
    assert faults_of("x", ["a"], either) == []
    assert faults_of("x", [1, "a"], either) == ["x: expected list of int or list of str, got list [1, 'a']"]


def test_kinds_are_described_in_words() -> None:
    assert describe(frozenset({"null", "int"})) == "int or null"
    assert describe(frozenset({Literal("b"), Literal("a"), "null"})) == "one of a, b or null"
    assert describe(frozenset({"str", "object"})) == "str or an object (_target_)"
    assert describe(INTS) == "list of int"
    assert describe(RATES) == "mapping to float or null"
    assert describe(None) == "anything"
