"""What is said of shards at set-up, and what of it ends the run."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from lit_sd.data.buckets import SHOWN, listed
from lit_sd.data.packed.packing import Names, Policy
from lit_sd.data.shards.index import Entry
from lit_sd.data.shards.rows import ShardRows


class Shard(NamedTuple):
    """A shard that can be read.

    Attributes:
        number: among all shards.
        label: what messages call it.
        entry: its summary.
    """

    number: int
    label: str
    entry: Entry


def judge(
    where: str, shards: Sequence[Shard], absent: Sequence[str], rows: ShardRows, policy: Policy
) -> list[str]:
    """Lines for the report.

    Args:
        where: what messages call all shards.
        shards: those that are there.
        absent: the names of those that are not.
        rows: their examples.
        policy: what to do about what is bad or missing; it counts shards as it counts images.

    Raises:
        ValueError: the policy doesn't let it pass; the message names all that is wrong.
    """
    good, captioned, bad = (
        sum(getattr(shard.entry, field) for shard in shards) for field in ("samples", "captioned", "bad")
    )
    wrong, text = _judge_shards(shards, absent, policy)
    faults = [text] if wrong else []
    notes = [text] if text and not wrong else []
    if good and not captioned and not policy.one_for_all:
        faults.append(_no_captions(shards, rows, good))
    try:
        bad_names = list(islice(_bad(shards, rows), SHOWN))
        blank_names = list(islice(_blank(shards, rows), SHOWN)) if captioned else []
        notes += policy.judge(
            where,
            good + bad,
            Names(bad, bad_names.__getitem__),
            Names(good - captioned if captioned else 0, blank_names.__getitem__),
        )
    except ValueError as error:
        faults.append(str(error).removeprefix(f"{where}: "))
    if faults:
        raise ValueError(f"{where}: " + "\n".join(faults))
    return [*notes, *_describe(shards)]


def _judge_shards(shards: Sequence[Shard], absent: Sequence[str], policy: Policy) -> tuple[bool, str]:
    """Whether what is wrong with whole shards ends the run, and what that is."""
    total = len(shards) + len(absent)
    lost = [f"{label} (there is no such shard)" for label in absent]
    lost += [f"{s.label} ({s.entry.broken})" for s in shards if s.entry.broken and not s.entry.samples]
    cut = [f"{s.label} ({s.entry.broken})" for s in shards if s.entry.broken and s.entry.samples]
    told = [f"{len(lost)} of {total} shards can't be used: {listed(lost)}"] if lost else []
    told += [f"{len(cut)} of {total} shards end early: {listed(cut)}"] if cut else []
    text = "; ".join(told)
    if not text:
        return False, ""
    if policy.bad_files == "error":
        return True, f"{text}; restore or remove them, or set data.bad_files=skip"
    if len(lost) > policy.max_bad_share * total:
        return True, f"{text}; that is more than data.max_bad_share={policy.max_bad_share:g} allows to skip"
    return False, f"{text}; what they lack is skipped"


def _bad(shards: Sequence[Shard], rows: ShardRows) -> Iterator[str]:
    for shard in shards:
        if shard.entry.bad:
            for key, why in rows.indexes.load(shard.number).faults.items():
                yield f"{shard.label}/{key} ({why})"


def _blank(shards: Sequence[Shard], rows: ShardRows) -> Iterator[str]:
    for shard in shards:
        if shard.entry.captioned < shard.entry.samples:
            index = rows.indexes.load(shard.number)
            for row in np.flatnonzero(~index.captioned).tolist():
                yield rows.id_in(shard.number, index, row)


def _no_captions(shards: Sequence[Shard], rows: ShardRows, total: int) -> str:
    endings: Counter[str] = Counter()
    for shard in shards[:SHOWN]:
        endings.update(rows.indexes.load(shard.number).endings)
    there = ", ".join(f"{count} {ending}" for ending, count in endings.most_common(8))
    return (
        f"none of the {total} images has a caption: looked for .txt files, and in .json files; found "
        f"{there}. Set data.caption_key to the ending of the caption files or the caption's key in the "
        ".json files, or data.prompt='…' for one prompt for all"
    )


def _describe(shards: Sequence[Shard]) -> Iterator[str]:
    if empty := [s.label for s in shards if not (s.entry.samples or s.entry.bad or s.entry.broken)]:
        yield f"{len(empty)} shards hold no image: {listed(empty)}"
    if alpha := sum(shard.entry.alpha for shard in shards):
        yield f"{alpha} images have transparency and are laid on white"
    if scattered := [shard.label for shard in shards if shard.entry.scattered]:
        count = sum(shard.entry.scattered for shard in shards)
        yield (
            f"the files of {count} examples don't lie together in {listed(scattered)}; they are found all "
            "the same, but programs that stream shards take them apart"
        )
