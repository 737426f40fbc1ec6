"""What a parameter takes, as far as a config's plain values go, and what is wrong with a value that it does
not take.
"""

from dataclasses import dataclass
from typing import Any

from lit_sd.spelling import hint


@dataclass(frozen=True)
class Literal:
    """One value of a `typing.Literal`."""

    value: object


@dataclass(frozen=True)
class ListOf:
    """A list, and what its members are."""

    member: "Kind"


@dataclass(frozen=True)
class DictOf:
    """A mapping, and what its keys and values are."""

    key: "Kind"
    value: "Kind"


Kind = frozenset[str | Literal | ListOf | DictOf] | None
"""What a parameter takes: of int, float, bool, str, null, list, dict, object, literals, lists and mappings of
something; None is anything.
"""


def fits(value: Any, kind: Kind) -> bool:
    """Whether a config's plain value may fill a parameter of that kind. An int may stand for a float, a bool
    for neither. What is built by `_target_`, and what refers to another value, is judged there.
    """
    if kind is None or (isinstance(value, dict) and "_target_" in value):
        return True
    if any(isinstance(k, Literal) and type(k.value) is type(value) and k.value == value for k in kind):
        return True
    match value:
        case None:
            return "null" in kind
        case bool():
            return "bool" in kind
        case int():
            return bool({"int", "float"} & kind)
        case float():
            return "float" in kind
        case str():
            return "str" in kind or value.startswith("${")
        case list() | tuple():
            lists = [k for k in kind if isinstance(k, ListOf)]
            return "list" in kind or any(all(fits(item, k.member) for item in value) for k in lists)
        case dict():
            dicts = [k for k in kind if isinstance(k, DictOf)]
            return bool({"dict", "object"} & kind) or any(entries_fit(value, k) for k in dicts)
    return True


def entries_fit(value: dict, kind: DictOf) -> bool:
    """Whether every key and value of a mapping is of its kind."""
    return all(fits(key, kind.key) and fits(item, kind.value) for key, item in value.items())


def faults_of(path: str, value: Any, kind: Kind) -> list[str]:
    """A line for each thing in a value that its parameter does not take: the member that is wrong, where only
    one kind of list or mapping may be meant.
    """
    if kind is None or fits(value, kind):
        return []
    lists = [k for k in kind if isinstance(k, ListOf)]
    if isinstance(value, list | tuple) and len(lists) == 1:
        return [
            fault
            for i, item in enumerate(value)
            for fault in faults_of(f"{path}[{i}]", item, lists[0].member)
        ]
    dicts = [k for k in kind if isinstance(k, DictOf)]
    if isinstance(value, dict) and len(dicts) == 1:
        wrong = [key for key in value if not fits(key, dicts[0].key)]
        return [
            f"{path}.{key}: no such key{hint(str(key), choices(dicts[0].key), f'{path}.')}" for key in wrong
        ] + [fault for key in value for fault in faults_of(f"{path}.{key}", value[key], dicts[0].value)]
    return [fault_of(path, value, kind)]


def fault_of(path: str, value: Any, kind: Kind) -> str:
    """The line for a value of the wrong type or outside the choices."""
    near = hint(value, choices(kind), all_else=False) if isinstance(value, str) else ""
    quote = " (to pass digits as text: '\"…\"')" if kind == {"str"} and isinstance(value, int | float) else ""
    got = "null" if value is None else f"{type(value).__name__} {value!r}"
    return f"{path}: expected {describe(kind)}, got {got}{near}{quote}"


def choices(kind: Kind) -> list[str]:
    """The literals of a kind."""
    return [str(k.value) for k in kind or () if isinstance(k, Literal)]


def describe(kind: Kind) -> str:
    """The kind in words: `int or null`, `one of a, b`, `list of int`."""
    if kind is None:
        return "anything"
    values = sorted(set(choices(kind)))
    words = [f"one of {', '.join(values)}"] if values else []
    words += [k for k in ("int", "float", "bool", "str") if k in kind]
    lists = [f"list of {describe(k.member)}" for k in kind if isinstance(k, ListOf)]
    dicts = [f"mapping to {describe(k.value)}" for k in kind if isinstance(k, DictOf)]
    words += sorted(lists) + sorted(dicts)
    names = {"list": "list", "dict": "dict", "object": "an object (_target_)", "null": "null"}
    return " or ".join([*words, *(word for k, word in names.items() if k in kind)])
