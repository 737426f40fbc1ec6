"""Signatures of functions and classes, read from their source files without importing them.

A config can so be checked against `lightning.Trainer` in milliseconds, where importing it takes seconds.
`None` always means that the source does not tell, so that anything may be right.
"""

import ast
from dataclasses import dataclass
from functools import cache

from lit_sd.kinds import DictOf, Kind, ListOf, Literal
from lit_sd.sources import Found, Module, bases_of, find, lookup

SCALARS = {"int": "int", "float": "float", "bool": "bool", "str": "str", "Path": "str", "PathLike": "str"}
LISTS = {"list", "List", "tuple", "Tuple", "Sequence", "Iterable", "Collection", "set", "Set"}
DICTS = {"dict", "Dict", "Mapping", "MutableMapping"}
OBJECTS = {"Callable", "type", "Type", "timedelta"}


@dataclass(frozen=True)
class Parameter:
    """One parameter: what it takes, and whether it must be given."""

    kind: Kind
    required: bool


@dataclass(frozen=True)
class Signature:
    """Parameters by name; `open` where others are taken too (`**kwargs`)."""

    parameters: dict[str, Parameter]
    open: bool = False


@cache
def signature_of(target: str) -> Signature | None:
    """The parameters that calling `target` takes; None where the source does not tell.

    Raises:
        TargetError: the name leads nowhere.
    """
    found = find(target)
    if found is None:
        return None
    if isinstance(found.node, ast.ClassDef):
        return class_signature(found)
    if isinstance(found.node, ast.FunctionDef):
        in_class = isinstance(
            getattr(find(target.rpartition(".")[0]) if "." in target else None, "node", None), ast.ClassDef
        )
        static = any(ast.unparse(d) == "staticmethod" for d in found.node.decorator_list)
        return function_signature(found, skip=int(in_class and not static))
    return None


def class_signature(found: Found, depth: int = 0) -> Signature | None:
    """Of a class: its own or inherited `__init__`, or its dataclass fields."""
    assert isinstance(found.node, ast.ClassDef)
    for statement in found.node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return function_signature(Found(statement, found.module), skip=1)
    inherited = Signature({})
    for base in bases_of(found):
        signature = class_signature(base, depth + 1) if base and depth < 20 else None
        if signature is None:
            return None
        if signature.parameters or signature.open:
            inherited = signature
            break
    if any("dataclass" in ast.unparse(d).partition("(")[0] for d in found.node.decorator_list):
        return Signature(inherited.parameters | dataclass_fields(found), inherited.open)
    return inherited


def dataclass_fields(found: Found) -> dict[str, Parameter]:
    """The fields that a dataclass's own body adds to its `__init__`."""
    assert isinstance(found.node, ast.ClassDef)
    fields: dict[str, Parameter] = {}
    for statement in found.node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        annotation, default = ast.unparse(statement.annotation), statement.value
        if "ClassVar" in annotation or "KW_ONLY" in annotation:
            continue
        required = default is None
        if isinstance(default, ast.Call) and ast.unparse(default.func).rpartition(".")[2] == "field":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in default.keywords}
            if given.get("init") == "False":
                continue
            required = not given.keys() & {"default", "default_factory"}
        fields[statement.target.id] = Parameter(kind_of(statement.annotation, found.module), required)
    return fields


def function_signature(found: Found, skip: int = 0) -> Signature:
    """Of a function; `skip` leading parameters are bound already."""
    assert isinstance(found.node, ast.FunctionDef)
    arguments = found.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults)) + list(
        arguments.defaults
    )
    pairs = list(zip(positional, defaults, strict=True))[skip:] + list(
        zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    )
    parameters = {}
    for argument, default in pairs:
        kind = kind_of(argument.annotation, found.module) if argument.annotation else None
        if kind is not None and isinstance(default, ast.Constant) and default.value is None:
            kind |= {"null"}
        parameters[argument.arg] = Parameter(kind, default is None)
    if arguments.kwarg is None:
        return Signature(parameters)
    rest = forwarded(found, arguments.kwarg.arg)
    if rest is None:
        return Signature(parameters, open=True)
    more = {name: Parameter(p.kind, False) for name, p in rest.parameters.items()}
    return Signature(more | parameters, rest.open)


