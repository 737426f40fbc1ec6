"""Classes and functions found in the source files of installed packages, by their dotted names, without
importing them.

Imports are followed from file to file. What can't be told from syntax trees alone (C code, lazy modules) is
None.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

STARS = 10  # more `from … import *` than this are not followed: transformers has hundreds
ROOTS = {"object", "ABC", "Protocol", "Generic"}  # bases that take no arguments


class TargetError(LookupError):
    """A dotted name leads nowhere. Attributes: `name` as written, `missing` the part not found, `options`
    what is there.
    """

    def __init__(self, name: str, missing: str, inside: str, options: list[str]) -> None:
        super().__init__(f"{name}: {inside or 'this Python'} has no {missing!r}")
        self.name, self.missing, self.inside, self.options = name, missing, inside, options


@dataclass(frozen=True, eq=False)
class Module:
    """A module's syntax tree, and what it takes to follow its imports."""

    name: str
    package: str
    tree: ast.Module
    folder: Path | None  # of a package

    def statements(self) -> Iterator[ast.stmt]:
        """Statements outside functions and classes, those under `if` and `try` too."""
        waiting: list[ast.stmt] = list(reversed(self.tree.body))
        while waiting:
            statement = waiting.pop()
            yield statement
            for part in ("finalbody", "orelse", "handlers", "body"):
                if isinstance(statement, ast.If | ast.Try | ast.With):
                    inner = getattr(statement, part, [])
                    waiting += reversed(
                        [s for i in inner for s in (i.body if isinstance(i, ast.ExceptHandler) else [i])]
                    )

    def absolute(self, imported: ast.ImportFrom) -> str:
        """The full name of the module that a `from … import` reads."""
        if not imported.level:
            return imported.module or ""
        base = self.package.split(".")
        return ".".join(
            base[: len(base) - imported.level + 1] + ([imported.module] if imported.module else [])
        )


@cache
def module_of(name: str) -> Module | None:
    """The module of that name, or None where there is no source file for it."""
    root, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(root)  # of a top-level name, this imports nothing
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = [Path(place) for place in spec.submodule_search_locations or []]
    if not rest:
        file = Path(spec.origin) if spec.origin else None
    else:
        places = [place.joinpath(*rest[:-1]) for place in places]
        files = [place / rest[-1] / "__init__.py" for place in places] + [
            place / f"{rest[-1]}.py" for place in places
        ]
        file = next((f for f in files if f.is_file()), None)
    if file is None or file.suffix != ".py" or not file.is_file():
        return None
    is_package = file.name == "__init__.py"
    package = name if is_package else name.rpartition(".")[0]
    return Module(name, package, ast.parse(file.read_bytes()), file.parent if is_package else None)


@dataclass(frozen=True)
class Found:
    """A class, function or value and the module whose names it uses."""

    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.expr
    module: Module


def split(dotted: str) -> tuple[Module | None, list[str]]:
    """The longest leading part that is a module, and the names left over."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        module = module_of(".".join(parts[:cut]))
        if module is not None:
            return module, parts[cut:]
    return None, parts


def find(dotted: str) -> Found | None:
    """What the dotted name stands for; None where the source does not tell.

    Raises:
        TargetError: the name leads nowhere.
    """
    if not all(dotted.split(".")):
        raise TargetError(dotted, dotted, "", [])
    module, names = split(dotted)
    if module is None:
        if importlib.util.find_spec(names[0]) is None:
            raise TargetError(dotted, names[0], "", [])
        return None
    if not names:
        return None
    found = lookup(module, names[0])
    if found is None and is_closed(module):
        raise TargetError(dotted, names[0], module.name, public_names(module))
    for name in names[1:]:
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        found = method_of(found, name)
    return found


LOOKUPS: dict[tuple[str, str], Found | None] = {}


def lookup(module: Module, name: str) -> Found | None:
    """What `name` stands for inside `module`, through imports and plain assignments; answers are kept."""
    key = (module.name, name)
    if key not in LOOKUPS:
        LOOKUPS[key] = None  # what an import cycle gets to see
        LOOKUPS[key] = read(module, name)
    return LOOKUPS[key]


def read(module: Module, name: str) -> Found | None:
    """`lookup` without the memory: the last statement that binds the name counts."""
    found: Found | None = None
    stars = sum(isinstance(s, ast.ImportFrom) and s.names[0].name == "*" for s in module.statements())
    for statement in module.statements():
        match statement:
            case ast.ClassDef() | ast.FunctionDef() if statement.name == name:
                found = Found(statement, module)
            case ast.ImportFrom():
                for alias in statement.names:
                    star = alias.name == "*" and stars <= STARS
                    if star or (alias.asname or alias.name) == name:
                        source = name if alias.name == "*" else alias.name
                        found = follow(f"{module.absolute(statement)}.{source}") or found
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                found = Found(value, module)
            case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                found = Found(value, module)
    if found is not None and isinstance(found.node, ast.Name) and found.node.id != name:
        return lookup(found.module, found.node.id)
    return found


def follow(dotted: str) -> Found | None:
    """`find`, with None also for a name that leads nowhere."""
    try:
        return find(dotted)
    except TargetError:
        return None


def is_closed(module: Module) -> bool:
    """Whether every name of the module can be seen in its source."""
    for statement in module.statements():
        match statement:
            case ast.FunctionDef(name="__getattr__"):
                return False
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return False
            case ast.Assign(targets=targets) if any(
                isinstance(t, ast.Subscript | ast.Tuple) for t in targets
            ):
                return False  # sys.modules[__name__] = …, or lazy_loader's attach
    return True


def public_names(module: Module) -> list[str]:
    """Classes and functions of the module, those it imports too, and its submodules."""
    names: list[str] = []
    for statement in module.statements():
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            names.append(statement.name)
        elif isinstance(statement, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in statement.names]
    if module.folder is not None:
        names += [path.stem for path in sorted(module.folder.iterdir()) if path.suffix == ".py"]
    return [name for name in names if not name.startswith("_")]


def method_of(found: Found, name: str) -> Found | None:
    """The method `name` of a class or of its bases, depth first."""
    assert isinstance(found.node, ast.ClassDef)
    for statement in found.node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == name:
            return Found(statement, found.module)
    for base in bases_of(found):
        if base is not None and (method := method_of(base, name)):
            return method
    return None


def bases_of(found: Found) -> Iterator[Found | None]:
    """Base classes; None for one whose source is not found. `object` and its like are left out."""
    assert isinstance(found.node, ast.ClassDef)
    for base in found.node.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        if name.rpartition(".")[2] in ROOTS:
            continue
        head, _, tail = name.partition(".")
        if tail:
            target = imported_as(found.module, head)
            base_found = follow(f"{target}.{tail}") if target else None
        else:
            base_found = lookup(found.module, head)
        yield base_found if base_found and isinstance(base_found.node, ast.ClassDef) else None


def imported_as(module: Module, name: str) -> str | None:
    """The full name of the module that `name` stands for in `module`."""
    for statement in module.statements():
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return alias.name if alias.asname else name
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return f"{module.absolute(statement)}.{alias.name}"
    return None
