"""Drops from a cache on disk what a run doesn't ask for.

Nothing else may read or fill the cache meanwhile: a run that finds something gone ends with an error.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lit_sd.data.caches.digests import STAMPS, Facts, Stamps
from lit_sd.data.caches.parts import Parts
from lit_sd.data.caches.writer import KEY, KEYS, PartWriter


def prune_parts(folder: Path, kind: str, keys: np.ndarray) -> int:
    """Drops all values but those under some keys. Parts that hold others too are written anew, together.

    Args:
        folder: of the parts.
        kind: what the values are.
        keys: those that stay, an array `n` of `KEY`.

    Returns:
        How many values were dropped.

    Raises:
        ValueError: a part is damaged.
        OSError: there is no room for what stays.
    """
    parts, mixed, dropped = Parts(folder, kind), [], 0
    parts.refresh()
    with PartWriter(folder, kind) as writer:
        for name in parts.names:
            held = np.load(folder / name / KEYS)
            wanted = held[np.isin(held, keys)]
            if len(wanted) == len(held):
                continue
            mixed.append(folder / name)
            dropped += len(held) - len(wanted)
            data = wanted.tobytes()
            for at in range(0, len(data), KEY.itemsize):
                key = data[at : at + KEY.itemsize]
                value = parts.values([key])[0]
                assert value is not None
                writer.write(key, bytes(value))
    for path in mixed:  # only now that what stays is durable; hidden first, since half a part is damaged
        shutil.rmtree(path.rename(path.with_name(f".{path.name}")))
    return dropped


def prune_facts(folder: Path, used: Sequence[Facts]) -> int:
    """Drops the facts of other sources than these, and the stamps of other images than theirs.

    Returns:
        How many stamps were dropped.
    """
    stay = {facts.path for facts in used}
    for path in folder.glob("*.facts"):
        if path not in stay:
            path.unlink()
    digests = [facts.digests(np.arange(len(facts))) for facts in used]
    return Stamps(folder / STAMPS).keep(np.concatenate([np.zeros(0, "V16"), *digests]))
