"""The command line checked before Hydra sees it: unknown groups, choices and keys, all at once, with the
nearest valid name.

Hydra itself stops at the first and does not say what was meant. Arguments that a `_target_` takes and that no
YAML lists (`trainer.limit_val_batches=4`) need no `+` here: they get it.
"""

from dataclasses import dataclass, field
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lit_sd.config import ConfigError, faults_in, parameter_at
from lit_sd.evaluation_config import evaluation_faults
from lit_sd.kinds import faults_of
from lit_sd.places import missing_checkpoint
from lit_sd.refusal import refuse
from lit_sd.signatures import signature_of
from lit_sd.sources import TargetError
from lit_sd.spelling import hint, nearest, spread_by_shell

FAULTS_OF = {"train": faults_in, "evaluate": evaluation_faults}
"""How each primary config is checked."""
SWEPT_CHOICES = 4  # composing takes a tenth of a second; each job of a sweep checks itself anyway


def check_command_line(conf: Path, name: str, argv: list[str]) -> list[str]:
    """The arguments to give to Hydra; or prints all faults and exits with status 2.

    Args:
        conf: folder of the configs.
        name: primary config in it.
        argv: arguments after the program's name.
    """
    arguments = get_args_parser().parse_args(argv)
    asks = arguments.help or arguments.hydra_help or arguments.info or arguments.shell_completion
    elsewhere = arguments.config_path or arguments.config_name or arguments.experimental_rerun
    if asks or elsewhere:
        return argv
    folders = [conf] + ([Path(arguments.config_dir).resolve()] if arguments.config_dir else [])
    line = CommandLine(folders, name, list(arguments.overrides), sweeps=arguments.multirun)
    try:
        line.check()
    except ConfigError as error:
        refuse(error)
    return [line.rewritten.get(argument, argument) for argument in argv]