def forwarded(found: Found, kwargs: str) -> Signature | None:
    """The parameters that may come through `**kwargs`, where the function hands it on to one callable whose
    name tells.
    """
    assert isinstance(found.node, ast.FunctionDef)
    for call in ast.walk(found.node):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        if not any(
            k.arg is None and isinstance(k.value, ast.Name) and k.value.id == kwargs for k in call.keywords
        ):
            continue
        called = lookup(found.module, call.func.id)
        if called is None:
            return None
        signature = class_signature(called) if isinstance(called.node, ast.ClassDef) else None
        if isinstance(called.node, ast.FunctionDef) and called.node is not found.node:
            signature = function_signature(called)
        if signature is None:
            return None
        given = {k.arg for k in call.keywords} | set(list(signature.parameters)[: len(call.args)])
        return Signature({n: p for n, p in signature.parameters.items() if n not in given}, signature.open)
    return None


def kind_of(annotation: ast.expr, module: Module, depth: int = 0) -> Kind:
    """What an annotation allows, as far as a config's plain values go."""
    if depth > 12:
        return None
    match annotation:
        case ast.Constant(value=None):
            return frozenset({"null"})
        case ast.Constant(value=str(text)):
            return kind_of(ast.parse(text, mode="eval").body, module, depth + 1)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return union([left, right], module, depth)
        case ast.Subscript(value=value, slice=inner):
            return subscript_kind(ast.unparse(value).rpartition(".")[2], inner, module, depth)
        case ast.Name() | ast.Attribute():
            return name_kind(annotation, module, depth)
    return None


def subscript_kind(name: str, inner: ast.expr, module: Module, depth: int) -> Kind:
    """Of `name[inner]`."""
    members = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if name == "Literal":
        return literals(members)
    if name == "Optional":
        inside = kind_of(inner, module, depth + 1)
        return None if inside is None else inside | {"null"}
    if name == "Union":
        return union(members, module, depth)
    if name in ("Annotated", "Final"):
        return kind_of(members[0], module, depth + 1)
    if name in LISTS:
        items = [member for member in members if not is_dots(member)]
        return frozenset({ListOf(union(items, module, depth))})
    if name in DICTS and len(members) == 2:
        key, value = (kind_of(member, module, depth + 1) for member in members)
        return frozenset({DictOf(key, value)})
    return plain_kind(name)


def is_dots(annotation: ast.expr) -> bool:
    """Whether it is the `...` of `tuple[int, ...]`."""
    return isinstance(annotation, ast.Constant) and annotation.value is ...


def name_kind(annotation: ast.Name | ast.Attribute, module: Module, depth: int) -> Kind:
    """Of a bare name: a builtin, an alias, or a class, which only an object built by `_target_` can fill."""
    name = ast.unparse(annotation)
    leaf = name.rpartition(".")[2]
    if (kind := plain_kind(leaf)) is not None:
        return kind
    if "." in name or leaf in ("Any", "object"):
        return None
    found = lookup(module, name)
    if found is None:
        return None
    if not isinstance(found.node, ast.ClassDef):
        return kind_of(found.node, found.module, depth + 1) if isinstance(found.node, ast.expr) else None
    bases = " ".join(ast.unparse(base) for base in found.node.bases)
    return (
        None if "Enum" in bases or "TypedDict" in bases or "str" in bases.split() else frozenset({"object"})
    )


def plain_kind(name: str) -> Kind:
    """Of the names that every annotation uses."""
    if name in SCALARS:
        return frozenset({SCALARS[name]})
    for names, kind in ((LISTS, "list"), (DICTS, "dict"), (OBJECTS, "object")):
        if name in names:
            return frozenset({kind})
    return None


def literals(members: list[ast.expr]) -> Kind:
    """Of the members of a `typing.Literal`."""
    try:
        return frozenset(Literal(ast.literal_eval(member)) for member in members)
    except ValueError:
        return None


def union(members: list[ast.expr], module: Module, depth: int) -> Kind:
    """Anything where one member is anything, else all that any member takes."""
    whole: frozenset[str | Literal | ListOf | DictOf] = frozenset()
    for member in members:
        kind = kind_of(member, module, depth + 1)
        if kind is None:
            return None
        whole |= kind
    return whole
