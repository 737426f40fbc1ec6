"""What each source gives to a batch."""

from collections.abc import Mapping, Sequence

from lit_sd.data.buckets import Buckets
from lit_sd.data.pools import Pool
from lit_sd.data.source import Source
from lit_sd.data.transforms import Size

POOL = "images"
"""What the sources are called that a batch takes from as if they were one."""


def share_batch(batch_size: int, shares: Mapping[str, int | float]) -> dict[str, int]:
    """Parts of a batch in proportion to `shares`, by largest remainder, at least one for each; earlier ones
    win ties.

    Raises:
        ValueError: the batch is smaller than the number of sources, or a share isn't positive.
    """
    if batch_size < len(shares):
        raise ValueError(
            f"data.batch_size={batch_size} can't hold one image from each of the {len(shares)} sources "
            f"({', '.join(shares)}); set data.batch_size={len(shares)} or more"
        )
    if any(not share > 0 for share in shares.values()):
        raise ValueError(f"data.shares={dict(shares)}: expected positive numbers")
    total, spare = sum(shares.values()), batch_size - len(shares)
    exact = {name: batch_size * share / total for name, share in shares.items()}
    parts = dict.fromkeys(shares, 1)
    for _ in range(spare):
        neediest = max(parts, key=lambda name: round(exact[name] - parts[name], 9))
        parts[neediest] += 1
    return parts


def pool_sources(
    sources: Mapping[str, Source], shares: Mapping[str, int | float] | None
) -> dict[str, list[str]]:
    """Names of the sources by the pool that they belong to, the first source's pool first.

    Raises:
        ValueError: `shares` names what is no source.
    """
    if shares is None:
        return {(POOL if len(sources) > 1 else next(iter(sources))): list(sources)}
    if strangers := shares.keys() - sources.keys():
        raise ValueError(f"data.shares names {sorted(strangers)}, the sources are {sorted(sources)}")
    pools = {name: [name] for name in sources if name in shares}
    if not pools:
        raise ValueError("data.shares is empty; expected a share for each of some sources, or null")
    first = next(iter(pools.values()))
    first += [name for name in sources if name not in shares]
    return pools


def make_pools(
    sources: Mapping[str, Sequence[Source]],
    quotas: Mapping[str, int],
    *,
    seed: int,
    buckets: Buckets | None,
    square: Size,
    shuffle_shards: int | None,
    aside: Sequence[int] = (),
) -> list[Pool]:
    """The pools that batches are drawn from. Shapes are the first one's; the others' images are cropped to
    them.

    Args:
        sources: of each pool.
        quotas: images of each pool in a batch.
        seed: of the order.
        buckets: give the images their shapes; None gives all the same, `square`.
        square: that shape.
        shuffle_shards: how many parts of a source are mixed at a time; None shuffles each as a whole.
        aside: sorted indexes of the first pool's first source that are not drawn.
    """
    return [
        Pool(
            name,
            of_pool,
            quotas[name],
            seed=seed,
            buckets=None if number else buckets,
            square=square,
            shuffle_shards=shuffle_shards,
            aside=() if number else aside,
        )
        for number, (name, of_pool) in enumerate(sources.items())
    ]
