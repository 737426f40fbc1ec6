"""Aspect-ratio buckets: batches of one shape each, so that portraits and landscapes keep most of their
pixels.

All sizes are (height, width).
"""

import math
from collections.abc import Container, Sequence

from lit_sd.data.transforms import Size


def make_buckets(resolution: int, step: int, max_ratio: int | float) -> list[Size]:
    """Shapes of at most `resolution`² pixels, with sides that are multiples of `step`, as large as fit; the
    square one first.

    Raises:
        ValueError: `resolution` is no multiple of `step`, or `max_ratio` is below 1.
    """
    if step < 8 or step % 8:
        raise ValueError(f"data.bucket_step={step}: expected a multiple of 8, the VAE's factor")
    if resolution % step:
        raise ValueError(
            f"data.resolution={resolution} is no multiple of data.bucket_step={step}; "
            f"set data.resolution={max(step, resolution // step * step)} or a smaller step"
        )
    if max_ratio < 1:
        raise ValueError(
            f"data.bucket_max_ratio={max_ratio}: expected the longer side over the shorter, 1 or more"
        )
    area = resolution * resolution
    tall = []
    for height in range(resolution + step, area // step + 1, step):
        width = area // height // step * step
        if height / width > max_ratio:
            break
        tall.append((height, width))
    return [(resolution, resolution), *tall, *((width, height) for height, width in tall)]


def nearest_bucket(size: Size, buckets: Sequence[Size]) -> Size:
    """The bucket whose aspect ratio is nearest, as a factor; of equal ones the first."""
    ratio = math.log(size[0] / size[1])
    return min(buckets, key=lambda bucket: abs(math.log(bucket[0] / bucket[1]) - ratio))


def sort_into_buckets(
    sizes: Sequence[Size], buckets: Sequence[Size], aside: Container[int] = ()
) -> dict[Size, list[int]]:
    """Indexes of the images, but for those `aside`, by the bucket that each belongs to; buckets with no image
    are left out.
    """
    groups: dict[Size, list[int]] = {}
    for index, size in enumerate(sizes):
        if index not in aside:
            groups.setdefault(nearest_bucket(size, buckets), []).append(index)
    return {bucket: groups[bucket] for bucket in buckets if bucket in groups}


def bucket_report(
    groups: dict[Size, list[int]], ids: Sequence[str], draws_per_image: int, step_size: int
) -> list[str]:
    """One line for each bucket: what an epoch keeps of it and what it drops, dropped images by name.

    Args:
        groups: indexes of the images of each bucket.
        ids: the images' names.
        draws_per_image: how often an epoch may draw an image.
        step_size: images of one step over all ranks; whole steps only are made of a bucket.
    """
    lines = []
    for (height, width), indexes in groups.items():
        draws = len(indexes) * draws_per_image
        batches, left = divmod(draws, step_size)
        line = (
            f"bucket {height}x{width}: {len(indexes)} images, {draws} draws = {batches} steps of {step_size}"
        )
        if not batches:
            line += f"; never trained on: {listed([ids[i] for i in indexes])}"
        elif left:
            line += f"; {left} draws left over, other ones each epoch"
        lines.append(line)
    return lines


def listed(names: Sequence[str], limit: int = 20) -> str:
    """The names, joined; beyond `limit` only their number."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
