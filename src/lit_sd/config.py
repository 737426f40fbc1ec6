"""The config checked as a whole: every fault at once, with the nearest valid name, before anything heavy is
imported.

What a node with a `_target_` may hold is read from the target's source (`signatures.py`), so no schema has to
be kept in step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from lit_sd.kinds import faults_of
from lit_sd.signatures import Parameter, Signature, signature_of
from lit_sd.sources import TargetError
from lit_sd.spelling import hint

BUILT = (
    "model",
    "adapter",
    "objective",
    "data",
    "optimizer",
    "scheduler",
    "callbacks",
    "logger",
    "trainer",
    "task",
)
"""Groups whose node becomes an object (or a dict of objects, for callbacks and logger)."""
MANY = ("callbacks", "logger")
TASK_PARTS = ("model", "adapter", "objective", "optimizer", "scheduler")
"""Groups that `run.build` hands to the task's constructor, those that are there."""
SUPPLIED = {"trainer": {"callbacks", "logger"}}
"""Arguments that `run.build` adds, by group."""
LATER = {"data.resolution"}
"""Keys whose null `run.settle` replaces, whatever the target's annotation says."""
HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}
UNKNOWN = object()  # a value that only a running job knows


@dataclass
class Settings:
    """What belongs to the run and to no group (`conf/run`)."""

    seed: int
    ckpt: str | None


@dataclass
class Paths:
    """`conf/paths`."""

    log_dir: str
    output_dir: str
    sweep_dir: str


class ConfigError(ValueError):
    """The config can't become a run. `faults` holds one line for each thing that is wrong."""

    def __init__(self, faults: list[str]) -> None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n  ".join([f"{count} in the configuration:", *faults]))
        self.faults = faults


def check(cfg: DictConfig) -> None:
    """Raises ConfigError where the composed training config has any fault."""
    if faults := faults_in(cfg):
        raise ConfigError(faults)


def faults_in(cfg: DictConfig) -> list[str]:
    """All that is wrong with a composed training config, one line each."""
    faults = own_faults(cfg, Settings, BUILT)
    for group in BUILT:
        if group not in cfg:
            continue
        value, fault = value_at(cfg, group, group)
        faults += fault
        if isinstance(value, DictConfig):
            faults += (
                many_faults(value, group)
                if group in MANY
                else tree_faults(value, group, supplied(cfg, group))
            )
            if group not in MANY and "_target_" not in value:
                faults.append(f"{group}: has no _target_, so nothing can be built from it")
        elif value is not None and value is not UNKNOWN:
            faults.append(
                f"{group}={value!r}: expected a mapping; to choose a file of conf/{group}, "
                "use its name without .yaml"
            )
    return faults + task_faults(cfg)


def own_faults(cfg: DictConfig, schema: type, groups: Iterable[str]) -> list[str]:
    """Faults of the values at the root, by the dataclass of what stands there, and of `paths`."""
    settings = fields(schema)
    faults = unknown_keys(cfg, "", settings.parameters.keys() | set(groups) | {"paths"})
    faults += [f"{key}: missing from the config" for key in settings.parameters if key not in set(cfg)]
    for key in settings.parameters.keys() & set(cfg):
        faults += value_at(cfg, key, str(key))[1]
    faults += value_faults(cfg, "", settings)
    if isinstance(cfg.get("paths"), DictConfig):
        faults += unknown_keys(cfg.paths, "paths", fields(Paths).parameters)
        faults += value_faults(cfg.paths, "paths", fields(Paths))
    return faults


def supplied(cfg: DictConfig, group: str) -> set[str]:
    """Arguments that do not stand in the config, since `run.build` passes them."""
    if group == "task":
        return {part for part in TASK_PARTS if cfg.get(part) is not None}
    return SUPPLIED.get(group, set())


def task_faults(cfg: DictConfig) -> list[str]:
    """Groups that are chosen and that the task has no use for."""
    task = cfg.get("task")
    target = task.get("_target_") if isinstance(task, DictConfig) else None
    try:
        signature = signature_of(target) if target else None
    except TargetError:
        return []  # reported with the tree
    if signature is None or signature.open:
        return []
    return [
        f"{part}: the task {target} takes none; set {part}=null"
        for part in TASK_PARTS
        if cfg.get(part) is not None and part not in signature.parameters
    ]


def fields(schema: type) -> Signature:
    """The signature of a dataclass."""
    signature = signature_of(f"{schema.__module__}.{schema.__name__}")
    assert signature is not None
    return signature


