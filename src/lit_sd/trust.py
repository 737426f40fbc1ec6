"""Which objects a checkpoint's config may build: it comes with the file, so from whoever made that.

A name's first words say little, since Hydra walks attributes: `lightning.pytorch.os.system` begins like
Lightning. So what counts is where the source files define what the name stands for.
"""

import ast
from typing import Any

from lit_sd.sources import follow

CLASSES = (
    "lit_sd.adapters",
    "lit_sd.callbacks",
    "lit_sd.data.caption_rules",
    "lit_sd.data.class_images",
    "lit_sd.data.datamodule",
    "lit_sd.data.folder",
    "lit_sd.data.hub",
    "lit_sd.data.lmdb",
    "lit_sd.data.openmoji",
    "lit_sd.data.webdataset",
    "lit_sd.models",
    "lit_sd.module",
    "lit_sd.objectives",
    "lit_sd.pretrain",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.trainer.trainer",
    "torch.optim",
)
"""Modules and packages whose classes are trusted: making one of these does nothing but that."""
FUNCTIONS = ("lit_sd.objectives", "lit_sd.schedules")
"""Modules of arithmetic, whose functions are trusted."""
FACTORIES = (
    "lit_sd.adapters.peft.lora",
    "lit_sd.data.builders.folder",
    "lit_sd.data.builders.hub",
    "lit_sd.data.builders.lmdb",
    "lit_sd.data.builders.webdataset",
    "lit_sd.loggers.wandb",
    "lit_sd.models.loading.load",
    "lit_sd.pretrain.autoencoder.new_autoencoder",
    "lit_sd.pretrain.contrastive.new_clip",
    "lit_sd.pretrain.vocabulary.openmoji_tokenizer",
)
"""Other functions that shipped configs name."""


def foreign(config: Any) -> list[str]:
    """What in a config of nested dicts and lists is not trusted: targets by name; interpolations, which a
    run's resolved config never holds and which could become a target once they are resolved; and commands for
    the shell.
    """
    found = {target for target in targets(config) if not is_trusted(target)}
    return sorted(found | {text for text in texts(config) if "${" in text or runs_a_command(text)})


def runs_a_command(text: str) -> bool:
    """Whether a text, as the root of shards, would start a program: `pipe:…`, also within a joined list."""
    return any(part.strip().startswith("pipe:") for part in text.split("::"))


def is_trusted(target: str) -> bool:
    """Whether a dotted name stands for a class or function that is trusted."""
    found = follow(target)
    if found is None or not isinstance(found.node, ast.ClassDef | ast.FunctionDef):
        return False
    module = found.module.name
    if isinstance(found.node, ast.ClassDef):
        return any(module == place or module.startswith(f"{place}.") for place in CLASSES)
    return module in FUNCTIONS or f"{module}.{found.node.name}" in FACTORIES


def targets(node: Any) -> set[str]:
    """Every `_target_` in nested dicts and lists."""
    own = {str(node["_target_"])} if isinstance(node, dict) and "_target_" in node else set()
    return own.union(*(targets(value) for value in children(node)))


def texts(node: Any) -> set[str]:
    """Every text in nested dicts and lists, keys too."""
    own = {node} if isinstance(node, str) else {str(key) for key in node} if isinstance(node, dict) else set()
    return own.union(*(texts(value) for value in children(node)))


def children(node: Any) -> list[Any]:
    """The values of a dict, the members of a list or tuple."""
    return (
        list(node.values())
        if isinstance(node, dict)
        else list(node)
        if isinstance(node, list | tuple)
        else []
    )