@dataclass
class CommandLine:
    """Overrides under check.

    Attributes:
        folders: config folders, the first is the project's.
        name: primary config.
        overrides: as written.
        sweeps: whether Hydra was asked for several jobs (`-m`).
        rewritten: overrides that Hydra should get in another form.
    """

    folders: list[Path]
    name: str
    overrides: list[str]
    sweeps: bool = False
    faults: list[str] = field(default_factory=list)
    rewritten: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ConfigError with every fault of the command line and of the config that it makes."""
        parsed = [override for text in self.overrides if (override := self.parse(text))]
        groups = [o for o in parsed if self.is_group(o) and self.choices_exist(o)]
        values = [o for o in parsed if not self.is_group(o)]
        with initialize_config_dir(str(self.folders[0]), version_base="1.3"):
            cfg = self.compose([*groups, *values], quietly=True)
            if cfg is None:  # then what Hydra stopped at is looked for, and left out
                base = self.compose(groups)
                values = [o for o in values if base is not None and self.key_exists(o, base)]
                cfg = self.compose([*groups, *values]) if base is not None else None
            self.add(
                spread_by_shell((o.key_or_group, str(o.input_line)) for o in values if not o.is_delete())
            )
            if cfg is not None:
                self.add(FAULTS_OF[self.name](cfg))
                self.add(missing_checkpoint(cfg))
                for override in values:
                    self.add(sweep_faults(override, cfg))
                self.check_choices(groups, values)
        if self.faults:
            raise ConfigError(self.faults)

    def add(self, faults: list[str]) -> None:
        """Keeps those that are new."""
        self.faults += [fault for fault in faults if fault not in self.faults]

    def parse(self, text: str) -> Override | None:
        """The override, or None with a fault where it is none or sweeps without `-m`."""
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            self.faults.append(
                f"{text}: not of the form key=value ({reason}); "
                "quote values that hold spaces, commas, = or braces"
            )
            return None
        if override.is_sweep_override() and not self.sweeps:
            self.faults.append(
                f"{text}: several values need -m; one value with a comma needs quotes: '{quoted(text)}'"
            )
            return None
        return override

    def compose(self, overrides: list[Override], quietly: bool = False) -> DictConfig | None:
        """The config with the first value of each sweep; None, with a fault unless `quietly`, where there is
        none.
        """
        lines = [first(override, self.rewritten) for override in overrides]
        if further := ",".join(f"file://{folder}" for folder in self.folders[1:]):
            lines.append(f"hydra.searchpath=[{further}]")
        try:
            return compose(self.name, overrides=lines)
        except (HydraException, OmegaConfBaseException) as error:
            if not quietly:
                self.add([" ".join(str(error).split())])
            return None

    def is_group(self, override: Override) -> bool:
        """Whether the key names a folder of configs."""
        return any((folder / override.key_or_group).is_dir() for folder in self.folders)

    def choices_exist(self, override: Override) -> bool:
        """Whether each chosen file is there; faults where not."""
        if override.is_delete():
            return True
        if override.value() is None:  # Hydra wants this said as a deletion
            self.rewritten[override.input_line or ""] = f"~{override.key_or_group}"
            return True
        options = self.options(override.key_or_group)
        fine = True
        for choice in choices(override):
            if str(choice).removesuffix(".yaml") not in options:
                fine = False
                shown = hint(str(choice), options) or "; the group is empty"
                near = f" (choices: {', '.join(options)})" if "nearest" in shown else ""
                self.faults.append(f"{override.key_or_group}={choice}: no such choice{shown}{near}")
        return fine

    def options(self, group: str) -> list[str]:
        """Files of a group, by name."""
        places = [folder / group for folder in self.folders]
        return sorted(
            path.relative_to(place).with_suffix("").as_posix()
            for place in places
            for path in place.rglob("*.yaml")
        )

    def key_exists(self, override: Override, cfg: DictConfig) -> bool:
        """Whether there is such a key in the config, or its target takes it; a fault where not."""
        key = override.key_or_group
        if (
            override.is_add()
            or override.is_force_add()
            or key.partition(".")[0] == "hydra"
            or key.startswith("hydra/")
        ):
            return True
        parent, _, leaf = key.rpartition(".")
        node = select(cfg, parent)
        if isinstance(node, DictConfig) and leaf in set(node):  # `in node` is False for ???
            if not override.is_delete() and isinstance(override.value(), dict):  # its keys may be new
                self.rewritten[override.input_line or ""] = f"++{override.input_line}"
            return True
        if OmegaConf.is_list(node):
            return True
        if isinstance(node, DictConfig) and not override.is_delete() and (takes(node, leaf) or not node):
            self.rewritten[override.input_line or ""] = f"++{override.input_line}"
            return True
        self.faults.append(f"{override.input_line}: {self.reason(key, cfg)}")
        return False

    def reason(self, key: str, cfg: DictConfig) -> str:
        """Why there is no such key, and what may be meant."""
        parent, _, leaf = key.rpartition(".")
        groups = sorted({path.name for folder in self.folders for path in folder.iterdir() if path.is_dir()})
        if not parent:
            known = all_keys(cfg)
            same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
            near = same_leaf[0] if same_leaf else nearest(leaf, [*groups, *map(str, cfg)])
            return "no such group or key" + (
                f"; nearest: {near}" if near else hint("", [*groups, *map(str, cfg)])
            )
        head = key.partition(".")[0]
        if head in groups and head not in cfg:
            return f"no {head} is chosen here; choose one of {', '.join(self.options(head))} with {head}=…"
        node = select(cfg, parent)
        if isinstance(node, DictConfig):
            known = [name for name in (*map(str, node), *parameters(node)) if not name.startswith("_")]
            return f"no such key in {parent}{hint(leaf, known, f'{parent}.')}"
        known = all_keys(cfg)
        near = nearest(key, known)
        return "no such key" + (f"; nearest: {near}" if near else hint(head, map(str, cfg)))

    def check_choices(self, groups: list[Override], values: list[Override]) -> None:
        """Adds the faults of a sweep's further choices of files, the first few, each beside the first of the
        others.
        """
        further = [(group, one) for group in groups for one in variants(group)[1:]]
        for group, one in further[:SWEPT_CHOICES]:
            others = [other for other in groups if other is not group]
            cfg = self.compose([*others, OverridesParser.create().parse_override(one), *values])
            self.add(FAULTS_OF[self.name](cfg) if cfg is not None else [])


def variants(override: Override) -> list[str]:
    """One override for each value of a sweep, for a range its first; the override itself where it is none."""
    line = override.input_line or ""
    if not override.is_sweep_override():
        return [line]
    strings = override.sweep_string_iterator()
    values = list(strings) if override.is_choice_sweep() else [next(strings)]
    return [f"{line.partition('=')[0]}={value}" for value in values]


def first(override: Override, rewritten: dict[str, str]) -> str:
    """The override with the first value of its sweep, in the form that Hydra should get."""
    line = override.input_line or ""
    if rewritten.get(line, line).startswith("++"):
        return f"++{variants(override)[0]}"
    return rewritten.get(line) or variants(override)[0]


def sweep_faults(override: Override, cfg: DictConfig) -> list[str]:
    """Faults of a sweep's values after the first, by the type that their key takes."""
    parameter = parameter_at(cfg, override.key_or_group)
    parser = OverridesParser.create()
    further = [parser.parse_override(text).value() for text in variants(override)[1:]]
    if parameter is None:
        return []
    key = override.key_or_group
    return [fault for value in further for fault in faults_of(key, value, parameter.kind)]


def choices(override: Override) -> list[object]:
    """The files that a group override names."""
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    value = override.value()
    return list(value) if isinstance(value, list) else [value]


def select(cfg: DictConfig, path: str) -> object:
    """The node at a dotted path; the whole for the empty path, None where there is none."""
    try:
        return OmegaConf.select(cfg, path) if path else cfg
    except OmegaConfBaseException:
        return None


def parameters(node: DictConfig) -> list[str]:
    """Names that the node's target takes."""
    try:
        signature = signature_of(str(node["_target_"])) if "_target_" in node else None
    except TargetError:
        return []
    return list(signature.parameters) if signature else []


def takes(node: DictConfig, name: str) -> bool:
    """Whether the node's target has a parameter of that name."""
    return name in parameters(node)


def all_keys(cfg: DictConfig, path: str = "") -> list[str]:
    """Every dotted key of the config, with those that targets take besides."""
    keys: list[str] = []
    for key in map(str, cfg):
        name = f"{path}{key}"
        keys.append(name)
        node = select(cfg, key) if "." not in key else None
        if isinstance(node, DictConfig):
            keys += all_keys(node, f"{name}.")
            keys += [f"{name}.{parameter}" for parameter in parameters(node) if parameter not in node]
    return [key for key in keys if not key.rpartition(".")[2].startswith("_")]


def quoted(text: str) -> str:
    """The override with its value in quotes."""
    key, _, value = text.partition("=")
    return f'{key}="{value}"'