def many_faults(node: DictConfig, path: str) -> list[str]:
    """Faults of a dict of named objects, any of which may be null."""
    faults = []
    for name in map(str, node):
        value, fault = value_at(node, name, f"{path}.{name}")
        faults += fault
        if isinstance(value, DictConfig) and "_target_" in value:
            faults += tree_faults(value, f"{path}.{name}", set())
        elif value is not None and value is not UNKNOWN:
            faults.append(f"{path}.{name}: expected a mapping with a _target_, or null; got {plain(value)!r}")
    return faults


def tree_faults(node: DictConfig | ListConfig, path: str, given: set[str]) -> list[str]:
    """Faults of a node and all below it. `given` are arguments that the target gets from elsewhere."""
    faults: list[str] = []
    if isinstance(node, DictConfig) and "_target_" in node:
        faults += call_faults(node, path, given)
        keys: list[Any] = [key for key in node if key not in HYDRA_KEYS]
    else:
        keys = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    for key in keys:
        value, fault = value_at(node, key, f"{path}.{key}")
        faults += fault
        if isinstance(value, DictConfig | ListConfig):
            faults += tree_faults(value, f"{path}.{key}", set())
    return faults


def call_faults(node: DictConfig, path: str, given: set[str]) -> list[str]:
    """Faults of one `_target_`: the name, its arguments' names, those that are missing, and plain values'
    types.
    """
    target = str(node["_target_"])
    try:
        signature = signature_of(target)
    except TargetError as error:
        where = error.inside or "the installed packages"
        return [
            f"{path}._target_={target}: no {error.missing!r} in {where}{hint(error.missing, error.options)}"
        ]
    if signature is None:
        return []
    faults = (
        [] if signature.open else unknown_keys(node, path, signature.parameters.keys() | HYDRA_KEYS, target)
    )
    if not node.get("_partial_") and "_args_" not in node:
        faults += [
            f"{path}.{name}: {target} needs it and the config has none"
            for name, parameter in signature.parameters.items()
            if parameter.required and name not in set(node) and name not in given
        ]
    return faults + value_faults(node, path, signature)


def unknown_keys(node: DictConfig, path: str, known: Iterable[str], target: str = "") -> list[str]:
    """A fault for each key that is not `known`."""
    known = [name for name in known if name not in HYDRA_KEYS or name in node]
    head = f"{path}." if path else ""
    takes = f" of {target}" if target else ""
    return [
        f"{head}{key}: no such key{takes}{hint(key, known, head)}"
        for key in map(str, node)
        if key not in known
    ]


def value_faults(node: DictConfig, path: str, signature: Signature) -> list[str]:
    """A fault for each plain value whose type the parameter does not take."""
    faults = []
    for name, parameter in signature.parameters.items():
        if name in node and not OmegaConf.is_interpolation(
            node, name
        ):  # where it comes from, it is judged too
            full = f"{path}.{name}" if path else name
            value, _ = value_at(node, name, full)
            if value is UNKNOWN or (value is None and full in LATER):
                continue
            faults += faults_of(full, plain(value), parameter.kind)
    return faults


def parameter_at(cfg: DictConfig, key: str) -> Parameter | None:
    """The parameter that a dotted key of a training config fills, where that can be told."""
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    try:
        if parent in ("", "paths"):
            signature: Signature | None = fields(Paths if parent else Settings)
        else:
            target = node.get("_target_") if isinstance(node, DictConfig) else None
            signature = signature_of(target) if target else None
    except TargetError:
        return None
    return signature.parameters.get(leaf) if signature else None


def value_at(node: DictConfig | ListConfig, key: Any, path: str) -> tuple[Any, list[str]]:
    """The resolved value, or UNKNOWN, and the faults met on the way."""
    if OmegaConf.is_missing(node, key):
        return UNKNOWN, [f"{path}: needs a value; give {path}=…"]
    try:
        return node[key], []
    except InterpolationToMissingValueError:
        return UNKNOWN, []  # the missing value itself is reported
    except OmegaConfBaseException as error:
        if "hydra" in str(error):
            return UNKNOWN, []
        raw = OmegaConf.to_container(node, resolve=False)
        written = raw[key]  # type: ignore[index]
        return UNKNOWN, [f"{path}={written}: can't be resolved: {str(error).splitlines()[0]}"]


def plain(value: Any) -> Any:
    """OmegaConf's containers as dict and list, interpolations as they are written."""
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value
