"""What `data=folder|lmdb|webdataset|hub` calls: a source of that kind, further ones beside it, and the
DataModule. Their defaults are in conf/data.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lit_sd.data.caption_rules import CaptionRule
from lit_sd.data.captions import BadCaptions, CaptionLines
from lit_sd.data.class_images import class_images_of
from lit_sd.data.datamodule import SDDataModule
from lit_sd.data.folder import BadFiles, FolderSource, MissingCaptions
from lit_sd.data.hub import HubSource
from lit_sd.data.lmdb import LmdbSource
from lit_sd.data.packed.packing import MissingCaptions as PackedMissingCaptions
from lit_sd.data.shares import POOL
from lit_sd.data.source import Source
from lit_sd.data.webdataset import ShardSource


def folder(
    root: str | os.PathLike | None,
    *,
    prompt: str | None,
    caption_ext: str | None,
    caption_column: str | None,
    caption_lines: CaptionLines,
    bad_captions: BadCaptions,
    missing_captions: MissingCaptions,
    bad_files: BadFiles,
    max_bad_share: int | float,
    verify: bool,
    repeat_folders: bool,
    mask_root: str | None,
    control_root: str | None,
    alpha_mask: bool,
    rule: CaptionRule,
    repeats: int,
    sources: Mapping[str, Source],
    val_root: str | os.PathLike | None,
    class_root: str | os.PathLike | None = None,
    class_prompt: str | None = None,
    num_class_images: int = 0,
    prior_weight: int | float = 0.0,
    **options: Any,
) -> SDDataModule:
    """A folder of images, and DreamBooth's class images beside it where `prior_weight` isn't 0.

    Args:
        root: the folder, subfolders included.
        prompt: with what follows up to `repeats`, see `lit_sd.data.folder.FolderSource`.
        sources: further ones, drawn from as if they were one with the folder.
        val_root: a folder to validate on, read like `root`.
        class_root: folder of the class images; None puts it beside `root`, as `<root>-prior`.
        class_prompt: with `num_class_images`, see `lit_sd.data.class_images.PriorSource`.
        prior_weight: what the mean loss of the class images counts; 0 trains without them.
        options: see `SDDataModule`.

    Raises:
        ValueError: an option is out of its range, or `root` is unset.
        FileNotFoundError: a folder does not exist.
    """
    read = partial(
        FolderSource,
        prompt=prompt,
        caption_ext=caption_ext,
        caption_column=caption_column,
        caption_lines=caption_lines,
        bad_captions=bad_captions,
        missing_captions=missing_captions,
        bad_files=bad_files,
        max_bad_share=max_bad_share,
        verify=verify,
        alpha_mask=alpha_mask,
        rule=rule,
    )
    images = read(
        root,
        repeats=repeats,
        repeat_folders=repeat_folders,
        mask_root=mask_root,
        control_root=control_root,
    )
    val = held_out(read, val_root)
    if not prior_weight:
        return SDDataModule(beside(POOL, images, sources), val=val, **options)
    prior = class_images_of(images.root, class_root, class_prompt, num_class_images, prior_weight)
    both = {**beside("instance", images, sources), "prior": prior}
    return SDDataModule(both, val=val, shares={"instance": 1, "prior": 1}, **options)


def lmdb(
    root: str | os.PathLike | None,
    *,
    prompt: str | None,
    verify: bool,
    missing_captions: PackedMissingCaptions,
    bad_files: BadFiles,
    max_bad_share: int | float,
    alpha_mask: bool,
    rule: CaptionRule,
    repeats: int,
    sources: Mapping[str, Source],
    val_root: str | os.PathLike | None,
    **options: Any,
) -> SDDataModule:
    """A dataset that `lit-sd prepare` packed into LMDB. For arguments, see `folder` and
    `lit_sd.data.lmdb.LmdbSource`.
    """
    read = partial(
        LmdbSource,
        prompt=prompt,
        verify=verify,
        missing_captions=missing_captions,
        bad_files=bad_files,
        max_bad_share=max_bad_share,
        alpha_mask=alpha_mask,
        rule=rule,
    )
    images = read(root, repeats=repeats)
    return SDDataModule(beside(POOL, images, sources), val=held_out(read, val_root), **options)


def webdataset(
    root: str | Sequence[str] | None,
    *,
    prompt: str | None,
    caption_key: str | None,
    image_ext: str | None,
    storage_options: Mapping[str, Any],
    cache_gb: int | float,
    verify: bool,
    missing_captions: PackedMissingCaptions,
    bad_files: BadFiles,
    max_bad_share: int | float,
    alpha_mask: bool,
    rule: CaptionRule,
    repeats: int,
    sources: Mapping[str, Source],
    val_root: str | Sequence[str] | None,
    cache_dir: str,
    **options: Any,
) -> SDDataModule:
    """Shards in webdataset's layout. For arguments, see `folder` and `lit_sd.data.webdataset.ShardSource`."""
    read = partial(
        ShardSource,
        prompt=prompt,
        caption_key=caption_key,
        image_ext=image_ext,
        storage_options=storage_options,
        cache_dir=cache_dir,
        cache_gb=cache_gb,
        verify=verify,
        missing_captions=missing_captions,
        bad_files=bad_files,
        max_bad_share=max_bad_share,
        alpha_mask=alpha_mask,
        rule=rule,
    )
    images = read(root, repeats=repeats)
    val = held_out(read, val_root)
    return SDDataModule(beside(POOL, images, sources), val=val, cache_dir=cache_dir, **options)


def hub(
    root: str | None,
    *,
    config: str | None,
    split: str,
    revision: str | None,
    streaming: bool,
    image_column: str,
    caption_column: str | None,
    mask_column: str | None,
    control_column: str | None,
    weight_column: str | None,
    id_column: str | None,
    prompt: str | None,
    verify: bool,
    cache_gb: int | float,
    missing_captions: PackedMissingCaptions,
    bad_files: BadFiles,
    max_bad_share: int | float,
    alpha_mask: bool,
    rule: CaptionRule,
    repeats: int,
    sources: Mapping[str, Source],
    val_root: str | None,
    cache_dir: str,
    **options: Any,
) -> SDDataModule:
    """A dataset of the Hugging Face hub. For arguments, see `folder` and `lit_sd.data.hub.HubSource`."""
    read = partial(
        HubSource,
        config=config,
        split=split,
        revision=revision,
        streaming=streaming,
        image_column=image_column,
        caption_column=caption_column,
        mask_column=mask_column,
        control_column=control_column,
        weight_column=weight_column,
        id_column=id_column,
        prompt=prompt,
        verify=verify,
        cache_dir=cache_dir,
        cache_gb=cache_gb,
        missing_captions=missing_captions,
        bad_files=bad_files,
        max_bad_share=max_bad_share,
        alpha_mask=alpha_mask,
        rule=rule,
    )
    images = read(root, repeats=repeats)
    val = held_out(read, val_root)
    return SDDataModule(beside(POOL, images, sources), val=val, cache_dir=cache_dir, **options)


def beside(name: str, first: Source, further: Mapping[str, Source]) -> dict[str, Source]:
    """All sources by name. Raises ValueError where a further one has the first one's."""
    if name in further or "prior" in further:
        raise ValueError(f"data.sources: {name} and prior are taken; give the further source another name")
    return {name: first, **further}


def held_out(read: Callable[..., Source], root: Any) -> Source | None:
    """A source to validate on, where there is one."""
    return None if root is None else read(root, name="val", key="data.val_root")
